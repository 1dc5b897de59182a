"""One or many sequences driven by hand over a paged context, with blocks in random places.

The pool is filled with NaN first, so that a read of a slot that was never written shows in the logits. So are
the blocks that a window leaves, which other sequences then get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from pyvelo.kv.geometry import make_geometry
from pyvelo.native import Context, Model, StepArrays

NAN_BYTE = 0xFF


@dataclass
class Sequence_:
    """A sequence that owns blocks: for each group its blocks from block `firsts` on; `length` in tokens."""

    tables: list[list[int]]
    firsts: list[int]
    length: int = 0
    state: int = 0

    @property
    def table(self) -> list[int]:
        """Blocks of the first group."""
        return self.tables[0]


class PagedRunner:
    """A paged context of `n_blocks` blocks for each group of layers, handed out in random order.

    windows: whether layers with windows have groups of their own.
    """

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
        windows: bool = True,
    ) -> None:
        self.model = Model(path, deterministic=deterministic)
        geometry = make_geometry(
            "the model", self.model.layers, "f32", block_size, windows=windows,
            state_bytes=self.model.info.state_bytes,
        )  # fmt: skip
        self.layout = geometry.layout(max_batch_tokens)
        n_blocks *= self.layout.n_groups
        self.context = Context(
            self.model, n_blocks=n_blocks, block_size=block_size, type_k=type_k, type_v=type_v,
            max_batch_tokens=max_batch_tokens, max_seqs=max_seqs, max_seq_len=max_seq_len,
            max_outputs=max_batch_tokens, n_threads=n_threads, deterministic=deterministic,
            fast_attention=fast_attention, layer_groups=geometry.layer_groups,
            slot_bytes=0 if self.model.layers else geometry.slot_bytes,
        )  # fmt: skip
        self.block_size = block_size
        self.free = np.random.default_rng(seed).permutation(n_blocks).tolist()
        self.context.fill_blocks(np.arange(n_blocks, dtype=np.int32), NAN_BYTE)
        width = -(-max_seq_len // block_size)
        self.arrays = StepArrays(max_batch_tokens, max_seqs, width, 1, self.layout.n_groups)
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
        n_groups = self.layout.n_groups
        made = Sequence_([[] for _ in range(n_groups)], [0] * n_groups, state=self.n_states)
        self.n_states += 1
        if self.model.info.has_recurrent:
            self.context.clear_state(made.state)
        return made

    def step(
        self, work: Sequence[tuple[Sequence_, Sequence[int]]], *, every: bool = False
    ) -> npt.NDArray[np.float32]:
        """Run tokens of several sequences; return logits of each last token, or of `every` token."""
        a, bs, at = self.arrays, self.block_size, 0
        a.tables[:, : len(work)] = -1
        for row, (seq, tokens) in enumerate(work):
            n, end = len(tokens), seq.length + len(tokens)
            positions = np.arange(seq.length, end, dtype=np.int32)
            a.tokens[at : at + n] = tokens
            a.positions[at : at + n] = positions
            for group, (held, first) in enumerate(zip(seq.tables, seq.firsts, strict=True)):
                while (first + len(held)) * bs < end:
                    held.append(self.free.pop())
                table = np.asarray(held, np.int32)
                a.slots[group, at : at + n] = table[positions // bs - first] * bs + positions % bs
                a.tables[group, row, : len(table)] = table
                a.firsts[group, row] = first
            a.outputs[at : at + n] = every
            a.outputs[at + n - 1] = 1
            a.seqs[row] = (at, n, end, 0)
            a.states[row] = seq.state
            seq.length, at = end, at + n
        self.context.run(a, at, len(work))
        for seq, _ in work:
            self._slide(seq)
        n_outputs = at if every else len(work)
        return np.stack([self.context.logits(i) for i in range(n_outputs)])

    def replace_state(self, seq: Sequence_) -> None:
        """Save the recurrent state of a sequence in blocks, and go on with another state loaded from them.

        The old state is cleared, and the blocks are filled with NaN and given to other sequences.
        """
        blocks = [self.free.pop() for _ in range(self.layout.state_blocks)]
        self.context.save_state(seq.state, blocks)
        self.context.clear_state(seq.state)
        seq.state = self.n_states
        self.n_states += 1
        self.context.load_state(seq.state, blocks)
        self.context.fill_blocks(blocks, NAN_BYTE)
        self.free[:0] = blocks

    def fork_state(self, seq: Sequence_) -> Sequence_:
        """Return a sequence with a copy of the state, and of the whole blocks, of another one."""
        twin = self.sequence()
        if self.model.info.has_recurrent:
            self.context.copy_state(seq.state, twin.state)
        twin.firsts, twin.length = list(seq.firsts), seq.length
        for held, copied in zip(seq.tables, twin.tables, strict=True):
            copied += [self.free.pop() for _ in held]
            self.context.copy_blocks(held, copied)
        return twin

    def _slide(self, seq: Sequence_) -> None:
        """Free the blocks that the windows have left, and fill them with NaN."""
        freed: list[int] = []
        for group, first in enumerate(self.layout.first_blocks(seq.length)):
            n = first - seq.firsts[group]
            freed += seq.tables[group][:n]
            del seq.tables[group][:n]
            seq.firsts[group] = first
        if freed:
            self.context.fill_blocks(freed, NAN_BYTE)
            self.free[:0] = freed

    def rows(self, seq: Sequence_, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of a sequence of one group: [length, bytes of a row] for each of `sizes`."""
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
