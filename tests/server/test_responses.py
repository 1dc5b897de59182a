"""/v1/responses through OpenAI's client, against LLM.chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from pyvelo import LLM, SamplingParams
from pyvelo.chat.template import BUILT_IN, ChatTemplate
from pyvelo.errors import RequestError
from pyvelo.server.auth import ANYBODY, Tenant, read_keys
from pyvelo.server.response_form import ResponseForm
from pyvelo.server.response_store import TTL, ResponseStore

from .conftest import Serve
from .servers import Server

QUESTION = "What is a KV cache?"
USER: Any = {"role": "user", "content": QUESTION}
FIELDS: dict[str, Any] = {"model": "demo", "max_output_tokens": 30, "temperature": 0}
PARAMS = SamplingParams(max_tokens=30, temperature=0, top_p=0.95)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as found:
        yield found


@pytest.fixture
def chatml(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a template that shows system messages, which the server has now."""
    monkeypatch.setattr(server.serving.chats, "_known", {"": ChatTemplate(BUILT_IN["chatml"])})
    return "chatml"


def test_an_answer_equals_the_one_of_chat(client: openai.OpenAI, oracle: LLM) -> None:
    expected = oracle.chat([USER], PARAMS)
    response = client.responses.create(input=QUESTION, **FIELDS)
    assert isinstance(response, Response)
    assert response.output_text == expected.text
    assert response.object == "response"
    assert response.model == "demo"
    assert response.temperature == 0
    assert response.max_output_tokens == 30
    done = expected.finish_reason == "stop"
    assert response.status == ("completed" if done else "incomplete")
    assert response.incomplete_details is None or response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.input_tokens == len(expected.prompt_token_ids)
    assert response.usage.output_tokens == len(expected.token_ids)
    again = client.responses.create(input=QUESTION, **FIELDS).usage
    assert again is not None
    assert again.input_tokens_details.cached_tokens > 0


def test_items_and_instructions(client: openai.OpenAI, oracle: LLM, chatml: str) -> None:
    expected = oracle.chat(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": each} for each in ("One.", "Two.")]},
            {"role": "assistant", "content": "Yes."},
            USER,
        ],
        PARAMS,
        chat_template=chatml,
    )
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": each} for each in ("One.", "Two.")]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        USER,
    ]
    response = client.responses.create(input=items, instructions="Be short.", **FIELDS)
    assert response.output_text == expected.text
    assert response.instructions == "Be short."


def test_events(client: openai.OpenAI, oracle: LLM) -> None:
    expected = oracle.chat([USER], PARAMS)
    with client.responses.create(input=QUESTION, stream=True, **FIELDS) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(getattr(event, "delta", "") for event in events) == expected.text
    last: Any = events[-1]
    assert last.type == f"response.{last.response.status}"
    assert last.response.output_text == expected.text
    long = oracle.chat([USER], replace(PARAMS, max_tokens=300))
    assert long.finish_reason == "stop"
    with client.responses.stream(input=QUESTION, **{**FIELDS, "max_output_tokens": 300}) as typed:
        final = typed.get_final_response()
    assert final.output_text == long.text
    assert final.status == "completed"
    assert final.incomplete_details is None


