"""Made-up calls of the operator: pools, tables and queries from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from . import lab, reference
from .lab import HEADER, Bytes, Floats, Heads, Params, Run, Table
from .reference import Doubles

#: empty, one row, whole prompts, pieces of prompts; lengths within a block, at its end, over chunk borders
RAGGED = ((1, 1), (7, 7), (1, 133), (33, 100), (0, 64), (5, 97), (1, 64), (1, 1100), (70, 600), (3, 513))


@dataclass
class Case:
    """Sizes and parameters of a call, and each sequence's (query rows, length in tokens)."""

    heads: Heads
    params: Params = field(default_factory=Params)
    sequences: Sequence[tuple[int, int]] = ((1, 100),)
    sinks: bool = False
    v_of_k: bool = False
    spare_blocks: int = 3
    shared_blocks: int = 0  # how many leading blocks the sequences have in common
    loose_rows: int = 0  # output rows of no sequence, in front of each sequence
    trimmed: bool = True  # tables begin at the window of the first query
    seed: int = 0


@dataclass
class Call:
    """The arrays of one call, and the pools dequantized."""

    case: Case
    q: Floats
    k: Bytes
    v: Bytes | None
    table: Table
    sinks: Floats | None
    k_floats: Floats
    v_floats: Floats

    def run(self, run: Run | None = None, deterministic: bool | None = None) -> Floats:
        """The operator's output."""
        params = self.case.params
        if deterministic is not None:
            params = replace(params, deterministic=deterministic)
        return lab.paged_attention(
            self.case.heads, params, self.q, self.k, self.v, self.table, self.sinks, run
        )[0]

    def exact(self) -> Doubles:
        """The oracle's output over the dequantized pools."""
        return reference.paged_attention(
            self.case.heads, self.case.params, self.q, self.k_floats, self.v_floats, self.table, self.sinks
        )

    def used_slots(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[n_slots]: whether a table names the slot below its sequence's length."""
        used = np.zeros(self.k.shape[0], np.bool_)
        size = self.case.params.block_size
        for row in self.table:
            positions = np.arange(row[4] * size, int(row[2]) if row[1] > 0 else 0)
            used[row[HEADER:][positions // size - row[4]] * size + positions % size] = True
        return used

    def alone(self, index: int) -> Call:
        """The same call with one sequence, its queries first."""
        row = self.table[index]
        table = np.ascontiguousarray(row[None, :]).copy()
        table[0, 0] = 0
        return replace(self, q=np.ascontiguousarray(self.q[row[0] : row[0] + row[1]]), table=table)


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)


def make_table(case: Case, rng: np.random.Generator) -> tuple[Table, int, int]:
    """(table, number of tokens, number of blocks): block ids permuted, -1 past the end, one padding row."""
    size = case.params.block_size
    needs = [blocks_of(length, size) for _, length in case.sequences]
    shared = min([case.shared_blocks, *needs])
    n_blocks = shared + sum(n - shared for n in needs) + case.spare_blocks
    ids = rng.permutation(n_blocks).astype(np.int32)
    table = np.full((len(needs) + 1, HEADER + max([1, *needs]) + 1), -1, np.int32)
    taken, q0 = shared, 0
    for row, (n_q, length), n in zip(table, case.sequences, needs, strict=False):
        q0 += case.loose_rows
        first = reference.first_visible(case.params, length - n_q) // size if case.trimmed and n_q else 0
        row[:HEADER] = 0
        row[:5] = q0, n_q, length, 0, first
        blocks = np.concatenate((ids[:shared], ids[taken : taken + n - shared]))[first:]
        row[HEADER : HEADER + len(blocks)] = blocks
        taken, q0 = taken + n - shared, q0 + n_q
    table[-1, :HEADER] = 0
    return table, q0, n_blocks


def make(case: Case) -> Call:
    """Random arrays for the case: queries a little wider than keys, so that weights are uneven."""
    rng = np.random.default_rng(case.seed)
    heads = case.heads
    table, n_tokens, n_blocks = make_table(case, rng)
    n_slots = n_blocks * case.params.block_size
    q = (1.5 * rng.standard_normal((max(1, n_tokens), heads.n_head, heads.d_k))).astype(np.float32)
    k = lab.quantize(
        heads.type_k, rng.standard_normal((n_slots, heads.n_head_kv, heads.d_k)).astype(np.float32)
    )
    k_floats = lab.dequantize(heads.type_k, k, heads.d_k)
    if case.v_of_k:
        v, v_floats = None, k_floats[..., : heads.d_v]
    else:
        v = lab.quantize(
            heads.type_v, rng.standard_normal((n_slots, heads.n_head_kv, heads.d_v)).astype(np.float32)
        )
        v_floats = lab.dequantize(heads.type_v, v, heads.d_v)
    sinks = rng.standard_normal(heads.n_head).astype(np.float32) if case.sinks else None
    return Call(case, q, k, v, table, sinks, k_floats, v_floats)


def shapes_of(case: Case) -> Call:
    """Return the case's table over zeros, for tests that compute nothing."""
    heads = case.heads
    table, n_tokens, n_blocks = make_table(case, np.random.default_rng(case.seed))
    n_slots = n_blocks * case.params.block_size

    def zeros(kv_type: str, d: int) -> Bytes:
        return np.zeros((n_slots, heads.n_head_kv, lab.row_size(kv_type, d)), np.uint8)

    q = np.zeros((max(1, n_tokens), heads.n_head, heads.d_k), np.float32)
    v = None if case.v_of_k else zeros(heads.type_v, heads.d_v)
    return Call(case, q, zeros(heads.type_k, heads.d_k), v, table, None, q[:0], q[:0])


def poisoned(call: Call, byte: int) -> Call:
    """Every slot that no table names, and those past a length in a last block, overwritten."""
    unused = ~call.used_slots()
    assert unused.any()

    def poison(x: Bytes) -> Bytes:
        x = x.copy()
        x[unused] = byte
        return x

    return replace(call, k=poison(call.k), v=None if call.v is None else poison(call.v))


def same_bits(a: Floats, b: Floats) -> bool:
    """Equal as bytes: a negative zero is not a positive one, a NaN is itself."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()
