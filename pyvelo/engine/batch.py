"""The arrays that describe a step, written into buffers that are made once.

Rows of the table array stay from step to step: while the same sequences decode, only a block that a sequence
grew into is written. A row is written anew when its table's version has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyvelo.engine.request import Request
from pyvelo.engine.scheduler import Chunk, StepPlan
from pyvelo.kv.pool import BlockTable

if TYPE_CHECKING:
    from pyvelo.native import StepArrays

__all__ = ["Batch", "BatchBuilder", "Scored"]


class Scored(NamedTuple):
    """Tokens of a prompt from `first` on; rows of logits from `row` on score those behind."""

    request: Request
    first: int
    row: int
    n_tokens: int


class Batch(NamedTuple):
    """How much of the arrays is filled, who gets the token drawn from which row of logits, and whose prompt
    the others score."""

    n_tokens: int
    n_seqs: int
    rows: NDArray[np.int32]
    drawing: list[Request]
    scored: list[Scored]


class BatchBuilder:
    """Writes steps into `arrays`."""

    def __init__(self, arrays: StepArrays, block_size: int) -> None:
        max_seqs = len(arrays.seqs)
        self._arrays = arrays
        self._block_size = block_size
        self._count = np.arange(max_seqs, dtype=np.int32)
        self._owners: list[BlockTable | None] = [None] * max_seqs
        self._filled = [(0, 0)] * max_seqs  # blocks of the table in the row, and its version
        arrays.tables.fill(-1)
        arrays.seqs.fill(0)

    def build(self, plan: StepPlan) -> Batch:
        """Fills the arrays: a row for each decoding sequence, then one for each piece of a prompt."""
        n_tokens = n_seqs = len(plan.decodes)
        drawing = list(plan.decodes)
        if plan.decodes:
            self._write_decodes(plan.decodes)
        n_rows, drawn = n_seqs, []  # rows of logits, and those that prompts draw from
        scored: list[Scored] = []
        for chunk in plan.chunks:
            self._write_chunk(n_seqs, n_tokens, chunk)
            if chunk.request.scores:
                scored.append(self._write_scored(n_tokens, n_rows, chunk))
                n_rows += scored[-1].n_tokens
            n_tokens += chunk.n_tokens
            n_seqs += 1
            if chunk.last:
                drawing.append(chunk.request)
                drawn.append(n_rows)
                n_rows += 1
        rows = self._count[: len(drawing)]
        if scored:
            rows = np.concatenate((self._count[: len(plan.decodes)], np.array(drawn, np.int32)))
        return Batch(n_tokens, n_seqs, rows, drawing, scored)

    def _write_decodes(self, requests: list[Request]) -> None:
        arrays, n = self._arrays, len(requests)
        owners, filled = self._owners, self._filled
        for row, request in enumerate(requests):
            table = request.sequence.table
            if table is not None and (
                owners[row] is not table or filled[row] != (len(table.blocks), table.version)
            ):
                self._write_table(row, table)
        positions = np.array([request.n_computed for request in requests], dtype=np.int32)
        rows = self._count[:n]
        arrays.tokens[:n] = [request.tokens[-1] for request in requests]
        arrays.positions[:n] = positions
        blocks, offsets = np.divmod(positions, self._block_size)
        arrays.slots[:n] = arrays.tables[rows, blocks] * self._block_size + offsets
        arrays.outputs[:n] = 1
        seqs = arrays.seqs
        seqs[:n, 0] = rows
        seqs[:n, 1] = 1
        seqs[:n, 2] = positions + 1
        arrays.states[:n] = [request.state for request in requests]

    def _write_chunk(self, row: int, first: int, chunk: Chunk) -> None:
        arrays, request, n = self._arrays, chunk.request, chunk.n_tokens
        self._write_table(row, chunk.table)
        start, end = request.n_computed, request.n_computed + n
        positions = np.arange(start, end, dtype=np.int32)
        blocks, offsets = np.divmod(positions, self._block_size)
        arrays.tokens[first : first + n] = request.tokens[start:end]
        arrays.positions[first : first + n] = positions
        arrays.slots[first : first + n] = arrays.tables[row, blocks] * self._block_size + offsets
        arrays.outputs[first : first + n] = 0
        arrays.outputs[first + n - 1] = chunk.last
        arrays.seqs[row, :3] = first, n, end
        arrays.states[row] = request.state

    def _write_scored(self, first: int, row: int, chunk: Chunk) -> Scored:
        """Wants the logits of all tokens of a piece that have none yet, but for the prompt's last one."""
        request, start = chunk.request, chunk.request.n_computed
        begin = max(start, len(request.prompt_logprobs))
        n = max(0, start + chunk.n_tokens - chunk.last - begin)
        at = first + begin - start
        self._arrays.outputs[at : at + n] = 1
        return Scored(request, begin, row, n)

    def _write_table(self, row: int, table: BlockTable) -> None:
        """Bring a row up to date. A table of the same version has only grown at its end."""
        (before, version), blocks = self._filled[row], table.blocks
        start = before if self._owners[row] is table and version == table.version else 0
        self._arrays.tables[row, start : len(blocks)] = blocks[start:]
        if len(blocks) < before:
            self._arrays.tables[row, len(blocks) : before] = -1
        self._owners[row], self._filled[row] = table, (len(blocks), table.version)
