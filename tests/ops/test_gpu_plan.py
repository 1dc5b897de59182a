"""Schedule of the GPU kernels: work items, sizes of tiles, refused calls."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from .cases import RAGGED, Call, Case, shapes_of
from .lab import KV_TYPES, QUANTIZED, GpuItem, GpuPlan, Heads, Params

GRAIN = 64
KIB = 1024
CARDS = {"7.5": 64 * KIB, "7.0": 96 * KIB, "8.6 and 8.9": 99 * KIB, "8.0": 163 * KIB, "9.0": 227 * KIB}
"""Shared memory that a block may have, by compute capability."""


def plan_of(call: Call, shared_bytes: int = 227 * KIB) -> GpuPlan:
    case = call.case
    return GpuPlan(case.heads, case.params, call.q, call.k, call.v, call.table, shared_bytes)


def all_items(call: Call) -> list[tuple[int, GpuItem]]:
    """Return (rows of a tile, item) of all launches."""
    plan = plan_of(call)
    return [(launch.tile_rows, item) for launch in plan.launches for item in plan.items(launch)]


def first_seen(params: Params, position: int) -> int:
    """Return the first position that a query attends, by the operator's definition."""
    if params.window_type == "sliding":
        return max(0, position - params.window + 1)
    return position // params.window * params.window if params.window_type == "chunked" else 0


WINDOWS = [
    Params(),
    Params(window=300, window_type="sliding"),
    Params(window=1, window_type="sliding"),
    Params(window=700, window_type="chunked"),
]


