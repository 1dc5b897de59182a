"""/v1/messages through Anthropic's client, against LLM.chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock

from pyvelo import LLM, SamplingParams
from pyvelo.chat.template import BUILT_IN, ChatTemplate
from pyvelo.errors import RequestError
from pyvelo.server.anthropic_form import MessageForm, anthropic_error
from pyvelo.server.anthropic_messages import AnthropicMessage, chat_messages
from pyvelo.server.auth import read_keys
from pyvelo.server.errors import HttpError

from .conftest import Serve
from .servers import Server

USER: Any = {"role": "user", "content": "What is a KV cache?"}
FIELDS: dict[str, Any] = {"model": "demo", "max_tokens": 40, "extra_body": {"temperature": 0}}
RAW = {"model": "demo", "max_tokens": 40}
PARAMS = SamplingParams(max_tokens=40, temperature=0, top_p=0.95)


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as found:
        yield found


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert isinstance(block, TextBlock)
    return block.text


@pytest.fixture
def chatml(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a template that shows system messages, which the server has now."""
    monkeypatch.setattr(server.serving.chats, "_known", {"": ChatTemplate(BUILT_IN["chatml"])})
    return "chatml"


def test_an_answer_equals_the_one_of_chat(client: anthropic.Anthropic, oracle: LLM) -> None:
    expected = oracle.chat([USER], PARAMS)
    message = client.messages.create(messages=[USER], **FIELDS)
    assert text_of(message) == expected.text
    assert message.role == "assistant"
    assert message.model == "demo"
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason]
    assert message.usage.output_tokens == len(expected.token_ids)
    again = client.messages.create(messages=[USER], **FIELDS).usage
    assert again.cache_read_input_tokens is not None
    assert again.cache_read_input_tokens > 0
    n_prompt = len(expected.prompt_token_ids)
    assert again.input_tokens + again.cache_read_input_tokens == n_prompt
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == n_prompt


def test_system_blocks_and_turns(client: anthropic.Anthropic, oracle: LLM, chatml: str) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "?", "signature": ""}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "One."},
        {"role": "user", "content": [{"type": "text", "text": "Two."}]},
    ]
    expected = oracle.chat(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": [{"type": "text", "text": each} for each in ("One.", "Two.")]},
        ],
        PARAMS,
        chat_template=chatml,
    )
    for system in ("Be short.", [{"type": "text", "text": "Be short."}]):
        given: Any = {"messages": turns, "system": system, "thinking": {"type": "disabled"}}
        assert text_of(client.messages.create(**given, **FIELDS)) == expected.text
        counted = client.messages.count_tokens(model="demo", **given)
        assert counted.input_tokens == len(expected.prompt_token_ids)


def test_the_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic, oracle: LLM) -> None:
    turns: Any = [USER, {"role": "assistant", "content": "A KV cache is"}]
    expected = oracle.chat(turns, PARAMS, continue_final_message=True)
    assert text_of(client.messages.create(messages=turns, **FIELDS)) == expected.text


def test_events(client: anthropic.Anthropic, oracle: LLM) -> None:
    expected = oracle.chat([USER], PARAMS)
    with client.messages.create(messages=[USER], stream=True, **FIELDS) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(messages=[USER], **FIELDS) as events:
        assert "".join(events.text_stream) == expected.text
        message = events.get_final_message()
    assert text_of(message) == expected.text
    assert message.usage.output_tokens == len(expected.token_ids)
    assert message.stop_reason in ("end_turn", "max_tokens")


def test_pings_and_bytes_of_events(server: Server) -> None:
    answer = server.post("/v1/messages", {**RAW, "max_tokens": 1, "messages": [USER], "stream": True})
    blocks = answer.data.decode().split("\n\n")
    assert blocks[1] == 'event: ping\ndata: {"type":"ping"}'
    assert blocks.pop() == ""
    assert [block.split("\n")[0] for block in blocks[-3:]] == [
        "event: content_block_stop",
        "event: message_delta",
        "event: message_stop",
    ]


def test_an_error_in_a_stream(client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageForm, "end", broken)
    with (
        pytest.raises(anthropic.APIStatusError, match="it broke") as raised,
        client.messages.create(messages=[USER], stream=True, **FIELDS) as stream,
    ):
        list(stream)
    body: Any = raised.value.body
    assert body["error"] == {"type": "invalid_request_error", "message": "it broke"}


def broken(*_: Any) -> bytes:
    raise RequestError("it broke")


def test_stop_sequences_and_lengths(client: anthropic.Anthropic, oracle: LLM) -> None:
    whole = oracle.chat([USER], PARAMS).text
    stop = whole[10:14]
    message = client.messages.create(messages=[USER], stop_sequences=["\x00", stop], **FIELDS)
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == stop
    assert text_of(message) == whole[: whole.index(stop)]
    short = client.messages.create(messages=[USER], **{**FIELDS, "max_tokens": 3})
    assert short.stop_reason == "max_tokens"
    assert short.usage.output_tokens == 3


def test_structured_answers(client: anthropic.Anthropic, oracle: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    expected = oracle.chat([USER], replace(PARAMS, json_schema=json.dumps(schema)))
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(messages=[USER], output_config=config, **FIELDS)
    assert text_of(message) == expected.text
    assert expected.text.startswith("{")


CASES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role='tool'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "content[0].type='image'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "content[0].type='document'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "content[0].type='None'"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"system": [{"type": "image"}]}, "system[0].type='image'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type='bash_20250124'"),
    ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice: give"),
    ({"tool_choice": {"type": "any"}}, "tool_choice='required' needs tools"),
    ({"thinking": {"type": "always"}}, "thinking.type='always'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "content[0].type='tool_use'"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "content[0].name"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": [""]}, "stop"),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config"),
    ({"max_token": 5}, "did you mean max_tokens"),
]


@pytest.mark.parametrize(("change", "named"), CASES, ids=[named for _, named in CASES])
def test_wrong_input_names_the_field(server: Server, change: dict[str, Any], named: str) -> None:
    answer = server.post("/v1/messages", {**RAW, "messages": [USER], **change})
    assert answer.status == 400, answer.data
    assert answer.json["type"] == "error"
    assert answer.error["type"] == "invalid_request_error"
    assert named in answer.error["message"]


def test_the_client_knows_the_errors(client: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="other") as raised:
        client.messages.create(messages=[USER], **{**FIELDS, "model": "other"})
    body: Any = raised.value.body
    assert body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="the prompt"):
        client.messages.create(messages=[{"role": "user", "content": "long " * 600}], **FIELDS)
    assert server.get("/v1/messages").json["error"]["type"] == "invalid_request_error"
    kinds = {status: anthropic_error(HttpError(status, ""))["error"]["type"] for status in (429, 500, 503)}
    assert kinds == {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}


def test_keys(serve: Serve) -> None:
    server = serve(keys=read_keys(None, ["secret"]))
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        assert client.messages.create(messages=[USER], **{**FIELDS, "max_tokens": 2}).usage.output_tokens == 2
    with (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as raised,
    ):
        client.messages.create(messages=[USER], **FIELDS)
    body: Any = raised.value.body
    assert body["error"]["type"] == "authentication_error"


def test_thoughts_of_a_turn_are_joined() -> None:
    blocks: list[Any] = [{"type": "thinking", "thinking": text} for text in ("a", "", "b")]
    turns = [AnthropicMessage(role="assistant", content=blocks), AnthropicMessage(role="user", content="?")]
    assert chat_messages(None, [*turns, *turns])[0]["reasoning_content"] == "ab"
    assert chat_messages(None, turns[:1] * 2)[0]["reasoning_content"] == "abab"
