"""Tool calls and reasoning over HTTP: events of any pieces, and calls that a grammar requires."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.outputs import Completion, RequestOutput, RequestTimes, StreamPiece, Usage
from pyvelo.server.chat import ChatForm
from pyvelo.server.schemas import ChatRequest
from pyvelo.server.serving import Serving
from tests.chat.answers import ANSWERS, QWEN, Answer, function
from tests.chat.test_tools import cut, parser_of

from .conftest import WithTemplate

COLOURS = ["red", "green"]
PAINT = function("paint", ("colour",), colour={"type": "string", "enum": COLOURS})
SING = function("sing", ("loud",), loud={"type": "boolean"})
QUESTION = [{"role": "user", "content": "Paint it."}]


def form_of(answer: Answer) -> ChatForm:
    serving = SimpleNamespace(model_name="demo", fingerprint="f", token_text=str)
    form = ChatForm(cast(Serving, serving), "id", ChatRequest(messages=[{}]))
    form.reader = AnswerReader(parser_of(answer))
    return form


def deltas_of(events: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the deltas of events, and the finish reasons."""
    found = [json.loads(event[6:])["choices"][0] for event in events.split(b"\n\n") if event]
    return [choice["delta"] for choice in found], [c["finish_reason"] for c in found if c["finish_reason"]]


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of deltas, as a client joins them."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append(
                    {"id": part["id"], "type": part["type"], "function": {"name": part["function"]["name"]}}
                )
                calls[-1]["function"]["arguments"] = ""
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message | {"tool_calls": calls}


@given(
    st.sampled_from(ANSWERS), st.lists(st.integers(0, 1000), max_size=12), st.sampled_from(["stop", "length"])
)
def test_any_pieces_give_the_message_of_the_whole_text(answer: Answer, places: list[int], end: Any) -> None:
    form, pieces = form_of(answer), list(cut(answer.text, places))
    events = [form.piece(0, StreamPiece(text, (1,))) for text in pieces]
    deltas, reasons = deltas_of(b"".join([*events, form.piece(0, StreamPiece("", (2,), end))]))
    message = joined(deltas)
    calls = message["tool_calls"]
    assert message["content"].strip() == answer.content.strip()
    assert message["reasoning_content"] == (answer.reasoning or "")
    parsed = tuple((call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls)
    assert parsed == answer.calls
    assert reasons == ["tool_calls" if answer.calls and end == "stop" else end]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.template)
def test_the_whole_answer_has_the_same_parts(answer: Answer) -> None:
    sample = Completion(0, answer.text, (1,), "stop")
    output = RequestOutput(None, (1,), (sample,), Usage(1, 0, 1), RequestTimes(0.0, 0.0, 0.0))
    [choice] = form_of(answer).answer([output], {})["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert (message["content"] or "").strip() == answer.content.strip()
    assert message.get("reasoning_content") == answer.reasoning
    assert [call["function"]["name"] for call in calls] == [name for name, _ in answer.calls]
    assert choice["finish_reason"] == ("tool_calls" if answer.calls else "stop")


@pytest.fixture
def client(with_template: WithTemplate) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{with_template(QWEN).url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "demo", "messages": QUESTION, "max_tokens": 600, "tools": [PAINT, SING]}
    given |= {"temperature": 0, "parallel_tool_calls": False}
    return client.chat.completions.create(**(given | more))


def test_a_required_call_follows_its_schema(client: OpenAI) -> None:
    choice = ask(client, tool_choice="required", tools=[PAINT]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "paint")
    assert json.loads(call.function.arguments)["colour"] in COLOURS


def test_the_named_function_is_called(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "sing"}}
    [call] = ask(client, tool_choice=named).choices[0].message.tool_calls
    assert call.function.name == "sing"
    assert json.loads(call.function.arguments)["loud"] in (True, False)


def test_a_stream_has_the_same_call(client: OpenAI) -> None:
    given = {"tool_choice": "required", "tools": [PAINT]}
    [whole] = ask(client, **given).choices[0].message.tool_calls
    choices = [event.choices[0] for event in ask(client, **given, stream=True) if event.choices]
    message = joined([choice.delta.model_dump(exclude_none=True) for choice in choices])
    [call] = message["tool_calls"]
    assert call["function"] == {"name": whole.function.name, "arguments": whole.function.arguments}
    assert choices[-1].finish_reason == "tool_calls"


def test_no_call_if_none_is_wanted(client: OpenAI) -> None:
    assert ask(client, tool_choice="none").choices[0].message.tool_calls is None


@pytest.mark.parametrize("arguments", ["{", "", "no JSON", '["a list"]'])
def test_arguments_in_the_history_may_be_anything(client: OpenAI, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": arguments}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "painted"},
    ]
    assert ask(client, messages=history, max_tokens=2).choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tool_choice": {"type": "function", "function": {"name": "dance"}}},
        {"tool_choice": "always"},
        {"tools": [{"type": "function"}]},
        {"tools": [PAINT, PAINT]},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
def test_what_cannot_be_called_is_refused(client: OpenAI, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        ask(client, **wrong)


def test_text_that_is_no_unicode_is_refused(client: OpenAI) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "paint", "arguments": '{"colour": "\\ud800"}'},
    }
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(BadRequestError, match="Unicode"):
        ask(client, messages=history)
