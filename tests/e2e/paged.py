"""One or many sequences driven by hand over a paged context, with blocks in random places.

The pool is filled with NaN first, so that a read of a slot that was never written shows in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from pyvelo.native import Context, Model, StepArrays

NAN_BYTE = 0xFF


@dataclass
class Sequence_:
    """A sequence that owns blocks: `table` in position order, `length` in tokens."""

    table: list[int] = field(default_factory=list)
    length: int = 0
    state: int = 0


class PagedRunner:
    """A paged context of `n_blocks` blocks that hands them out in random order."""

    def __init__(
        self,
        path: Path | str,
        *,
        type_k: int = 1,
        type_v: int = 1,
        n_blocks: int = 64,
        block_size: int = 32,
        max_batch_tokens: int = 512,
        max_seqs: int = 8,
        max_seq_len: int = 2048,
        n_threads: int = 1,
        deterministic: bool = False,
        fast_attention: bool = False,
        seed: int = 0,
    ) -> None:
        self.model = Model(path, deterministic=deterministic)
        self.context = Context(
            self.model, n_blocks=n_blocks, block_size=block_size, type_k=type_k, type_v=type_v,
            max_batch_tokens=max_batch_tokens, max_seqs=max_seqs, max_seq_len=max_seq_len,
            max_outputs=max_batch_tokens, n_threads=n_threads, deterministic=deterministic,
            fast_attention=fast_attention,
        )  # fmt: skip
        self.block_size = block_size
        self.free = np.random.default_rng(seed).permutation(n_blocks).tolist()
        self.context.fill_blocks(np.arange(n_blocks, dtype=np.int32), NAN_BYTE)
        width = -(-max_seq_len // block_size)
        self.arrays = StepArrays(max_batch_tokens, max_seqs, width, 1)
        self.n_states = 0

    def __enter__(self) -> PagedRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.close()
        self.model.close()

    def sequence(self) -> Sequence_:
        """Return a new sequence, with a recurrent state if the model has recurrent layers."""
        made = Sequence_(state=self.n_states)
        self.n_states += 1
        if self.model.info.has_recurrent:
            self.context.clear_state(made.state)
        return made

    def step(
        self, work: Sequence[tuple[Sequence_, Sequence[int]]], *, every: bool = False
    ) -> npt.NDArray[np.float32]:
        """Run tokens of several sequences; return logits of each last token, or of `every` token."""
        a, bs, at = self.arrays, self.block_size, 0
        a.tables[0, : len(work)] = -1
        for row, (seq, tokens) in enumerate(work):
            n, end = len(tokens), seq.length + len(tokens)
            while len(seq.table) * bs < end:
                seq.table.append(self.free.pop())
            positions = np.arange(seq.length, end, dtype=np.int32)
            table = np.asarray(seq.table, np.int32)
            a.tokens[at : at + n] = tokens
            a.positions[at : at + n] = positions
            a.slots[0, at : at + n] = table[positions // bs] * bs + positions % bs
            a.outputs[at : at + n] = every
            a.outputs[at + n - 1] = 1
            a.seqs[row] = (at, n, end, 0)
            a.tables[0, row, : len(table)] = table
            a.states[row] = seq.state
            seq.length, at = end, at + n
        self.context.run(a, at, len(work))
        n_outputs = at if every else len(work)
        return np.stack([self.context.logits(i) for i in range(n_outputs)])

    def rows(self, seq: Sequence_, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Return the pool's bytes of a sequence: [length, bytes of a row] for every tensor of `sizes`."""
        blocks = self.context.read_blocks(np.asarray(seq.table, np.int32))
        rows, at = [], 0
        for size in sizes:
            part = blocks[:, at : at + size * self.block_size].reshape(-1, size)
            rows.append(part[: seq.length])
            at += size * self.block_size
        return rows


def nmse(expected: npt.ArrayLike, actual: npt.ArrayLike) -> float:
    """Squared error over squared size, in float64; NaN when `actual` holds one."""
    e, a = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    return float(((e - a) ** 2).sum() / (e**2).sum())