def test_an_error_in_a_stream(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponseForm, "end", broken)
    last: Any = list(client.responses.create(input=QUESTION, stream=True, **FIELDS))[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.message == "it broke"


def broken(*_: Any) -> bytes:
    raise RequestError("it broke")


def test_a_conversation_continues_by_id(client: openai.OpenAI, oracle: LLM, chatml: str) -> None:
    messages: list[dict[str, Any]] = []
    previous = None
    for text in ("What is a block?", "And a table?", "Why?"):
        messages.append({"role": "user", "content": text})
        expected = oracle.chat(
            [{"role": "system", "content": "Be short."}, *messages],
            replace(PARAMS, logprobs=0),
            chat_template=chatml,
        )
        response = client.responses.create(
            input=text,
            instructions="Be short.",
            previous_response_id=previous,
            include=["message.output_text.logprobs"],
            **FIELDS,
        )
        item: Any = response.output[0]
        scored = expected.outputs[0].logprobs or ()
        given = [each.logprob for each in item.content[0].logprobs]
        assert given == pytest.approx([each.logprob for each in scored], abs=1e-4)
        assert response.output_text == expected.text
        assert response.previous_response_id == previous
        assert response.usage is not None
        if previous is not None:
            assert response.usage.input_tokens_details.cached_tokens > 0
        messages.append({"role": "assistant", "content": expected.text})
        previous = response.id
    without = client.responses.create(input="Why?", previous_response_id=previous, stream=True, **FIELDS)
    last: Any = list(without)[-1]
    expected = oracle.chat([*messages, {"role": "user", "content": "Why?"}], PARAMS, chat_template=chatml)
    assert last.response.output_text == expected.text
    assert client.responses.retrieve(last.response.id).output_text == expected.text
    client.responses.delete(last.response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)
    with pytest.raises(openai.BadRequestError, match="was deleted") as raised:
        client.responses.create(input="Why?", previous_response_id=last.response.id, **FIELDS)
    assert raised.value.code == "previous_response_not_found"
    unstored = client.responses.create(input="Why?", store=False, **FIELDS)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(unstored.id)


def test_responses_belong_to_a_key(serve: Serve) -> None:
    server = serve(keys=read_keys(None, ["ann", "bob"]))
    ann, bob = (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("ann", "bob")
    )
    with ann, bob:
        first = ann.responses.create(input=QUESTION, **FIELDS)
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(input="And?", previous_response_id=first.id, **FIELDS)
        usage = bob.responses.create(input=QUESTION, **FIELDS).usage
        assert usage is not None
        assert usage.input_tokens_details.cached_tokens == 0
        assert ann.responses.retrieve(first.id).id == first.id


def test_formats_and_logprobs(client: openai.OpenAI, oracle: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    expected = oracle.chat([USER], replace(PARAMS, json_schema=json.dumps(schema), logprobs=2))
    text: Any = {"format": {"type": "json_schema", "name": "A", "schema": schema, "strict": True}}
    response = client.responses.create(
        input=QUESTION, text=text, include=["message.output_text.logprobs"], top_logprobs=2, **FIELDS
    )
    assert response.output_text == expected.text
    assert expected.text.startswith("{")
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    part: Any = response.output[0]
    logprobs = part.content[0].logprobs
    scored = expected.outputs[0].logprobs
    assert scored is not None
    assert [each.logprob for each in logprobs] == pytest.approx([each.logprob for each in scored])
    assert all(len(each.top_logprobs) <= 2 for each in logprobs)


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "at least 1 item"),
    ({"input": 5}, "input", "int"),
    ({"input": [{"role": "user"}]}, "input", "input[0].content"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input", "input[0].role='tool'"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input", "input[0].call_id"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input", "input[0].arguments"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "input[0].type='item_reference'"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}, "input", "type='text'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "type='input_image'"),
    ({"input": [{"role": "user", "content": ["a"]}]}, "input", "content[0].type='None'"),
    ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input", "content[0].text"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"tools": [{"type": "web_search"}]}, "tools", "not supported"),
    ({"background": True}, "background", "background"),
    ({"conversation": "conv_1"}, "conversation", "conversation"),
    ({"truncation": "all"}, "truncation", "all"),
    ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    ({"top_logprobs": 3}, "top_logprobs", "include"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type='xml'"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "resp_1"),
    ({"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens"),
]


@pytest.mark.parametrize(("change", "param", "named"), CASES, ids=[named for *_, named in CASES])
def test_wrong_input_names_the_field(server: Server, change: dict[str, Any], param: str, named: str) -> None:
    answer = server.post("/v1/responses", {"input": QUESTION, **FIELDS, **change})
    assert answer.status == 400, answer.data
    assert answer.error["param"] == param
    assert named in answer.error["message"]


def test_the_store_forgets_the_oldest_and_the_expired() -> None:
    now = [0.0]
    store = ResponseStore(3, 100, lambda: now[0])
    other = Tenant("other")
    body = b"{}"
    store.add(other, "other", None, [{"role": "user", "content": "a"}], body)
    for name in "abc":
        store.add(ANYBODY, name, None, [], body)
    assert store.turn(ANYBODY, "a") is not None
    store.add(ANYBODY, "d", None, [], body)
    assert [store.body(ANYBODY, name) for name in "abcd"] == [body, None, body, body]
    now[0] = TTL - 1
    before = store.turn(ANYBODY, "c")
    assert before is not None
    now[0] = TTL
    store.expire()
    assert len(store) == 1
    store.add(ANYBODY, "e", before, [{"content": "x" * 90}], body)  # more than all may have
    assert store.body(ANYBODY, "c") is None
    turn = store.turn(ANYBODY, "e")
    assert turn is not None
    assert turn.messages == [{"content": "x" * 90}]
    assert store.body(other, "other") is None
