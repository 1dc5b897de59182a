"""Embedder: a context that computes a vector for each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ._ffi import Handle, check, created, ffi, int32, ints, lib
from .model import Model, token_array

__all__ = ["POOLINGS", "Embedder"]

POOLINGS: Final = {
    "mean": lib.VELO_POOLING_MEAN,
    "cls": lib.VELO_POOLING_CLS,
    "last": lib.VELO_POOLING_LAST,
}
"""Poolings by name: the mean of the token vectors, the first, or the last."""


class Embedder(Handle):
    """Context for embeddings, beside the contexts that generate.

    Calls from several threads run one after another, except `cancel()`. After a failure make a new embedder.

    Args:
        model: the model to run; the embedder keeps its weights alive.
        max_tokens: tokens of one text, at most the context that the model was trained on.
        n_threads: 0 uses all cores.

    Raises:
        ConfigError: a setting is out of range.
        UnsupportedError: the model cannot embed texts.
        OutOfMemory: memory is too small for a text of this length.
        ClosedError: the model was closed.
    """

    def __init__(self, model: Model, *, max_tokens: int, n_threads: int = 0) -> None:
        params = ffi.new("velo_embedder_params *")
        params.max_tokens = int32("max_tokens", max_tokens)
        params.n_threads = int32("n_threads", n_threads)
        out = ffi.new("velo_embedder **")
        status = lib.velo_embedder_create(model.handle, params, out)
        self._handle = created(status, out, lib.velo_embedder_free)
        self.max_tokens: Final[int] = max_tokens
        self.n_embd: Final[int] = model.info.n_embd_out
        self._watcher = model.watcher

    def embed(self, texts: Sequence[Sequence[int]], pooling: int) -> npt.NDArray[np.float32]:
        """Return the vectors of texts, float32 [n, n_embd].

        Args:
            texts: token ids, from 1 to `max_tokens` for each text.
            pooling: one of the values of POOLINGS.

        Raises:
            ConfigError: a text is empty or too long, or a token or the pooling does not exist.
            Cancelled: `cancel()` was called meanwhile.
            ComputeError: the computation failed, or a result is not a finite number.
        """
        handle = self.handle
        lengths = np.array([len(text) for text in texts], np.int32)
        tokens = token_array([token for text in texts for token in text])
        out = np.empty((len(lengths), self.n_embd), np.float32)
        target = ffi.from_buffer("float[]", out.reshape(-1))
        n = len(lengths)
        self._watcher.run(
            lib.velo_embed,
            handle,
            ints(tokens),
            ints(lengths),
            n,
            int32("pooling", pooling),
            target,
            out.size,
        )
        return out

    def cancel(self) -> None:
        """Make a call in progress, in another thread, raise `Cancelled` soon. A later one is not affected."""
        check(lib.velo_embedder_cancel(self.handle))
