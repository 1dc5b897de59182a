"""Answers and events of /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import msgspec

from pyvelo.engine.output import outputs_of
from pyvelo.outputs import RequestOutput, StreamPiece
from pyvelo.server.chat import logprob_of
from pyvelo.server.errors import HttpError
from pyvelo.server.http import EVENTS, PING

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.serving import Serving

__all__ = ["ResponseForm"]

_encode = msgspec.json.Encoder().encode


class ResponseForm:
    """Shape of a response with one message.

    Args:
        echoed: fields that are known before the answer.
        keep: called with the text and the response, before its end is sent.
    """

    media_type = EVENTS
    ping = PING

    def __init__(
        self, serving: Serving, echoed: Mapping[str, Any], keep: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        self._serving = serving
        self._echoed = echoed
        self._keep = keep
        self._item_id = f"msg_{token_hex(16)}"
        self._place: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._n_events = 0
        self._stream: RequestStream

    def begin(self, stream: RequestStream) -> None:
        """Take the request."""
        self._stream = stream

    def head(self, index: int) -> bytes:
        """Return the events before the text."""
        response = self._response("in_progress", [], None)
        item = self._item("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=_text_part("", []))
        )

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return one event, unless the piece says nothing."""
        if not piece.text and piece.logprob is None:
            return b""
        logprobs = [] if piece.logprob is None else [logprob_of(self._serving, piece.logprob)]
        return self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=logprobs)

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return the events after the text."""
        output = outputs_of(self._stream.submissions)[0]
        response = self._ended(output, usage)
        item = response["output"][0]
        part = item["content"][0]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return (
            self._event("response.output_text.done", **self._place, **done)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{response['status']}", response=response)
        )

    def failed(self, error: HttpError) -> bytes:
        """Return the error."""
        what = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        response = {**self._response("failed", [], None), "error": what}
        return self._event("response.failed", response=response)

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        return self._ended(outputs[0], usage)

    def _ended(self, output: RequestOutput, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response, after it was stored."""
        reason = {"length": "max_output_tokens", "timeout": "timeout"}.get(output.finish_reason)
        status = "completed" if reason is None else "incomplete"
        logprobs = [logprob_of(self._serving, each) for each in output.outputs[0].logprobs or ()]
        item = self._item(status, [_text_part(output.text, logprobs)])
        response = self._response(status, [item], usage)
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        self._keep(output.text, response)
        return response

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        shown = {"status": status, "output": output, "usage": usage and _usage(usage)}
        return {**self._echoed, "error": None, "incomplete_details": None, **shown}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        common = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**common, "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage by the names of this endpoint."""
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
