"""Answers and lines of Ollama's endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec

from pyvelo.outputs import RequestOutput, StreamPiece
from pyvelo.server.errors import HttpError

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream

__all__ = ["OllamaForm", "now"]

_encode = msgspec.json.Encoder().encode


class OllamaForm:
    """Shape of chats or of prompts.

    Args:
        model: name that the client gave.
        as_chat: the text is in a message.
    """

    media_type = "application/x-ndjson"
    ping = b""

    def __init__(self, model: str, *, as_chat: bool) -> None:
        self._model = model
        self._as_chat = as_chat
        self._stream: RequestStream

    def begin(self, stream: RequestStream) -> None:
        """Take the request."""
        self._stream = stream

    def head(self, index: int) -> bytes:
        """Return nothing: the first line has all."""
        return b""

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return one line, unless the piece says nothing."""
        return _encode(self._line(piece.text, done=False)) + b"\n" if piece.text else b""

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return the last line."""
        return _encode(self._last("", usage)) + b"\n"

    def failed(self, error: HttpError) -> bytes:
        """Return the error."""
        return _encode({"error": error.message}) + b"\n"

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        return self._last(outputs[0].text, usage)

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without text, which loads the model in Ollama."""
        return {**self._line("", done=True), "done_reason": "load"}

    def _line(self, text: str, *, done: bool) -> dict[str, Any]:
        shown: dict[str, Any] = {"response": text}
        if self._as_chat:
            shown = {"message": {"role": "assistant", "content": text}}
        return {"model": self._model, "created_at": now(), **shown, "done": done}

    def _last(self, text: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the end, with the reason, and the times in nanoseconds."""
        first = self._stream.requests[0]
        times = first.times(first.parent.end)
        begun = times.end if times.first_token is None else times.first_token
        return {
            **self._line(text, done=True),
            "done_reason": first.finish_reason,
            "total_duration": _nanoseconds(times.end - times.queued),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(begun - times.queued),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(times.end - begun),
        }


def now(time: datetime | None = None) -> str:
    """Return a time, by default the present, as Ollama writes it."""
    return (time or datetime.now(timezone.utc)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
