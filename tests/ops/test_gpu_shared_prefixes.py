"""Shared prefixes in the GPU kernels: read once, without a change of any bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import lab
from .cases import Call, Case, blocks_of, make, poisoned, same_bits
from .lab import HEADER, KV_TYPES, Floats, GpuItem, GpuPlan, Heads, Params, Table
from .test_gpu_kernels import on_gpu

SEVEN = ((1, 600), (1, 700), (1, 640), (1, 768), (1, 1000), (1, 577), (1, 601))
"""Decode, with KV splits of 256 tokens."""


def joined(call: Call, blocks: tuple[int, ...]) -> Call:
    """Share `blocks[i - 1]` leading blocks of row i with the row before, and mark them in the table."""
    table = call.table.copy()
    for row, n in enumerate(blocks, 1):
        table[row, HEADER : HEADER + n] = table[row - 1, HEADER : HEADER + n]
    return with_prefixes(replace(call, table=lab.find_shared(table, call.case.params.block_size)), True)


def with_prefixes(call: Call, flag: bool) -> Call:
    """Return the call with or without the flag of many shared blocks, which selects larger tiles."""
    return replace(call, case=replace(call.case, params=replace(call.case.params, prefixes=flag)))


def apart(call: Call) -> Call:
    """Return the same call without the marks of shared blocks."""
    table = call.table.copy()
    table[:, 3] = 0
    return with_prefixes(replace(call, table=table), False)


def items(call: Call, blocks: int = 1) -> list[tuple[int, GpuItem]]:
    """Return (rows of a tile, item) of all launches."""
    case = call.case
    plan = GpuPlan(case.heads, case.params, call.q, call.k, call.v, call.table)
    return [(launch.tile_rows, item) for launch in plan.launches for item in plan.items(launch, blocks)]


def most_members(call: Call, blocks: int = 1) -> int:
    return max(item.members for _, item in items(call, blocks))


def assert_same_bits(call: Call, members: int) -> Floats:
    """Check that sharing changes no bit, with one thread block or more, and return the output.

    `members` sequences are in a tile.
    """
    assert most_members(call) == members
    together = on_gpu(call, blocks=1)
    assert np.isfinite(together).all()
    assert same_bits(on_gpu(apart(call), blocks=3), together)
    assert same_bits(on_gpu(call, blocks=3), together)
    assert same_bits(on_gpu(with_prefixes(call, False), blocks=3), together)
    return together


# ---- bits ----


@pytest.mark.parametrize(
    ("kv_type", "sizes"),
    [
        *((t, (64, 64)) for t in KV_TYPES),
        ("f16", (128, 96)),
        *(pytest.param(t, (128, 96), marks=pytest.mark.slow) for t in KV_TYPES if t != "f16"),
    ],
)
def test_every_type(kv_type: str, sizes: tuple[int, int]) -> None:
    """Four of seven are in a tile, then three; prefixes end within a split."""
    call = make(Case(Heads(*sizes, 8, 2, kv_type, kv_type), sequences=SEVEN))
    assert_same_bits(joined(call, (18, 17, 17, 18, 16, 17)), 4)


@pytest.mark.parametrize("kv_type", ["f16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_large_heads(kv_type: str) -> None:
    """Latent attention, whose V is a view of K; tiles of 16 rows, of 8 for heads of 256."""
    call = make(Case(Heads(576, 512, 8, 1, kv_type, kv_type), sequences=SEVEN[:3], v_of_k=True))
    assert_same_bits(joined(call, (17, 17)), 2)
    call = make(Case(Heads(256, 256, 8, 2, kv_type, kv_type), sequences=SEVEN[:5]))
    assert_same_bits(joined(call, (18, 17, 17, 18)), 4 if kv_type in ("f32", "bf16") else 2)


@pytest.mark.parametrize(
    ("types", "sizes", "kilobytes"),
    [(("q5_0", "q8_0"), (128, 128), 64), (("f32", "f16"), (256, 64), 227), (("f32", "q8_0"), (96, 64), 99)],
)
def test_the_flag_changes_no_bit_if_the_larger_tile_does_not_fit(
    types: tuple[str, str], sizes: tuple[int, int], kilobytes: int
) -> None:
    """Tiles of 8 rows fit into the memory, tiles of 16 rows do not."""
    call = make(Case(Heads(*sizes, 4, 1, *types), sequences=((1, 100), (1, 700), (2, 300))))
    plain = on_gpu(call, shared_bytes=kilobytes << 10)
    assert same_bits(on_gpu(with_prefixes(call, True), shared_bytes=kilobytes << 10), plain)


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "members"),
    [
        (2, 2, 7),
        (3, 1, 5),
        (10, 2, 3),
        (8, 1, 2),
        (9, 1, 1),
        (16, 1, 1),
        (20, 1, 6),
        (33, 1, 3),
        pytest.param(70, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_groups_of_heads(n_head: int, n_head_kv: int, members: int) -> None:
    """As many sequences as fit into a tile of 16 rows, or of 128 rows for larger groups."""
    call = make(Case(Heads(64, 64, n_head, n_head_kv, "q8_0", "f16"), sequences=SEVEN))
    assert_same_bits(joined(call, (18, 17, 17, 18, 16, 17)), members)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("params", "members"),
    [
        (Params(max_bias=8.0), 4),
        (Params(softcap=30.0, scale=0.3), 4),
        (Params(max_bias=4.0, softcap=20.0, block_size=96), 4),
        (Params(block_size=64), 4),
        (Params(block_size=256), 4),
        (Params(window=500, window_type="sliding"), 1),
        (Params(window=5000, window_type="sliding"), 1),
        (Params(window=300, window_type="chunked", max_bias=4.0), 1),
    ],
    ids=str,
)
def test_parameters(params: Params, members: int, sinks: bool) -> None:
    """Sequences with windows never share: their first visible token may be anywhere."""
    call = make(Case(Heads(64, 64, 4, 1, "f16", "q8_0"), params, SEVEN, sinks, trimmed=False))
    shared = 544 // params.block_size
    assert_same_bits(joined(call, (shared,) * 6), members)


@pytest.mark.parametrize("kv_type", ["f16", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_mixtures(kv_type: str) -> None:
    """Rows of prompts, of several queries, of none and of other splits are between rows that share."""
    sequences = (
        *((1, 600), (1, 700), (0, 700), (1, 700), (1, 620), (40, 640), (17, 600), (1, 630), (1, 650)),
        *(
            (1, 560),
            (1, 570),
            (1, 900),
            (2, 900),
            (2, 800),
            (2, 1300),
            (3, 700),
            (1, 256),
            (1, 300),
            (1, 512),
        ),
    )
    call = make(Case(Heads(64, 64, 8, 2, kv_type, kv_type), sequences=sequences, loose_rows=1))
    needs = [blocks_of(length, 32) for _, length in sequences]
    call = joined(call, tuple(min(pair) for pair in pairwise(needs)))
    together = assert_same_bits(call, 4)
    for row, (n_q, _) in enumerate(sequences):
        q0 = int(call.table[row, 0])
        assert same_bits(on_gpu(call.alone(row), blocks=2), together[q0 : q0 + n_q])
    assert same_bits(on_gpu(poisoned(call, 0xFF), blocks=1), together)


def test_a_sequence_that_is_all_shared_prefix() -> None:
    """Another sequence's items read all of its tokens, the last one too."""
    call = make(Case(Heads(64, 64, 8, 2), sequences=((1, 512), (1, 512), (1, 1024), (1, 768))))
    call = joined(call, (16, 16, 24))
    assert {item.row for _, item in items(call)} == {0, 2}
    assert_same_bits(call, 4)


