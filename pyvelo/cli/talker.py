"""Answers of a chat by an LLM; the earlier turns are prefix hits."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, nullcontext

from pyvelo.chat.conversation import ChatOptions
from pyvelo.cli.conversation import Message
from pyvelo.cli.progress import LoadingBar
from pyvelo.cli.values import count, show_bytes
from pyvelo.llm import LLM
from pyvelo.outputs import StreamPiece, Usage
from pyvelo.sampling import SamplingParams

__all__ = ["LlmTalker"]

ROOM = 256
"""Tokens that a conversation must leave for an answer, or a quarter of the context if that is less."""


class LlmTalker:
    """Talker over an LLM. Each turn is a request of the whole conversation, with its past as prefix hit.

    The first answer packs the model's weights. `bar` shows that, and is closed after an answer.

    Args:
        path: of the model's file.
        options: arguments of `LLM.chat`.
    """

    def __init__(
        self,
        llm: LLM,
        path: str,
        params: SamplingParams,
        options: ChatOptions,
        bar: LoadingBar | None = None,
    ) -> None:
        self._llm = llm
        self._path = path
        self._params = params
        self._options = options
        self._bar = bar

    def fits(self, messages: list[Message]) -> bool:
        """See `Talker.fits`."""
        room = min(ROOM, self._llm.n_ctx // 4, self._params.max_tokens or ROOM)
        return self._n_tokens(messages) + room <= self._llm.n_ctx

    def stream(self, messages: list[Message]) -> Generator[StreamPiece, None, None]:
        """See `Talker.stream`."""
        asked = self._llm.chat_stream(messages, self._params, **self._options)
        with closing(self._bar) if self._bar is not None else nullcontext(), closing(asked) as pieces:
            yield from pieces

    def think(self, wanted: bool) -> None:
        """See `Talker.think`. It is the variable `enable_thinking` that templates ask for."""
        arguments = self._options.get("template_arguments") or {}
        self._options = {**self._options, "template_arguments": {**arguments, "enable_thinking": wanted}}

    def describe_model(self) -> str:
        """See `Talker.describe_model`."""
        info = self._llm.info
        return (
            f"{info.description}, {info.n_params:,} parameters\n"
            f"{self._path}\n{self._llm.n_ctx:,} tokens of context"
        )

    def describe_tokens(self, messages: list[Message]) -> str:
        """See `Talker.describe_tokens`."""
        n_tokens = self._n_tokens(messages) if messages else 0
        return f"{n_tokens:,} of {count(self._llm.n_ctx, 'token')} of the context"

    def describe_usage(self, usage: Usage) -> str:
        """See `Talker.describe_usage`."""
        stats, n_ctx = self._llm.stats(), self._llm.n_ctx
        n_bytes = usage.total_tokens * stats.pool_bytes // max(1, stats.tokens_total)
        return f"context {usage.total_tokens:,}/{n_ctx:,}, KV {show_bytes(n_bytes)}"

    def _n_tokens(self, messages: list[Message]) -> int:
        return len(self._llm.chat_prompt(messages, **self._options))

    def describe(self) -> str:
        """See `Talker.describe`."""
        stats = self._llm.stats()
        said = "1 block holds" if stats.blocks_cached == 1 else f"{stats.blocks_cached:,} blocks hold"
        return (
            f"KV cache of {stats.blocks_total:,} blocks, {show_bytes(stats.pool_bytes)}: "
            f"{stats.tokens_total:,} tokens; {said} this conversation"
        )
