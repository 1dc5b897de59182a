"""Arrays of a step, which C reads in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ._ffi import ffi, int32

if TYPE_CHECKING:
    from ._velo import CData

__all__ = ["StepArrays"]

Int32Array = npt.NDArray[np.int32]


class StepArrays:
    """Arrays of a step, allocated once and filled for each step.

    Fill them in place, because C has their addresses. All are C-contiguous.

    Attributes:
        tokens, positions: int32 [max_tokens], sequence after sequence.
        slots: int32 [n_groups, max_tokens], block * block_size + offset, of K and V of each token.
        outputs: int8 [max_tokens], non-zero for tokens whose logits are wanted.
        seqs: int32 [max_seqs, 4], first token, number of tokens, length after this step, 0.
        firsts: int32 [n_groups, max_seqs], blocks of the sequence before its table's first one.
        tables: int32 [n_groups, max_seqs, max_width], block ids in position order, -1 past the end.
        states: int32 [max_seqs], the recurrent state of each sequence, if the model has recurrent layers.
        copies: int32 [max_copies, 2], source and target block, copied before the step.

    Raises:
        ConfigError: a size is below its minimum: 1, or 0 for `max_copies`.
    """

    def __init__(
        self, max_tokens: int, max_seqs: int, max_width: int, max_copies: int, n_groups: int = 1
    ) -> None:
        for name, size, least in (
            ("max_tokens", max_tokens, 1),
            ("max_seqs", max_seqs, 1),
            ("max_width", max_width, 1),
            ("max_copies", max_copies, 0),
            ("n_groups", n_groups, 1),
        ):
            if int32(name, size) < least:
                raise ConfigError(f"{name} is {size}, but must be at least {least}")
        self.tokens: Final[Int32Array] = np.zeros(max_tokens, np.int32)
        self.positions: Final[Int32Array] = np.zeros(max_tokens, np.int32)
        self.slots: Final[Int32Array] = np.zeros((n_groups, max_tokens), np.int32)
        self.outputs: Final[npt.NDArray[np.int8]] = np.zeros(max_tokens, np.int8)
        self.seqs: Final[Int32Array] = np.zeros((max_seqs, 4), np.int32)
        self.firsts: Final[Int32Array] = np.zeros((n_groups, max_seqs), np.int32)
        self.tables: Final[Int32Array] = np.full((n_groups, max_seqs, max_width), -1, np.int32)
        self.states: Final[Int32Array] = np.zeros(max_seqs, np.int32)
        self.copies: Final[Int32Array] = np.zeros((max_copies, 2), np.int32)
        self.limits: Final = (max_tokens, max_seqs, max_copies)

        self.batch: Final[CData] = ffi.new("velo_batch *")
        self._views: Final[list[CData]] = []  # keep the arrays alive
        for name in ("tokens", "positions", "slots", "seqs", "firsts", "tables", "states", "copies"):
            view = ffi.from_buffer("int32_t[]", getattr(self, name).reshape(-1))
            self._views.append(view)
            setattr(self.batch, name, view)
        self._views.append(ffi.from_buffer("int8_t[]", self.outputs))
        self.batch.outputs = self._views[-1]
        self.batch.n_groups = n_groups
        self.batch.token_stride, self.batch.seq_stride = max_tokens, max_seqs
        self.batch.table_stride = max_width
