"""Tools and reasoning of /v1/responses: items of any pieces, and OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.outputs import Completion, RequestOutput, RequestTimes, StreamPiece, Usage
from pyvelo.server.contents import with_names
from pyvelo.server.response_form import ResponseForm
from pyvelo.server.response_items import chat_messages
from pyvelo.server.serving import Serving
from tests.chat.answers import ANSWERS, QWEN, Answer
from tests.chat.test_tools import cut, parser_of

from .conftest import WithTemplate

COLOURS = ["red", "green"]
PAINT: Any = {
    "type": "function",
    "name": "paint",
    "description": "Paints.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": COLOURS}},
        "required": ["colour"],
    },
}
SING: Any = {"type": "function", "name": "sing", "parameters": {"type": "object", "properties": {}}}
FIELDS: dict[str, Any] = {"model": "demo", "input": "Paint it.", "temperature": 0, "max_output_tokens": 600}
USAGE = {
    **{"prompt_tokens": 1, "completion_tokens": 1000, "total_tokens": 1001},
    "prompt_tokens_details": {"cached_tokens": 0},
}


def form_of(answer: Answer) -> ResponseForm:
    model = SimpleNamespace(tokenize=lambda text, add_special: text.split())
    serving = SimpleNamespace(loop=SimpleNamespace(engine=SimpleNamespace(model=model)))
    form = ResponseForm(cast(Serving, serving), {"id": "resp_1"}, lambda response: None)
    form.reader = AnswerReader(parser_of(answer))
    return form


def items_of(events: bytes) -> list[dict[str, Any]]:
    """Return the items of events; what their deltas say is what they have at the end."""
    items: list[dict[str, Any]] = []
    said = ""
    for number, event in enumerate(filter(None, events.split(b"\n\n"))):
        found = json.loads(event.split(b"\ndata: ")[1])
        assert found["sequence_number"] == number
        assert found.get("output_index", len(items)) == len(items)
        kind = found["type"].removeprefix("response.")
        if kind == "output_item.added":
            said = ""
            begun = found["item"]
        elif kind.endswith(".delta"):
            assert found["item_id"] == begun["id"]
            said += found["delta"]
        elif kind == "output_item.done":
            item = found["item"]
            assert item["id"] == begun["id"]
            assert said == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
            items.append(item)
    return items


def parts_of(items: list[dict[str, Any]]) -> tuple[Any, ...]:
    def joined(kind: str) -> str:
        return "".join(item["content"][0]["text"] for item in items if item["type"] == kind)

    calls = [item for item in items if item["type"] == "function_call"]
    assert all(call["call_id"] for call in calls)
    parsed = tuple((call["name"], json.loads(call["arguments"])) for call in calls)
    return joined("message").strip(), joined("reasoning"), parsed


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 1000), max_size=12))
def test_any_pieces_give_the_items_of_the_whole_text(answer: Answer, places: list[int]) -> None:
    form = form_of(answer)
    events = [form.piece(0, StreamPiece(text, (1,))) for text in cut(answer.text, places)]
    events += [form.piece(0, StreamPiece("", (2,), "stop")), form._items.end("completed", [])]
    items = items_of(b"".join(events))
    assert parts_of(items) == (answer.content.strip(), answer.reasoning or "", answer.calls)
    sample = Completion(0, answer.text, (1,), "stop")
    output = RequestOutput(None, (1,), (sample,), Usage(1, 0, 1), RequestTimes(0.0, 0.0, 0.0))
    response = form_of(answer).answer([output], USAGE)
    assert parts_of(response["output"]) == parts_of(items)
    assert {item["status"] for item in response["output"]} == {"completed"}
    n_reasoning = len((answer.reasoning or "").split())
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": n_reasoning}


def test_items_of_one_turn_are_one_message() -> None:
    items: Any = [
        {"role": "user", "content": "Paint it."},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Red?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Now."}]},
        {"type": "function_call", "call_id": "1", "name": "paint", "arguments": '{"colour": "red"}'},
        {"type": "function_call", "call_id": "2", "name": "sing", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "la"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Done."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "3", "name": "sing", "arguments": "{}"},
        {"role": "assistant", "content": "Ready."},
    ]

    def call(name: str, function: str, arguments: str = "{}") -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}

    calls = [call("1", "paint", '{"colour": "red"}'), call("2", "sing")]
    assert with_names(chat_messages(items)) == [
        {"role": "user", "content": "Paint it."},
        {"role": "assistant", "content": "Now.", "reasoning_content": "Red?", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "done", "name": "paint"},
        {"role": "tool", "tool_call_id": "2", "content": "la", "name": "sing"},
        {
            **{"role": "assistant", "content": "", "reasoning_content": "Done."},
            "tool_calls": [call("3", "sing")],
        },
        {"role": "assistant", "content": "Ready."},
    ]


Connect = Callable[[str], openai.OpenAI]


@pytest.fixture
def connect(with_template: WithTemplate) -> Iterator[Connect]:
    clients: list[openai.OpenAI] = []

    def start(template: str) -> openai.OpenAI:
        url = f"{with_template(template).url}/v1"
        clients.append(openai.OpenAI(base_url=url, api_key="any", max_retries=0))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "paint"}])
def test_a_call_through_the_client(connect: Connect, choice: Any) -> None:
    client = connect(QWEN)
    given = {**FIELDS, "tools": [PAINT] if choice == "required" else [SING, PAINT], "tool_choice": choice}
    given["parallel_tool_calls"] = False
    response = client.responses.create(**given)
    assert response.status == "completed"
    [item] = response.output
    assert item.type == "function_call"
    assert item.name == "paint"
    assert json.loads(item.arguments)["colour"] in COLOURS
    assert response.tool_choice is not None
    assert [tool.type for tool in response.tools] == ["function"] * len(given["tools"])
    with client.responses.stream(**given) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    [same] = final.output
    assert same.type == "function_call"
    assert same.arguments == item.arguments == "".join(deltas)
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "painted"}
    more = {**FIELDS, "max_output_tokens": 3, "tools": [PAINT]}
    later = client.responses.create(**{**more, "input": [result]}, previous_response_id=response.id)
    question: Any = {"role": "user", "content": "Paint it."}
    apart = client.responses.create(**{**more, "input": [question, item.model_dump(), result]})
    assert later.usage is not None
    assert apart.usage is not None
    assert later.usage.input_tokens == apart.usage.input_tokens
    assert later.output_text == apart.output_text


def test_reasoning_through_the_client(connect: Connect) -> None:
    client = connect("Qwen-QwQ-32B")
    given = {**FIELDS, "max_output_tokens": 8, "include": ["reasoning.encrypted_content"]}
    given["reasoning"] = {"effort": "high"}
    response = client.responses.create(**given)
    [item] = response.output
    assert item.type == "reasoning"
    assert item.content
    assert item.status == response.status == "incomplete"
    text = item.content[0].text
    events = list(client.responses.create(**given, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == text
    assert [event.text for event in events if event.type == "response.reasoning_text.done"] == [text]
    with client.responses.stream(**given) as stream:
        assert list(stream)[-1].type == "response.incomplete"
    off = client.responses.create(**{**given, "reasoning": {"effort": "none"}})
    assert [item.type for item in off.output] == ["message"]


def test_an_empty_answer_is_an_empty_message() -> None:
    form = form_of(ANSWERS[0])
    [item] = items_of(form.piece(0, StreamPiece("", (1,), "stop")) + form._items.end("completed", []))
    assert (item["type"], item["content"][0]["text"]) == ("message", "")
