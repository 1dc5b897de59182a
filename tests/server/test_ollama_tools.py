"""Tools and reasoning of /api/chat: lines of any pieces, and Ollama's client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import ollama
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.outputs import StreamPiece
from pyvelo.server.ollama_form import OllamaForm, _shown
from tests.chat.answers import ANSWERS, NOTE_JSON, QWEN, Answer, function, hermes
from tests.chat.test_tools import cut, parser_of

from .conftest import WithTemplate

COLOURS = ["red", "green"]
PAINT = function("paint", ("colour",), colour={"type": "string", "enum": COLOURS})
SING = function("sing")
CALL = {"function": {"name": "sing", "arguments": {}}}
OPTIONS = {"temperature": 0, "num_predict": 8}


def form_of(answer: Answer) -> OllamaForm:
    form = OllamaForm("demo", as_chat=True)
    form.reader = AnswerReader(parser_of(answer))
    return form


def parts_of(messages: list[dict[str, Any]]) -> tuple[Any, ...]:
    def joined(name: str) -> str:
        return "".join(message.get(name, "") for message in messages)

    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    parsed = tuple((call["name"], call["arguments"]) for call in calls)
    return joined("content").strip(), joined("thinking"), parsed


def messages_of(lines: bytes) -> list[dict[str, Any]]:
    return [json.loads(line)["message"] for line in lines.splitlines()]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 1000), max_size=12))
def test_any_pieces_give_the_message_of_the_whole_text(answer: Answer, places: list[int]) -> None:
    form = form_of(answer)
    lines = [form.piece(0, StreamPiece(text, (1,))) for text in cut(answer.text, places)]
    lines.append(form.piece(0, StreamPiece("", (2,), "stop")))
    parts = parts_of(messages_of(b"".join(lines)))
    assert parts == (answer.content.strip(), answer.reasoning or "", answer.calls)
    assert parts_of([_shown(form.reader.parse(answer.text).parts)]) == parts


def test_a_call_that_was_cut_is_not_shown() -> None:
    text = hermes("now", "{}") + hermes("save", NOTE_JSON)[:-30]
    form = form_of(Answer(QWEN, text))
    found = parts_of(messages_of(form.piece(0, StreamPiece(text, (1,), "length"))))
    assert found == ("", "", (("now", {}),))
    assert parts_of([_shown(form.reader.parse(text).parts)]) == found


@pytest.fixture
def connect(with_template: WithTemplate) -> Iterator[Callable[[str], ollama.Client]]:
    with ExitStack() as stack:

        def start(template: str) -> ollama.Client:
            client = ollama.Client(host=with_template(template).url)
            stack.callback(client._client.close)
            return client

        yield start


def test_calls_and_results_in_the_history(connect: Callable[[str], ollama.Client]) -> None:
    client = connect(QWEN)
    question: Any = {"role": "user", "content": "Sing."}
    turns: Any = [
        question,
        {"role": "assistant", "content": "", "thinking": "La?", "tool_calls": [CALL]},
        {"role": "tool", "content": "la la", "tool_name": "sing"},
    ]
    counts = [
        client.chat("demo", messages, tools=[PAINT, SING], options=OPTIONS).prompt_eval_count
        for messages in ([question], turns[:2], turns)
    ]
    assert counts == sorted(set(counts), key=lambda count: count or 0)
    answer = client.chat("demo", [question], tools=[PAINT], options=OPTIONS).message
    assert answer.content
    assert answer.tool_calls is None


def test_reasoning_through_the_client(connect: Callable[[str], ollama.Client]) -> None:
    client = connect("Qwen-QwQ-32B")
    question: Any = [{"role": "user", "content": "Hi"}]
    message = client.chat("demo", question, think=True, options=OPTIONS).message
    assert message.thinking
    assert message.content == ""
    pieces = list(client.chat("demo", question, think=True, options=OPTIONS, stream=True))
    assert "".join(piece.message.thinking or "" for piece in pieces) == message.thinking
    generated = client.generate("demo", "Hi", think=True, options=OPTIONS)
    assert (generated.thinking, generated.response) == (message.thinking, "")
    off = client.chat("demo", question, think=False, options=OPTIONS).message
    assert off.thinking is None
    assert off.content
    assert client.show("demo").capabilities == ["completion", "tools", "thinking"]


@pytest.mark.parametrize("tools", [[{"type": "function"}], [PAINT, PAINT]])
def test_wrong_tools(with_template: WithTemplate, tools: Any) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    answer = with_template(QWEN).post("/api/chat", body)
    assert answer.status == 400
    assert "tools[" in answer.error