@pytest.mark.parametrize("params", WINDOWS, ids=str)
@pytest.mark.parametrize("group", [1, 4, 40])
def test_every_token_of_every_row_is_attended_once(params: Params, group: int) -> None:
    """By one item, whose tokens begin at a multiple of the grain."""
    lengths = ((1, 9000), (2, 5000), (16, 4097), (17, 4096), (300, 1000), (0, 50), (1, 1), (1, 256), (1, 257))
    call = shapes_of(Case(Heads(64, 64, 2 * group, 2), params, lengths))
    many = plan_of(call).launches[-1].tile_rows
    by_tile: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for tile_rows, item in all_items(call):
        place = (item.row, item.head_kv, item.tile * tile_rows)
        by_tile.setdefault(place, []).append((item.begin, item.end))
    rows_of_tile = {n_q: 16 if n_q * group <= 16 else many for n_q, _ in lengths}
    assert set(by_tile) == {
        (row, head, first)
        for row, (n_q, _) in enumerate(lengths)
        for head in range(2)
        for first in range(0, n_q * group, rows_of_tile[n_q])
    }
    for (row, _, first), found in by_tile.items():
        n_q, length = lengths[row]
        last = min(first + rows_of_tile[n_q], n_q * group) - 1
        ranges = [pair for pair in sorted(found) if pair[0] < pair[1]]
        begin = first_seen(params, length - n_q + first // group)
        assert begin - GRAIN < ranges[0][0] <= begin
        assert ranges[-1][1] == length - n_q + last // group + 1
        assert all(left[1] == right[0] for left, right in pairwise(ranges))
        assert all(begin % GRAIN == 0 for begin, _ in ranges)


@pytest.mark.parametrize("params", WINDOWS, ids=str)
def test_splits_depend_on_the_sequence_alone(params: Params) -> None:
    """Not on other sequences, nor on their number."""
    lengths = [(1, 9000), (16, 3000), (17, 3000), (2, 70), (1, 256)]
    mixed = lengths + [(1, 40)] * 30
    random.Random(3).shuffle(mixed)
    heads = Heads(64, 64, 8, 2)

    def splits(call: Call, row: int) -> list[tuple[int, ...]]:
        return [
            (rows, item.tile, item.head_kv, item.split, item.n_splits, item.begin, item.end)
            for rows, item in all_items(call)
            if item.row == row
        ]

    together = shapes_of(Case(heads, params, mixed))
    for sequence in lengths:
        alone = shapes_of(Case(heads, params, (sequence,)))
        assert splits(together, mixed.index(sequence)) == splits(alone, 0)


def test_long_sequences_are_split_and_many_queries_are_not() -> None:
    """A split has 256 tokens up to 2048, 512 up to 16384, and so on: at most 32 splits."""
    lengths = ((1, 256), (1, 257), (16, 2048), (17, 4096), (16, 4096), (1, 16384), (1, 16385), (1, 40000))
    call = shapes_of(Case(Heads(64, 64, 4, 1), sequences=lengths))
    splits = {item.row: item.n_splits for _, item in all_items(call)}
    assert splits == {0: 1, 1: 2, 2: 8, 3: 1, 4: 8, 5: 32, 6: 17, 7: 20}


@pytest.mark.parametrize("most", [1, 255, 257, 2047, 2049, 4097, 16383, 16385, 33000])
def test_no_sequence_of_a_table_has_more_splits_than_the_workspace(most: int) -> None:
    """Nor a shorter one: at 2048 tokens there are more splits than at 2049."""
    lengths = [n for n in (1, 256, 2048, 2049, 4096, 8192, 16384, 16385, most) if n <= most]
    heads = Heads(8, 8, 1, 1)
    call = shapes_of(Case(heads, sequences=[(1, n) for n in lengths]))
    splits = max(item.n_splits for _, item in all_items(call))
    assert splits * len(lengths) <= plan_of(call).max_partials


@pytest.mark.parametrize("n_rows", [1, 5, 255, 256, 257, 513, 1300, 2500])
def test_partial_results_do_not_overlap(n_rows: int) -> None:
    """Nor do they exceed what shapes bound, however many rows the table has."""
    rng = random.Random(n_rows)
    sequences = [rng.choice([(1, 1), (0, 9), (1, 300), (2, 700), (17, 300)]) for _ in range(n_rows)]
    call = shapes_of(Case(Heads(64, 64, 4, 2), sequences=sequences))
    plan = plan_of(call)
    begin = 0
    starts = {}
    for row, (n_q, length) in enumerate(sequences):
        n = -(-length // 256) if 0 < n_q <= 16 else 1
        starts[row] = begin
        begin += n_q * 4 * n if n > 1 else 0
    assert begin <= plan.max_partials
    for launch in plan.launches:
        for item in plan.items(launch):
            assert item.partials == starts[item.row]


# ---- tiles ----

BY_TOKENS, BY_ROWS, BY_COLUMNS = range(3)


def bytes_of(heads: Heads, launch_rows: int, tokens: int) -> int:
    """Return a lower bound of a tile's bytes: queries of two terms, two stages of raw K and V."""
    size = {"f16": 2.0, "bf16": 2.0, "f32": 4.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
    raw = heads.d_k * size[heads.type_k] + heads.d_v * size[heads.type_v]
    return int(2 * launch_rows * heads.d_k * 2 + 2 * tokens * raw)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (256, 256), (576, 512)])
def test_tiles_fit_into_shared_memory(card: str, kv_type: str, sizes: tuple[int, int]) -> None:
    """With less memory, another kernel has the rows, or its tiles are smaller."""
    heads = Heads(*sizes, 8, 2, kv_type, kv_type)
    plan = plan_of(shapes_of(Case(heads, sequences=((1, 100), (40, 90)))), CARDS[card])
    if plan.refusal:
        # 16 rows and 16 tokens, converted if the tensor cores cannot use them
        unpacked = 0 if kv_type in ("f16", "bf16") else 16 * 2 * sum(sizes) * (2 if kv_type == "f32" else 1)
        assert bytes_of(heads, 16, 16) + unpacked + 12 * KIB > CARDS[card]
        return
    assert (plan.launches[0].min_rows, plan.launches[-1].max_rows) == (1, 2**31 - 1)
    assert all(left.max_rows + 1 == right.min_rows for left, right in pairwise(plan.launches))
    for launch in plan.launches:
        tokens = launch.tile_tokens * (4 if launch.division == BY_TOKENS else 1)
        assert launch.tile_tokens in ((16,) if launch.division == BY_TOKENS else (16, 32, 64))
        assert bytes_of(heads, launch.tile_rows, tokens) < launch.shared_bytes <= CARDS[card]
        assert launch.columns >= sizes[1]
    few = plan.launches[0]
    more = plan_of(shapes_of(Case(heads, sequences=((1, 100), (40, 90)))), few.shared_bytes - 1)
    assert more.refusal or more.launches[0].shared_bytes < few.shared_bytes


def test_two_blocks_of_common_heads_fit_a_multiprocessor() -> None:
    """On 9.0 and 8.0; but tiles of heads of 128 in prefill are larger on 8.0."""
    for kv_type in ("f16", "q8_0", "q4_0"):
        for d in (64, 128):
            call = shapes_of(Case(Heads(d, d, 32, 8, kv_type, kv_type), sequences=((40, 90), (1, 300))))
            for room in (163 * KIB, 227 * KIB):
                divisions = [BY_TOKENS, BY_TOKENS, BY_ROWS]
                for launch, division in zip(plan_of(call, room).launches, divisions, strict=True):
                    assert launch.division == division
                    fits = 2 * (launch.shared_bytes + KIB) <= room + KIB
                    assert fits or (room == 163 * KIB and d == 128 and division == BY_ROWS)


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_cards_from_8_0_on_decode_common_heads_by_tokens(kv_type: str, kilobytes: int) -> None:
    """And prefill by rows: no part of a tile may outgrow the cards with 100 KiB."""
    for d in (64, 128):
        call = shapes_of(Case(Heads(d, d, 32, 8, kv_type, kv_type), sequences=((40, 90), (1, 300))))
        divisions = [launch.division for launch in plan_of(call, kilobytes * KIB).launches]
        assert divisions == [BY_TOKENS, BY_TOKENS, BY_ROWS]


@pytest.mark.parametrize("group", [1, 8, 9, 16, 17, 40])
def test_sequences_of_one_query_need_one_launch(group: int) -> None:
    """If the call says so: of the kernel for their rows, which is the same as without the word."""
    heads, sequences = Heads(64, 64, group, 1), ((1, 300), (1, 5), (0, 9))
    both = plan_of(shapes_of(Case(heads, Params(), sequences))).launches
    (one,) = plan_of(shapes_of(Case(heads, Params(single=True), sequences))).launches
    of_rows = next(launch for launch in both if launch.min_rows <= group <= launch.max_rows)
    assert replace(one, min_rows=0, max_rows=0) == replace(of_rows, min_rows=0, max_rows=0)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_common_heads_fit_every_card(kv_type: str) -> None:
    """64 and 128."""
    for d in (64, 128):
        call = shapes_of(Case(Heads(d, d, 8, 2, kv_type, kv_type)))
        assert not any(plan_of(call, room).refusal for room in CARDS.values())


@pytest.mark.parametrize(
    ("kilobytes", "f32", "bf16", "f16", "q8_0", "q5", "q4"),
    [
        (64, 128, 288, 320, 288, 320, 352),
        (96, 192, 480, 480, 448, 512, 512),
        (99, 192, 480, 480, 480, 512, 512),
        (163, 352, 512, 512, 512, 512, 512),
        (227, 480, 512, 512, 512, 512, 512),
    ],
)
def test_the_largest_heads(
    kilobytes: int, f32: int, bf16: int, f16: int, q8_0: int, q5: int, q4: int
) -> None:
    """As docs/ARCHITECTURE.md says, in multiples of 32."""
    largest = {"f32": f32, "bf16": bf16, "f16": f16, "q8_0": q8_0, "q5_0": q5, "q5_1": q5}
    for kv_type in KV_TYPES:
        most = largest.get(kv_type, q4)
        for d in (most, most + 32):
            plan = plan_of(shapes_of(Case(Heads(d, d, 32, 8, kv_type, kv_type))), kilobytes << 10)
            assert bool(plan.refusal) == (d > most)


def test_latent_attention_fits_from_capability_8_on() -> None:
    """Heads of 576 and 512 whose V is a view of K."""
    latent = shapes_of(Case(Heads(576, 512, 16, 1, "f16", "f16"), v_of_k=True))
    refused = [bool(plan_of(latent, room).refusal) for room in CARDS.values()]
    assert refused == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("n_head", "kv_type", "fast", "tiles"),
    [
        (16, "f16", False, (0, 16, 16, 16, 16)),
        (63, "f16", False, (0, 16, 16, 16, 16)),
        (64, "f16", False, (0, 16, 16, 16, 64)),
        (128, "f16", False, (0, 16, 16, 16, 64)),
        (128, "bf16", False, (0, 16, 16, 16, 64)),
        (128, "q8_0", False, (0, 16, 16, 16, 64)),
        (128, "f16", True, (0, 16, 16, 64, 64)),
        (128, "f32", True, (0, 0, 0, 16, 16)),
    ],
)
def test_tiles_of_latent_attention(n_head: int, kv_type: str, fast: bool, tiles: tuple[int, ...]) -> None:
    """64 rows for 64 heads or more, if the memory of a card suffices (0: refused)."""
    heads = Heads(576, 512, n_head, 1, kv_type, kv_type)
    call = shapes_of(Case(heads, Params(fast=fast), ((1, 100),), v_of_k=True))
    for room, rows in zip(CARDS.values(), tiles, strict=True):
        launches = plan_of(call, room).launches
        assert {launch.tile_rows for launch in launches} == ({rows} if rows else set())


