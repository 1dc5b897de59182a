"""Embeddings of texts, over a context of their own that the first call creates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from pyvelo.config import EngineConfig
from pyvelo.engine.input_errors import FindLora, find_adapter
from pyvelo.engine.input_processor import Prompt, listed, tokens_of
from pyvelo.engine.interrupts import HomeProcess, InterruptGuard
from pyvelo.errors import Cancelled, ClosedError, RequestError, UnsupportedError, VeloError, shown
from pyvelo.models.files import ModelFiles
from pyvelo.native import POOLINGS, Adapter, Embedder, Model, adapt
from pyvelo.native.compute import compute, release_team

__all__ = ["Embeddings", "open_embeddings"]

NO_POOLING, RANK = 0, 4  # of ModelInfo.pooling

GROUP_TEXTS, GROUP_TOKENS = 64, 4096
"""Most texts and tokens of one group, unless a single text is longer. Threads take turns between groups, and
cancellation ends a call there."""

SMALLEST = 512
"""Tokens that the first context has room for; a longer text doubles it."""


class Embeddings:
    """Embedder of texts with one model. Thread-safe: calls take turns, group by group.

    Args:
        max_tokens: longest text.
        check: called before each group; raises if the model must not be used any more.
        alone: the vector of a text has the same bits beside others and after others.
    """

    def __init__(
        self, model: Model, max_tokens: int, n_threads: int, check: Callable[[], None], alone: bool = False
    ) -> None:
        self.max_tokens = max_tokens
        self._alone = alone
        self._model = model
        self._n_threads = n_threads
        self._check = check
        self.home = HomeProcess()
        self.guard = InterruptGuard()
        self._turn = threading.Lock()
        self._embedder: Embedder | None = None
        self._closed = False
        self.find_lora: FindLora | None = None  # once an adapter was loaded

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        pooling: str | None,
        normalize: bool,
        stopped: Callable[[], bool] = lambda: False,
        lora: str | None = None,
    ) -> NDArray[np.float32]:
        """Return vectors as `LLM.embed`; raise Cancelled if `stopped()` is true between two groups."""
        self.check_open()
        kind, adapter = self._pooling(pooling), find_adapter(self.find_lora, lora)
        given = [self._tokens(text, number) for number, text in enumerate(listed(texts))]
        out = np.empty((len(given), self._model.info.n_embd_out), np.float32)
        with self.guard:
            try:
                for group in _groups(given, 1 if self._alone else GROUP_TEXTS):
                    if self.guard.hit or stopped():
                        raise Cancelled("the embedding was cancelled")
                    self._run(given[group], kind, adapter, out[group])
            finally:
                release_team()
        if normalize:
            norms = np.linalg.norm(out, axis=1, keepdims=True)
            np.divide(out, norms, out=out, where=norms > 0)
        return out

    def check_open(self) -> None:
        """Raise ClosedError after `close`, EngineError in a forked process."""
        self.home.check()
        if self._closed:
            raise ClosedError("this engine was closed")

    def stop(self) -> None:
        """Refuse new texts, and end the call in progress soon."""
        self._closed = True
        self._cancel()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no embedder run."""
        with self.guard:
            while not self._turn.acquire(timeout=self.guard.patience or -1):
                self.guard.raise_hit()
            try:
                yield
            finally:
                self._turn.release()

    def try_adapter(self, adapter: Adapter) -> None:
        """Try an adapter while paused; raise UnsupportedError if it does not fit the model."""
        adapt(self._roomy(1), adapter)

    def drop(self) -> None:
        """Free the embedder while paused; the next call creates another."""
        self._embedder = None

    def close(self) -> None:
        """Stop, and wait for the call in progress; may be called again."""
        with self.guard:
            self.stop()
            while not self._turn.acquire(timeout=0.05):
                self.guard.raise_hit()
                self._cancel()  # again: a call that was cancelled just before it began runs
            self._embedder = None
            self._turn.release()

    def _pooling(self, name: str | None) -> int:
        """Return the number of a pooling; None: the model's own."""
        own = self._model.info.pooling
        if name is None and own == RANK:
            raise UnsupportedError("this model scores texts instead of embedding them: name a pooling")
        names = ", ".join(map(repr, POOLINGS))
        if name is None and own == NO_POOLING:
            raise RequestError(f"this model does not say how its embeddings are pooled: name one of {names}")
        if name is not None and not (isinstance(name, str) and name in POOLINGS):
            raise RequestError(f"pooling={shown(name)}: give one of {names}, or None for the model's own")
        return own if name is None else POOLINGS[name]

    def _tokens(self, text: Prompt, number: int) -> Sequence[int]:
        tokens = tokens_of(self._model, text, name=f"text {number}")
        if len(tokens) > self.max_tokens:
            raise RequestError(
                f"text {number} has {len(tokens)} tokens, but n_ctx={self.max_tokens}: shorten it"
            )
        return tokens

    def _run(
        self, texts: Sequence[Sequence[int]], pooling: int, adapter: Adapter | None, out: NDArray[np.float32]
    ) -> None:
        """Fill `out`, float32 [n, n_embd], when it is this thread's turn."""
        while not self._turn.acquire(timeout=self.guard.patience or -1):
            if self.guard.hit:
                raise Cancelled("the embedding was cancelled")
        try:
            self.check_open()
            self._check()
            embedder = self._roomy(max(map(len, texts)))

            adapt(embedder, adapter)

            def run() -> None:
                out[:] = embedder.embed(texts, pooling)

            compute(run, self._cancel, at_ctrl_c=True)
        except Cancelled:
            self.check_open()
            raise
        except VeloError:
            self._embedder = None  # the next call creates another
            raise
        finally:
            self._turn.release()

    def _roomy(self, n_tokens: int) -> Embedder:
        """Return an embedder for texts of so many tokens."""
        size = min(max(SMALLEST, 1 << (n_tokens - 1).bit_length()), self.max_tokens)
        made = self._embedder
        if made is None or made.max_tokens < n_tokens or (self._alone and made.max_tokens != size):
            made = self._embedder = None  # free its memory first; one for longer texts may round otherwise
            made = self._embedder = Embedder(self._model, max_tokens=size, n_threads=self._n_threads)
        return made

    def _cancel(self) -> None:
        embedder = self._embedder
        if embedder is not None:
            embedder.cancel()


def _groups(texts: Sequence[Sequence[int]], most: int = GROUP_TEXTS) -> Iterator[slice]:
    """Yield the texts of each group; most: texts of a group."""
    first = n_tokens = 0
    for number, text in enumerate(texts):
        n_tokens += len(text)
        if number > first and (number - first == most or n_tokens > GROUP_TOKENS):
            yield slice(first, number)
            first, n_tokens = number, len(text)
    if texts:
        yield slice(first, len(texts))


def open_embeddings(config: EngineConfig, model: Model, files: ModelFiles) -> Embeddings:
    """Return the part of an engine that embeds."""
    longest = max(1, model.info.n_ctx_train)
    n_ctx = min(config.n_ctx or longest, longest)
    return Embeddings(model, n_ctx, config.n_threads or 0, files.check, alone=config.deterministic)
