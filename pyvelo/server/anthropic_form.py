"""Answers and events of /v1/messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.outputs import Delta, RequestOutput, StreamPiece
from pyvelo.server.answers import arguments_of
from pyvelo.server.errors import HttpError
from pyvelo.server.generation import usage_of
from pyvelo.server.http import EVENTS, encoded

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream

__all__ = ["MessageForm", "anthropic_error"]


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an error as Anthropic's clients read it."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    found = {"type": _KINDS.get(error.status, default), "message": error.message}
    return {"type": "error", "error": found}


class MessageForm:
    """Answers and events of messages: each part of an answer is a block."""

    media_type = EVENTS
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, message_id: str, model: str, max_tokens: int) -> None:
        self.reader = AnswerReader()
        self._max_tokens = max_tokens
        self._stream: RequestStream
        self._part: str | int | None = None  # of the block that is open
        self._n_blocks = 0  # that have ended
        self._base: dict[str, Any] = {
            **{"id": message_id, "type": "message", "role": "assistant", "model": model},
            **{"content": [], "stop_reason": None, "stop_sequence": None},
        }

    def begin(self, stream: RequestStream) -> None:
        """Take the request."""
        self._stream = stream

    def head(self, index: int) -> bytes:
        """Return the beginning of the message."""
        message = {**self._base, "usage": {**_usage(usage_of(self._stream)), "output_tokens": 0}}
        return _event("message_start", message=message) + self.ping

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return the events of a piece, none if it says nothing."""
        return b"".join(self._delta(delta) for delta in self.reader.push(index, piece))

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return the end of the last block and of the message."""
        first = self._stream.requests[0]
        empty = b"" if self._part is not None else self._begin(Delta())
        delta = self._stop(
            first.finish_reason, first.stop_reason, first.n_generated, bool(self.reader.called)
        )
        changed = _event("message_delta", delta=delta, usage=_usage(usage))
        return empty + self._end() + changed + _event("message_stop")

    def failed(self, error: HttpError) -> bytes:
        """Return the error."""
        return b"event: error\ndata: " + encoded(anthropic_error(error)) + b"\n\n"

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        output = outputs[0]
        found = self.reader.parse(output.text)
        n_new = len(output.token_ids)
        stop = self._stop(output.finish_reason, output.stop_reason, n_new, bool(found.tool_calls))
        content = [_block(part) for part in found.parts or [Delta()]]
        return {**self._base, "content": content, **stop, "usage": _usage(usage)}

    def _delta(self, delta: Delta) -> bytes:
        """Return the event of a delta, after the beginning of its block."""
        begun = b""
        if delta.part != self._part:
            begun = (b"" if self._part is None else self._end()) + self._begin(delta)
        if delta.index is not None:
            if not delta.arguments:
                return begun
            added = {"type": "input_json_delta", "partial_json": delta.arguments}
        elif delta.reasoning:
            added = {"type": "thinking_delta", "thinking": delta.reasoning}
        else:
            added = {"type": "text_delta", "text": delta.content}
        return begun + _event("content_block_delta", index=self._n_blocks, delta=added)

    def _begin(self, delta: Delta) -> bytes:
        self._part = delta.part
        empty = _block(Delta(index=delta.index, id=delta.id, name=delta.name), str(delta.part))
        return _event("content_block_start", index=self._n_blocks, content_block=empty)

    def _end(self) -> bytes:
        self._n_blocks += 1
        return _event("content_block_stop", index=self._n_blocks - 1)

    def _stop(self, reason: str | None, by: int | str | None, n_new: int, calls: bool) -> dict[str, Any]:
        """Return why the message ended, by Anthropic's names; a timeout has none there."""
        if reason == "stop":
            if calls:
                return {"stop_reason": "tool_use", "stop_sequence": None}
            stopped = isinstance(by, str)
            name = "stop_sequence" if stopped else "end_turn"
            return {"stop_reason": name, "stop_sequence": by if stopped else None}
        if reason == "length":
            reason = "max_tokens" if n_new >= self._max_tokens else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


def _block(delta: Delta, part: str | int | None = None) -> dict[str, Any]:
    """Return a part of an answer as a block."""
    if delta.index is not None:
        given = arguments_of(delta.arguments) or {}
        return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": given}
    if (part or delta.part) == "reasoning":
        return {"type": "thinking", "thinking": delta.reasoning, "signature": ""}
    return {"type": "text", "text": delta.content}


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
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encoded({"type": kind, **fields}))