def test_fast_tiles_of_many_rows_have_more_tokens() -> None:
    """Their queries are half as long, so more tokens fit beside a second thread block of 9.0."""
    heads, sequences = Heads(128, 128, 32, 8), ((40, 90), (1, 300))
    exact, fast = (
        plan_of(shapes_of(Case(heads, Params(fast=fast), sequences))).launches for fast in (False, True)
    )
    assert fast[:-1] == exact[:-1]
    assert (exact[-1].tile_tokens, fast[-1].tile_tokens) == (32, 64)
    assert all(2 * (launches[-1].shared_bytes + KIB) <= 228 * KIB for launches in (exact, fast))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_tiles_do_not_follow_the_number_of_sequences(kv_type: str) -> None:
    """The order of a sum follows the tiles: a long table must not make them smaller."""
    heads = Heads(128, 128, 8, 2, kv_type, kv_type)
    one = shapes_of(Case(heads, sequences=((1, 40),)))
    many = shapes_of(Case(heads, sequences=((1, 1),) * 2000))
    for room in CARDS.values():
        few, padded = plan_of(one, room).launches[0], plan_of(many, room).launches[0]
        assert few == padded


@pytest.mark.parametrize(
    ("group", "n_queries", "prefixes", "tiles"),
    [
        (8, 1, False, [8]),
        (8, 1, True, [16]),
        (8, 2, False, [8, 16]),
        (9, 1, False, [16]),
        (16, 1, False, [16]),
        (17, 1, False, [64]),
        (16, 2, False, [16, 64]),
        (8, 3, False, [8, 16, 64]),
        (8, 3, True, [16, 64]),
    ],
)
def test_kernels_that_no_sequence_needs_are_not_launched(
    group: int, n_queries: int, prefixes: bool, tiles: list[int]
) -> None:
    """A sequence has the packed rows of one query or more, and at most the rows of all queries."""
    heads = Heads(64, 64, group, 1)
    call = shapes_of(Case(heads, Params(prefixes=prefixes), sequences=((1, 100),) * n_queries))
    assert [launch.tile_rows for launch in plan_of(call).launches] == tiles


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_types_and_sizes_that_run(kv_type: str) -> None:
    """Multiples of 8 up to 512 for V, of 32 for quantized types; larger heads are refused."""
    step = 32 if kv_type in QUANTIZED else 8
    for d in range(step, 513, 5 * step):
        call = shapes_of(Case(Heads(64, d, 4, 2, "f16", kv_type)))
        assert plan_of(call).refusal == ""
    too_long = shapes_of(Case(Heads(64, 544, 4, 2, "f16", kv_type)))
    assert plan_of(too_long).refusal == "the head size of V must be at most 512"


def test_what_is_refused() -> None:
    """Each for its own reason."""
    call = shapes_of(Case(Heads(64, 64, 4, 2)))
    assert plan_of(call, 8 * KIB).refusal == "a tile of these heads does not fit into a block's shared memory"
    odd = shapes_of(Case(Heads(36, 64, 4, 2)))
    assert plan_of(odd).refusal == "the head sizes must be multiples of 8"
    wide = np.zeros((call.k.shape[0], 2, call.k.shape[2] + 1), np.uint8)
    shifted = replace(call, k=wide[:, :, : call.k.shape[2]])
    assert plan_of(shifted).refusal == "rows of K and V must begin at even addresses"


def test_rows_of_no_queries_have_no_work() -> None:
    """Rows that pad a table to a fixed size."""
    call = shapes_of(Case(Heads(64, 64, 8, 2), sequences=RAGGED))
    padded = replace(call, table=np.pad(call.table, ((0, 700), (0, 0))))
    assert all_items(padded) == all_items(call)