def test_a_sequence_of_one_split_is_not_shared() -> None:
    """It has no partial results, so its split is not shared with a longer sequence."""
    call = make(Case(Heads(64, 64, 8, 2), sequences=((1, 256), (1, 700), (1, 256), (1, 600))))
    assert_same_bits(joined(call, (8, 8, 8)), 1)


# ---- the schedule ----


def splits(call: Call, blocks: int) -> Iterator[tuple[int, int, int, int, tuple[int, int]]]:
    """Yield (row, tile, KV head, split, its tokens) of every item."""
    for _, item in items(call, blocks):
        for row in range(item.row, item.row + item.members):
            yield row, item.tile, item.head_kv, item.split, (item.begin, item.end)


def check_plan(call: Call) -> int:
    """Check that every split is computed once, and shared only if equal. Return the most members."""
    alone = sorted(splits(apart(call), 1))
    assert sorted(splits(call, 1)) == alone
    assert len(alone) == len(set(alone))
    starts = {item.row: item.partials for _, item in items(apart(call))}
    most, size = 1, call.case.params.block_size
    group = call.case.heads.n_head // call.case.heads.n_head_kv
    for tile_rows, item in items(call):
        assert item.partials == starts[item.row]
        members = call.table[item.row : item.row + item.members]
        most = max(most, item.members)
        if item.members > 1:
            assert item.n_splits > 1
            assert len(set(members[:, 1])) == 1
            assert item.members * members[0, 1] * group <= tile_rows
            assert item.end <= (members[:, 2] - members[:, 1]).min() + 1
            named = members[:, HEADER + item.begin // size : HEADER + blocks_of(item.end, size)]
            assert (named == named[0]).all()
    return most


rows = st.tuples(
    st.sampled_from([0, 1, 1, 1, 1, 2, 3, 16, 17]),
    st.sampled_from([70, 256, 300, 512, 560, 600, 1000, 8192, 8200, 9000, 10000, 20000]),
    st.integers(0, 700),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(rows, min_size=1, max_size=20),
    st.sampled_from([(1, 1), (4, 1), (6, 2), (20, 1), (40, 1)]),
    st.sampled_from([32, 96, 256]),
)
def test_every_split_is_computed_once(
    sequences: list[tuple[int, int, int]], heads: tuple[int, int], block_size: int
) -> None:
    """For any number of shared blocks."""
    case = Case(Heads(8, 8, *heads), Params(block_size=block_size), [(q, n) for q, n, _ in sequences])
    needs = [blocks_of(n, block_size) for _, n in case.sequences]
    shared = [min(s[2], a, b) for s, (a, b) in zip(sequences[1:], pairwise(needs), strict=True)]
    check_plan(joined(make(case), tuple(shared)))


def test_splits_of_the_same_size_are_shared_and_others_not() -> None:
    """Splits have 256 tokens up to 2048, 512 up to 16384, 1024 up to 32768."""

    def together(*lengths: int) -> int:
        call = make(Case(Heads(8, 8, 4, 1), sequences=[(1, n) for n in lengths]))
        common = min(lengths) // 32
        return check_plan(joined(call, (common,) * (len(lengths) - 1)))

    assert together(600, 2048) == together(2049, 16384) == together(16385, 32768, 31000) - 1 == 2
    assert together(2048, 2049) == together(16384, 16385) == together(300, 200) == 1


def test_long_tables() -> None:
    """An entry of the schedule's index stands for several rows."""
    call = make(Case(Heads(8, 8, 4, 1), sequences=[(1, 600)] * 1100))
    assert check_plan(joined(call, tuple(18 if row % 7 else 0 for row in range(1, 1100)))) == 4


@pytest.mark.parametrize(
    ("shared_blocks", "worth_it"), [(24, {1, 2, 7, 8, 10, 14, 16, 20, 31}), (8, {1, 2, 7, 10, 14, 31})]
)
def test_prefixes_are_shared_if_that_saves_a_wave(shared_blocks: int, worth_it: set[int]) -> None:
    """32 items without sharing; 14 if three splits of four are shared, 26 if one is."""
    call = make(Case(Heads(8, 8, 8, 2), sequences=[(1, 1000)] * 4))
    call = joined(call, (shared_blocks,) * 3)
    for blocks in (1, 2, 7, 8, 10, 14, 16, 20, 31, 32, 33, 1000):
        assert most_members(call, blocks) == (4 if blocks in worth_it else 1)


# ---- marks in the table ----


def common_blocks(table: Table, block_size: int) -> list[int]:
    """Return the number of leading blocks of each row that the row before has too."""
    found = [0]
    for before, row in pairwise(table):
        n = min(blocks_of(int(r[2]), block_size) if r[1] and not r[4] else 0 for r in (before, row))
        differ = np.flatnonzero(before[HEADER : HEADER + n] != row[HEADER : HEADER + n])
        found.append(int(differ[0]) if len(differ) else n)
    return found


@pytest.mark.parametrize("block_size", [32, 96])
def test_rows_count_their_shared_blocks(block_size: int) -> None:
    """Within both lengths; a row without queries or without its first blocks has none."""
    rng = np.random.default_rng(5)
    table = np.full((40, HEADER + 9), -1, np.int32)
    table[:, 0:2] = rng.integers(0, 5, (40, 2))
    table[:, 2] = rng.integers(1, 9 * block_size + 1, 40)
    table[:, 3] = rng.integers(0, 9, 40)
    table[:, 4] = rng.random(40) < 0.1
    table[:, HEADER:] = rng.random((40, 9)) < 0.05
    found = lab.find_shared(table, block_size)
    others = [0, 1, 2, *range(4, HEADER + 9)]
    assert (found[:, others] == table[:, others]).all()
    assert list(found[:, 3]) == common_blocks(table, block_size)
    assert len(set(found[:, 3])) > 4
