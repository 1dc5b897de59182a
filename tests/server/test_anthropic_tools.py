"""Tools and reasoning of /v1/messages: blocks of any pieces, and Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.outputs import Completion, RequestOutput, RequestTimes, StreamPiece, Usage
from pyvelo.server.anthropic_form import MessageForm
from pyvelo.server.anthropic_messages import AnthropicMessage, chat_messages
from tests.chat.answers import ANSWERS, QWEN, Answer
from tests.chat.test_tools import cut, parser_of

from .conftest import WithTemplate

PAINT: Any = {
    "name": "paint",
    "description": "Paints.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
        "required": ["colour"],
    },
}
SING: Any = {"name": "sing", "input_schema": {"type": "object", "properties": {}}}
USER: Any = {"role": "user", "content": "Paint it."}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


def form_of(answer: Answer) -> MessageForm:
    form = MessageForm("msg_1", "demo", 100)
    form.reader = AnswerReader(parser_of(answer))
    return form


def blocks_of(events: bytes) -> list[dict[str, Any]]:
    """Return the blocks of events, as clients join them; each ends before the next begins."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in filter(None, events.split(b"\n\n")):
        found = json.loads(event.split(b"\ndata: ")[1])
        if found["type"] == "content_block_start":
            assert not is_open
            assert found["index"] == len(blocks)
            blocks.append(found["content_block"])
        elif found["type"] == "content_block_delta":
            assert is_open
            assert found["index"] == len(blocks) - 1
            kind, value = found["delta"].popitem()
            blocks[-1][kind] = blocks[-1].get(kind, "") + value
        is_open = found["type"] != "content_block_stop"
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


def parts_of(blocks: list[dict[str, Any]]) -> tuple[Any, ...]:
    def joined(name: str) -> str:
        return "".join(block.get(name, "") for block in blocks)

    calls = tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
    return joined("text").strip(), joined("thinking"), calls


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 1000), max_size=12))
def test_any_pieces_give_the_blocks_of_the_whole_text(answer: Answer, places: list[int]) -> None:
    form = form_of(answer)
    events = [form.piece(0, StreamPiece(text, (1,))) for text in cut(answer.text, places)]
    events += [form.piece(0, StreamPiece("", (2,), "stop")), form._end()]
    blocks = blocks_of(b"".join(events))
    assert parts_of(blocks) == (answer.content.strip(), answer.reasoning or "", answer.calls)
    sample = Completion(0, answer.text, (1,), "stop")
    output = RequestOutput(None, (1,), (sample,), Usage(1, 0, 1), RequestTimes(0.0, 0.0, 0.0))
    message = form_of(answer).answer([output], USAGE)
    assert parts_of(message["content"]) == parts_of(blocks)
    assert message["stop_reason"] == ("tool_use" if answer.calls else "end_turn")


def test_a_conversation_with_tools() -> None:
    use: Any = {"type": "tool_use", "id": "1", "name": "paint", "input": {"colour": "red"}}
    results: Any = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "done"}]},
        {"type": "tool_result", "tool_use_id": "x"},
        {"type": "text", "text": "Go on."},
    ]
    thought: Any = {"type": "thinking", "thinking": "Red?", "signature": "s"}
    found = chat_messages(
        "Be short.",
        [
            AnthropicMessage(role="user", content="Paint it."),
            AnthropicMessage(role="assistant", content=[thought, {"type": "text", "text": "Now."}, use]),
            AnthropicMessage(role="user", content=results),
        ],
    )
    function = {"name": "paint", "arguments": {"colour": "red"}}
    assert found == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Paint it."},
        {
            "role": "assistant",
            "content": "Now.",
            "reasoning_content": "Red?",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done", "name": "paint"},
        {"role": "tool", "tool_call_id": "x", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


@pytest.fixture
def connect(with_template: WithTemplate) -> Iterator[Callable[[str], anthropic.Anthropic]]:
    clients: list[anthropic.Anthropic] = []

    def start(template: str) -> anthropic.Anthropic:
        client = anthropic.Anthropic(base_url=with_template(template).url, api_key="any", max_retries=0)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()


FIELDS: dict[str, Any] = {
    **{"model": "demo", "max_tokens": 600, "messages": [USER], "tools": [PAINT, SING]},
    "extra_body": {"temperature": 0},
}


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "paint"}]
)
def test_a_call_through_the_client(connect: Callable[[str], anthropic.Anthropic], choice: Any) -> None:
    client = connect(QWEN)
    tools = [PAINT] if choice["type"] == "any" else [SING, PAINT]
    given = {**FIELDS, "tools": tools, "tool_choice": choice}
    message = client.messages.create(**given)
    assert message.stop_reason == "tool_use"
    [block] = message.content
    assert block.type == "tool_use"
    assert block.name == "paint"
    assert block.input["colour"] in ("red", "green")
    with client.messages.stream(**given) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert [one.input for one in final.content if one.type == "tool_use"] == [block.input]
    assert final.stop_reason == "tool_use"
    assert "input_json" in events
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "painted"}
    turns: Any = [
        USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    later = client.messages.create(**{**FIELDS, "messages": turns, "max_tokens": 3})
    assert later.usage.output_tokens == 3
    bare = client.messages.count_tokens(model="demo", messages=[USER]).input_tokens
    assert client.messages.count_tokens(model="demo", messages=[USER], tools=[PAINT]).input_tokens > bare


def test_no_call_if_none_is_wanted(connect: Callable[[str], anthropic.Anthropic]) -> None:
    message = connect(QWEN).messages.create(**{**FIELDS, "max_tokens": 8}, tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]


def test_reasoning_through_the_client(connect: Callable[[str], anthropic.Anthropic]) -> None:
    client = connect("Qwen-QwQ-32B")
    given = {**FIELDS, "max_tokens": 8, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = client.messages.create(**given)
    [block] = message.content
    assert block.type == "thinking"
    assert block.thinking
    with client.messages.stream(**given) as stream:
        assert stream.get_final_message().content == message.content
