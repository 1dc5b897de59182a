"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pyvelo.outputs import RequestOutput, StreamPiece
from pyvelo.server.chat import chat_prompt, params_of
from pyvelo.server.errors import HttpError, refused
from pyvelo.server.generation import Job, answer_job, usage_of
from pyvelo.server.http import EVENTS
from pyvelo.server.schemas import (
    MAX_MESSAGES,
    ChatRequest,
    JsonSchemaFormat,
    ResponseFormat,
    Stops,
    convert,
)

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["anthropic_error", "count_tokens", "create_message"]

_encode = msgspec.json.Encoder().encode

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicMessage(Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]


class AnthropicFormat(Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | bool


class AnthropicOutput(Struct, kw_only=True):
    format: AnthropicFormat | None = None
    effort: str | None = None


class AnthropicPrompt(Struct, kw_only=True):
    """Fields that make the prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None
    output_config: AnthropicOutput | None = None
    cache_control: dict[str, Any] | None = None  # prefixes are always cached


class AnthropicRequest(AnthropicPrompt, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: Stops | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None


async def create_message(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Answer a conversation."""
    request = convert(body, AnthropicRequest)
    adapter = serving.check_model(request.model)
    as_chat = _chat(request)
    as_chat.lora = adapter
    as_chat.max_tokens, as_chat.stop = request.max_tokens, request.stop_sequences
    as_chat.temperature, as_chat.top_p, as_chat.top_k = request.temperature, request.top_p, request.top_k
    params = params_of(serving, exchange, ticket, as_chat)
    form = MessageForm(f"msg_{exchange.id}", serving.model_name, request.max_tokens)
    job = Job([partial(chat_prompt, serving, as_chat)], params, form, request.stream)
    return await answer_job(serving, exchange, ticket, job)


async def count_tokens(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the number of tokens of a conversation."""
    request = convert(body, AnthropicPrompt)
    serving.check_model(request.model)
    tokens = await serving.loop.preparer.run(partial(chat_prompt, serving, _chat(request)))
    await exchange.answer({"input_tokens": len(tokens)})


def anthropic_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an error as Anthropic's clients read it."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    found = {"type": _KINDS.get(error.status, default), "message": error.message}
    return {"type": "error", "error": found}


def _chat(request: AnthropicPrompt) -> ChatRequest:
    """Return the conversation as OpenAI's clients write it.

    Messages of the same role are one turn. A last message of the assistant is continued.

    Raises: HttpError at content that is not text.
    """
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _parts(request.system, "system", "system")})
    for number, message in enumerate(request.messages):
        where = f"messages[{number}]"
        if message.role not in ("user", "assistant", "system"):
            raise refused("messages", f"{where}.role={message.role[:64]!r}: give user or assistant")
        parts = _parts(message.content, f"{where}.content", "messages")
        if messages and messages[-1]["role"] == message.role:
            messages[-1]["content"] += parts
        else:
            messages.append({"role": message.role, "content": parts})
    for each in messages:
        if len(each["content"]) < 2:  # templates without parts show it as it is
            each["content"] = "".join(part["text"] for part in each["content"])
    continues = messages[-1]["role"] == "assistant"
    return ChatRequest(
        messages=messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        chat_template_kwargs=_thinking(request.thinking),
        **_output(request.output_config),
    )


def _parts(content: str | list[dict[str, Any]], where: str, param: str) -> list[dict[str, Any]]:
    """Return content as parts of text."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = []
    for number, block in enumerate(blocks):
        part = _part(block, f"{where}[{number}]", param)
        if part is not None:
            parts.append(part)
    return parts


def _part(block: Mapping[str, Any], where: str, param: str) -> dict[str, Any] | None:
    """Return a part of text; None for a block that no later answer depends on."""
    kind = block.get("type")
    if kind == "text":
        if not isinstance(block.get("text"), str):
            raise refused(param, f"{where}.text must be a string")
        return {"type": "text", "text": block["text"]}
    if kind in ("thinking", "redacted_thinking"):
        return None
    raise refused(param, f"{where}.type={str(kind)[:64]!r} is not supported: give text")


def _thinking(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the variable of templates that switches reasoning off."""
    if given is None:
        return None
    if given.get("type") != "disabled":
        raise refused("thinking", "thinking is not supported: reasoning cannot be parsed yet")
    return {"enable_thinking": False}


def _output(given: AnthropicOutput | None) -> dict[str, Any]:
    if given is None:
        return {}
    found: dict[str, Any] = {"reasoning_effort": given.effort}
    if given.format is not None:
        if given.format.type != "json_schema":
            kind = given.format.type[:64]
            raise refused("output_config", f"output_config.format.type={kind!r}: give json_schema")
        schema = JsonSchemaFormat(schema=given.format.schema)
        found["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    return found


class MessageForm:
    """Answers and events of messages."""

    media_type = EVENTS
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, message_id: str, model: str, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._stream: RequestStream
        self._base: dict[str, Any] = {
            **{"id": message_id, "type": "message", "role": "assistant", "model": model},
            **{"content": [], "stop_reason": None, "stop_sequence": None},
        }

    def begin(self, stream: RequestStream) -> None:
        """Take the request."""
        self._stream = stream

    def head(self, index: int) -> bytes:
        """Return the beginning of the message and of its text."""
        message = {**self._base, "usage": {**_usage(usage_of(self._stream)), "output_tokens": 0}}
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return _event("message_start", message=message) + _event("content_block_start", **block) + self.ping

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return one event, unless the piece says nothing."""
        if not piece.text:
            return b""
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return the end of the text and of the message."""
        first = self._stream.requests[0]
        delta = self._stop(first.finish_reason, first.stop_reason, first.n_generated)
        changed = _event("message_delta", delta=delta, usage=_usage(usage))
        return _event("content_block_stop", index=0) + changed + _event("message_stop")

    def failed(self, error: HttpError) -> bytes:
        """Return the error."""
        return b"event: error\ndata: " + _encode(anthropic_error(error)) + b"\n\n"

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        output = outputs[0]
        stop = self._stop(output.finish_reason, output.stop_reason, len(output.token_ids))
        content = [{"type": "text", "text": output.text}]
        return {**self._base, "content": content, **stop, "usage": _usage(usage)}

    def _stop(self, reason: str | None, by: int | str | None, n_new: int) -> dict[str, Any]:
        """Return why the message ended, by Anthropic's names; a timeout has none there."""
        if reason == "stop":
            stopped = isinstance(by, str)
            name = "stop_sequence" if stopped else "end_turn"
            return {"stop_reason": name, "stop_sequence": by if stopped else None}
        if reason == "length":
            reason = "max_tokens" if n_new >= self._max_tokens else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage by Anthropic's names; there, cached tokens are no input tokens."""
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - n_cached,
        "cache_read_input_tokens": n_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
