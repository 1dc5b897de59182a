"""Shapes at and beyond what the kernels have room for: sequences that share a prefix, and wide heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from .cases import Call, Case, make, same_bits
from .lab import KV_TYPES, QUANTIZED, Heads, Run
from .reference import nmse
from .test_numbers import assert_right, limit

CHUNK = 512
"""Tokens of a chunk: a prefix of as many is read once for the sequences that share it."""
MOST = 40
"""Sequences of a batch; an item of the decode kernel takes up to 32."""
EDGES = (1, 2, 3, 8, 15, 16, 17, 18, 31, 32, 33, 34)
"""Numbers of sequences around the most that an item takes for some group of heads."""


def prefix_call(group: int, shared_tokens: int, rows: tuple[int, ...], kv_type: str = "f16") -> Call:
    """Sequences of so many query rows that begin with the same blocks."""
    lengths = tuple((n, shared_tokens + n + 3 * index) for index, n in enumerate(rows))
    d = 32 if kv_type in QUANTIZED else 16
    heads = Heads(d, d, group, 1, kv_type, kv_type)
    return make(Case(heads, sequences=lengths, shared_blocks=shared_tokens // 32))


def first(call: Call, n: int) -> Call:
    """The call with its first n sequences alone."""
    table = np.ascontiguousarray(call.table[:n])
    return replace(call, q=np.ascontiguousarray(call.q[: table[:, 1].sum()]), table=table)


def assert_as_alone(call: Call, threads: int) -> None:
    """Each sequence has the bits that it has alone, and the numbers of the scalar reference."""
    together = call.run(Run(threads=threads))
    assert nmse(together, call.run(Run(use_ref=True)).astype(np.float64)) <= limit(call)
    for index, (n_q, _) in enumerate(call.case.sequences):
        q0 = int(call.table[index, 0])
        assert same_bits(call.alone(index).run(Run(threads=1)), together[q0 : q0 + n_q])


def groups_and_prefixes() -> Iterator[object]:
    """Every group of heads with a prefix of one chunk; with none or two, a few groups, and the rest slow."""
    for group in range(1, 33):
        yield pytest.param(group, CHUNK)
        for shared_tokens in (0, 2 * CHUNK):
            often = group in (1, 2, 3, 5, 8, 11, 16, 17, 32)
            yield pytest.param(group, shared_tokens, marks=() if often else pytest.mark.slow)


@pytest.mark.parametrize(("group", "shared_tokens"), list(groups_and_prefixes()))
def test_any_number_of_sequences_shares_a_prefix(group: int, shared_tokens: int) -> None:
    """1 to 40 sequences, 1 to 32 query heads for a KV head."""
    call = prefix_call(group, shared_tokens, (1,) * MOST)
    together = call.run()
    assert nmse(together, call.run(Run(use_ref=True)).astype(np.float64)) <= limit(call)
    for n in range(1, MOST) if shared_tokens == CHUNK else EDGES:
        assert same_bits(first(call, n).run(Run(threads=1)), together[:n])


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize("group", [1, 2, 3, 16])
def test_a_shared_prefix_of_many_changes_no_bit(kv_type: str, group: int) -> None:
    """As many sequences as an item takes, and one more or fewer."""
    for n in (31, 32, 33):
        assert_as_alone(prefix_call(group, CHUNK, (1,) * n, kv_type), threads=1 + n % 3)


@pytest.mark.parametrize("rows", [(1,) * 32, (2,) * 20, (1, 31, 1, 2), (32, 1), (3, 5, 7, 11, 13)], ids=str)
def test_rows_of_members_in_any_mixture(rows: tuple[int, ...]) -> None:
    """Without grouped heads 32 rows fit an item, whatever sequences they are of."""
    assert_as_alone(prefix_call(1, 2 * CHUNK, rows), threads=2)


WIDE = [(608, 608), (640, 640), (672, 672), (1024, 512), (128, 2048), (2048, 96), (4096, 4096)]
"""Head sizes of K and V around the 640 that kernels over codes have room for, and far beyond."""


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(("d_k", "d_v"), WIDE)
def test_heads_of_any_width(kv_type: str, d_k: int, d_v: int) -> None:
    """Beyond the room for codes the kernel over floats serves."""
    heads = Heads(d_k, d_v, 2, 1, kv_type, kv_type)
    assert_right(make(Case(heads, sequences=((1, 40), (9, 33)), spare_blocks=1)))


@pytest.mark.parametrize("type_k", QUANTIZED)
@pytest.mark.parametrize("type_v", ["q8_0", "q4_1", "f16"])
def test_wide_heads_of_types_apart(type_k: str, type_v: str) -> None:
    """K beyond the bound and V within it, and the other way round."""
    for d_k, d_v in ((672, 128), (128, 672), (704, 640), (640, 736)):
        assert_as_alone(make(Case(Heads(d_k, d_v, 4, 2, type_k, type_v), sequences=((1, 40), (3, 33)))), 2)
