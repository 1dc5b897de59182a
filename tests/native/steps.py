"""Sequences over a context without an engine, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pyvelo.native import Context, StepArrays


@dataclass
class Seq:
    """Sequence that owns the blocks of its table."""

    table: list[int]
    length: int = 0
    tokens: list[int] = field(default_factory=list)


def fill_step(
    arrays: StepArrays, block_size: int, work: Sequence[tuple[Seq, Sequence[int]]]
) -> tuple[int, int]:
    """Fill the arrays for a step that appends tokens to sequences, with logits of the last token of each."""
    at = 0
    arrays.tables[0, : len(work)], arrays.firsts[0, : len(work)] = -1, 0
    for row, (seq, tokens) in enumerate(work):
        n, end = len(tokens), seq.length + len(tokens)
        positions = np.arange(seq.length, end)
        table = np.asarray(seq.table, np.int32)
        arrays.tokens[at : at + n] = tokens
        arrays.positions[at : at + n] = positions
        arrays.slots[0, at : at + n] = table[positions // block_size] * block_size + positions % block_size
        arrays.outputs[at : at + n] = 0
        arrays.outputs[at + n - 1] = 1
        arrays.seqs[row] = (at, n, end, 0)
        arrays.tables[0, row, : len(table)] = table
        at += n
    return at, len(work)


def run(context: Context, arrays: StepArrays, work: Sequence[tuple[Seq, Sequence[int]]]) -> None:
    """Run one step. The sequences grow only if it succeeds."""
    context.run(arrays, *fill_step(arrays, context.info.block_size, work))
    for seq, tokens in work:
        seq.length += len(tokens)
        seq.tokens += tokens


def logits_of(context: Context, n: int) -> npt.NDArray[np.float32]:
    """Return all output rows of the last step: [n, n_vocab]."""
    return np.stack([context.logits(row) for row in range(n)])
