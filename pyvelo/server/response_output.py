"""Items of a response: each part of an answer is one, with its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any

from pyvelo.outputs import Delta

__all__ = ["ResponseItems"]

Event = Callable[..., bytes]
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseItems:
    """Output of a response, made of the deltas of its answer.

    Args:
        event: returns an event of a type, with these fields.

    done: the items that have ended.
    """

    def __init__(self, event: Event) -> None:
        self._event = event
        self._part: str | int | None = None  # of the item that is open
        self._item: dict[str, Any] = {}
        self._text = ""
        self.done: list[dict[str, Any]] = []

    @property
    def in_message(self) -> bool:
        """Whether the open item is a message."""
        return self._part == "content"

    def add(self, delta: Delta, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        """Append a delta; return its events. The logprobs are of the tokens of a text."""
        begun = b""
        if delta.part != self._part:
            begun = self._begin(delta)
        kind = self._item["type"]
        text = delta.arguments or delta.reasoning or delta.content
        self._text += text
        if kind == "message":
            fields = {"delta": text, "logprobs": logprobs}
            return begun + self._event("response.output_text.delta", **self._place, **fields)
        if not text:
            return begun
        if kind == "reasoning":
            return begun + self._event("response.reasoning_text.delta", **self._place, delta=text)
        return begun + self._event("response.function_call_arguments.delta", **self._place, delta=text)

    def end(self, status: str, logprobs: Sequence[dict[str, Any]]) -> bytes:
        """End the last item; an empty answer is an empty message. The logprobs are of the whole answer."""
        if self._part is None and not self.done:
            return self._begin(Delta()) + self._end(status, logprobs)
        return self._end(status, logprobs)

    @property
    def _place(self) -> dict[str, Any]:
        """Fields of the events within an item."""
        place = {"item_id": self._item["id"], "output_index": len(self.done)}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}

    def _begin(self, delta: Delta) -> bytes:
        ended = self._end("completed") if self._part is not None else b""
        self._part, self._text = delta.part, ""
        self._item = _item(delta)
        added = self._event("response.output_item.added", output_index=len(self.done), item={**self._item})
        if self._item["type"] == "function_call":
            return ended + added
        part = _text_part(self._item["type"], "", ())
        return ended + added + self._event("response.content_part.added", **self._place, part=part)

    def _end(self, status: str, logprobs: Sequence[dict[str, Any]] = ()) -> bytes:
        kind, place, item = self._item["type"], self._place, {**self._item, "status": status}
        if kind == "function_call":
            item["arguments"] = self._text
            done = {"name": item["name"], "arguments": self._text}
            ended = self._event("response.function_call_arguments.done", **place, **done)
        else:
            part = _text_part(kind, self._text, logprobs)
            item["content"] = [part]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            ended = self._event(f"response.{part['type']}.done", **place, **done)
            ended += self._event("response.content_part.done", **place, part=part)
        ended += self._event("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)
        self._part = None
        return ended


def _item(delta: Delta) -> dict[str, Any]:
    """Return the item of a part that begins."""
    if delta.index is not None:
        called = {"call_id": delta.id, "name": delta.name, "arguments": "", "status": "in_progress"}
        return {"id": f"fc_{token_hex(16)}", "type": "function_call", **called}
    if delta.reasoning:
        begun = {"summary": [], "content": [], "status": "in_progress"}
        return {"id": f"rs_{token_hex(16)}", "type": "reasoning", **begun}
    begun = {"role": "assistant", "status": "in_progress", "content": []}
    return {"id": f"msg_{token_hex(16)}", "type": "message", **begun}


def _text_part(kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    part = {"type": _TEXTS[kind], "text": text}
    return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": logprobs}
