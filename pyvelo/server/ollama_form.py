"""Answers and lines of Ollama's endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.outputs import Delta, RequestOutput, StreamPiece
from pyvelo.server.answers import arguments_of
from pyvelo.server.errors import HttpError
from pyvelo.server.http import encoded

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream

__all__ = ["OllamaForm", "now"]


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
        self.reader = AnswerReader()
        self._call: list[Delta] = []  # deltas of the call that is not complete
        self._stream: RequestStream

    def begin(self, stream: RequestStream) -> None:
        """Take the request."""
        self._stream = stream

    def head(self, index: int) -> bytes:
        """Return nothing: the first line has all."""
        return b""

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return a line for each part that the piece adds; a call has one when it is complete."""
        parts: list[Delta] = []
        for delta in self.reader.push(index, piece):
            if self._call and self._call[-1].part != delta.part:
                parts.append(self._called())
            if delta.index is None:
                parts.append(delta)
            else:
                self._call.append(delta)
        if self._call and piece.finish_reason is not None:
            parts.append(self._called())
        shown = [_shown([part]) for part in parts]
        return b"".join(encoded(self._line(each, done=False)) + b"\n" for each in shown if each)

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return the last line."""
        return encoded(self._last({}, usage)) + b"\n"

    def failed(self, error: HttpError) -> bytes:
        """Return the error."""
        return encoded({"error": error.message}) + b"\n"

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        return self._last(_shown(self.reader.parse(outputs[0].text).parts), usage)

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without text, which loads the model in Ollama."""
        return {**self._line({}, done=True), "done_reason": "load"}

    def _called(self) -> Delta:
        """Return the call whose deltas came, as one."""
        first, arguments = self._call[0], "".join(delta.arguments for delta in self._call)
        self._call = []
        return replace(first, arguments=arguments)

    def _line(self, shown: dict[str, Any], *, done: bool) -> dict[str, Any]:
        text = shown.get("content", "")
        known = {"model": self._model, "created_at": now(), "done": done}
        if self._as_chat:
            return {**known, "message": {"role": "assistant", **shown, "content": text}}
        thought = {"thinking": shown["thinking"]} if "thinking" in shown else {}
        return {**known, "response": text, **thought}

    def _last(self, shown: dict[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the end, with the reason, and the times in nanoseconds."""
        first = self._stream.requests[0]
        times = first.times(first.parent.end)
        begun = times.end if times.first_token is None else times.first_token
        return {
            **self._line(shown, done=True),
            "done_reason": first.finish_reason,
            "total_duration": _nanoseconds(times.end - times.queued),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(begun - times.queued),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(times.end - begun),
        }


def _shown(parts: Sequence[Delta]) -> dict[str, Any]:
    """Return the fields of a message with these parts, without a call that was cut."""
    shown: dict[str, Any] = {}
    for part in parts:
        if part.index is not None:
            arguments = arguments_of(part.arguments)
            if arguments is not None:
                function = {"index": part.index, "name": part.name, "arguments": arguments}
                shown.setdefault("tool_calls", []).append({"id": part.id, "function": function})
        elif part.reasoning:
            shown["thinking"] = part.reasoning
        else:
            shown["content"] = part.content
    return shown


def now(time: datetime | None = None) -> str:
    """Return a time, by default the present, as Ollama writes it."""
    return (time or datetime.now(timezone.utc)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
