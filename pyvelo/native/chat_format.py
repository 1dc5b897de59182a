"""Chat formats of upstream: the grammar and the parser of a model's tool calls and reasoning."""

from __future__ import annotations

import json
from typing import Any

from ._ffi import Handle, created, ffi, lib, read_bytes

__all__ = ["ChatFormat", "ChatPlan"]


class ChatFormat(Handle):
    """Chat template, compiled by upstream's engine with limits. Thread-safe.

    Args:
        source: Jinja, up to 64 KiB.
        bos, eos: texts of the tokens. Without them, the parser expects no end token in an answer.

    Raises:
        ConfigError: the template is wrong, or exceeds a limit.
        OutOfMemory: the system has no memory for a thread.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        out = ffi.new("velo_chat_template **")
        text, begin, end = map(_utf8, (source, bos, eos))
        status = lib.velo_chat_template_new(text, len(text), begin, len(begin), end, len(end), out)
        self._handle = created(status, out, lib.velo_chat_template_free)

    def plan(self, request: dict[str, Any]) -> ChatPlan:
        """Return the plan of an answer; for the keys of the request see `velo_chat_plan_new` in velo-chat.h.

        Raises:
            ConfigError: the template refuses the request, or the request is wrong.
        """
        return ChatPlan(self, request)


class ChatPlan(Handle):
    """Grammar and parser of one answer. Thread-safe.

    facts: the grammar and its triggers, as `velo_chat_plan_get` in velo-chat.h describes them.
    """

    facts: dict[str, Any]

    def __init__(self, chat: ChatFormat, request: dict[str, Any]) -> None:
        out = ffi.new("velo_chat_plan **")
        asked = _utf8(json.dumps(request, ensure_ascii=False))
        status = lib.velo_chat_plan_new(chat.handle, asked, len(asked), out)
        self._handle = handle = created(status, out, lib.velo_chat_plan_free)
        found = read_bytes(lambda text, size, n: lib.velo_chat_plan_get(handle, text, size, n), 1 << 14)
        self.facts = json.loads(found)

    def parse(self, text: str, *, partial: bool = False) -> dict[str, Any]:
        """Return content, reasoning and tool calls of an answer, or of its beginning.

        Raises:
            ComputeError: the answer is not in the model's format.
            OutOfMemory: the answer is nested too deep for the memory.
        """
        data, handle = _utf8(text), self.handle
        found = read_bytes(
            lambda out, size, n: lib.velo_chat_parse(handle, data, len(data), partial, out, size, n),
            2 * len(data) + 512,
        )
        message: dict[str, Any] = json.loads(found)
        return message


def _utf8(text: str) -> bytes:
    """Return the text in UTF-8, with replacement characters for lone surrogates."""
    return text.encode("utf-8", "replace")
