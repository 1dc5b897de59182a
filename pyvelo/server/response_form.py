"""Answers and events of /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.engine.output import outputs_of
from pyvelo.outputs import Delta, RequestOutput, StreamPiece
from pyvelo.server.chat import logprob_of
from pyvelo.server.errors import HttpError
from pyvelo.server.http import EVENTS, PING, encoded
from pyvelo.server.response_output import ResponseItems

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.serving import Serving

__all__ = ["ResponseForm"]

_INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout"}


class ResponseForm:
    """Shape of a response.

    Args:
        echoed: fields that are known before the answer.
        keep: called with the response, before its end is sent.
    """

    media_type = EVENTS
    ping = PING

    def __init__(
        self, serving: Serving, echoed: Mapping[str, Any], keep: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._serving = serving
        self._echoed = echoed
        self._keep = keep
        self.reader = AnswerReader()
        self._event = _Events()
        self._items = ResponseItems(self._event)
        self._stream: RequestStream

    def begin(self, stream: RequestStream) -> None:
        """Take the request."""
        self._stream = stream

    def head(self, index: int) -> bytes:
        """Return the events before the answer."""
        response = self._response("in_progress", [], None)
        begun = self._event("response.created", response=response)
        return begun + self._event("response.in_progress", response=response)

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return the events of a piece, none if it says nothing; the last text has the token's logprobs."""
        deltas = self.reader.push(index, piece)
        logprobs = [] if piece.logprob is None else [logprob_of(self._serving, piece.logprob)]
        if logprobs and not deltas and (self.reader.plain or self._items.in_message):
            deltas = [Delta()]
        first = [self._items.add(delta) for delta in deltas[:-1]]
        return b"".join([*first, *(self._items.add(delta, logprobs) for delta in deltas[-1:])])

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return the events after the answer."""
        output = outputs_of(self._stream.submissions)[0]
        status, logprobs = _status(output), self._logprobs(output)
        ended = self._items.end(status, logprobs)
        response = self._ended(output, usage)
        return ended + self._event(f"response.{status}", response=response)

    def failed(self, error: HttpError) -> bytes:
        """Return the error."""
        what = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        response = {**self._response("failed", [], None), "error": what}
        return self._event("response.failed", response=response)

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        output = outputs[0]
        for part in self.reader.parse(output.text).parts:
            self._items.add(part)
        self._items.end(_status(output), self._logprobs(output))
        return self._ended(output, usage)

    def _logprobs(self, output: RequestOutput) -> list[dict[str, Any]]:
        return [logprob_of(self._serving, each) for each in output.outputs[0].logprobs or ()]

    def _ended(self, output: RequestOutput, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response, after it was stored."""
        response = self._response(_status(output), self._items.done, usage)
        if output.finish_reason in _INCOMPLETE:
            response["incomplete_details"] = {"reason": _INCOMPLETE[output.finish_reason]}
        self._keep(response)
        return response

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        shown = {"status": status, "output": output, "usage": usage and self._usage(usage)}
        return {**self._echoed, "error": None, "incomplete_details": None, **shown}

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the usage by the names of this endpoint; its text is tokenized to count reasoning."""
        tokenize = self._serving.loop.engine.model.tokenize
        thoughts = (item["content"][0]["text"] for item in self._items.done if item["type"] == "reasoning")
        n_reasoning = sum(len(tokenize(text, add_special=False)) for text in thoughts)
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(n_reasoning, usage["completion_tokens"])},
            "total_tokens": usage["total_tokens"],
        }


class _Events:
    """Numbered events of a response."""

    def __init__(self) -> None:
        self._n_events = 0

    def __call__(self, kind: str, **fields: Any) -> bytes:
        """Return the next event."""
        number, self._n_events = self._n_events, self._n_events + 1
        data = encoded({"type": kind, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _status(output: RequestOutput) -> str:
    return "incomplete" if output.finish_reason in _INCOMPLETE else "completed"
