"""Answers of a chat by an LLM; the earlier turns are prefix hits."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, nullcontext
from typing import Any

from pyvelo.cli.conversation import Message
from pyvelo.cli.progress import LoadingBar
from pyvelo.cli.values import show_bytes
from pyvelo.llm import LLM
from pyvelo.outputs import StreamPiece
from pyvelo.sampling import SamplingParams

__all__ = ["LlmTalker"]

ROOM = 256
"""Tokens that a conversation must leave for an answer, or a quarter of the context if that is less."""


class LlmTalker:
    """Talker over an LLM. Each turn is a request of the whole conversation, with its past as prefix hit.

    The first answer packs the model's weights. `bar` shows that, and is closed after an answer.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        options: dict[str, Any] | None = None,
        bar: LoadingBar | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._options = options or {}
        self._bar = bar

    def fits(self, messages: list[Message]) -> bool:
        """See `Talker.fits`."""
        room = min(ROOM, self._llm.n_ctx // 4, self._params.max_tokens or ROOM)
        return len(self._llm.chat_prompt(messages, **self._options)) + room <= self._llm.n_ctx

    def stream(self, messages: list[Message]) -> Generator[StreamPiece, None, None]:
        """See `Talker.stream`."""
        asked = self._llm.chat_stream(messages, self._params, **self._options)
        with closing(self._bar) if self._bar is not None else nullcontext(), closing(asked) as pieces:
            yield from pieces

    def describe(self) -> str:
        """See `Talker.describe`."""
        stats = self._llm.stats()
        said = "1 block holds" if stats.blocks_cached == 1 else f"{stats.blocks_cached:,} blocks hold"
        return (
            f"KV cache of {stats.blocks_total:,} blocks, {show_bytes(stats.pool_bytes)}: "
            f"{stats.tokens_total:,} tokens; {said} this conversation"
        )
