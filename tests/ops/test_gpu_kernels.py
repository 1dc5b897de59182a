"""The GPU kernels on the host, with fibers as threads, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from . import lab
from .cases import Call, Case, make, poisoned, same_bits
from .lab import KV_TYPES, QUANTIZED, Floats, Heads, Params
from .reference import nmse

SIZES = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (576, 512)]
OFTEN = ("f32", "f16", "bf16", "q8_0")
"""Types that each head size is tried with; the others are slow tests."""
RAGGED = ((1, 1), (7, 7), (1, 133), (33, 100), (0, 64), (5, 97), (1, 64), (1, 1100), (40, 290), (3, 513))
"""Shorter than on the CPU: each thread of a GPU is a fiber here."""
LIMIT = 1e-6
"""NMSE against float64; weights and dequantized numbers have the 11 bits of float16."""
FAST_LIMITS = {"f32": 5e-5, "bf16": 2e-5}
"""With one term of 8 bits in products of many rows. With 11 bits they are within LIMIT."""


def on_gpu(
    call: Call,
    blocks: int = 4,
    shared_bytes: int = 227 << 10,
    tensor_cores: bool = True,
    order: int = 0,
    workspace_bytes: int = 256 << 20,
) -> Floats:
    """Return the call's output, with threads run in this order."""
    case = call.case
    inputs = (case.heads, case.params, call.q, call.k, call.v, call.table, call.sinks)
    return lab.paged_attention_gpu(*inputs, blocks, shared_bytes, tensor_cores, order, workspace_bytes)


@pytest.mark.parametrize(
    ("kv_type", "d_k", "d_v"),
    [
        pytest.param(t, *sizes, marks=() if t in OFTEN or sizes == (64, 64) else pytest.mark.slow)
        for t in KV_TYPES
        for sizes in SIZES
        if t not in QUANTIZED or not any(d % 32 for d in sizes)
    ],
)
def test_every_type_and_head_size(kv_type: str, d_k: int, d_v: int) -> None:
    """Few queries, whose tokens are split among blocks, and many."""
    heads = Heads(d_k, d_v, 4, 2, kv_type, kv_type)
    call = make(Case(heads, sequences=((1, 70), (19, 41), (2, 520)), v_of_k=d_k == 576))
    assert nmse(on_gpu(call), call.exact()) <= LIMIT


@pytest.mark.parametrize(
    ("type_k", "type_v"),
    [("f16", "q8_0"), ("q8_0", "q4_0"), ("f32", "bf16"), ("q5_1", "iq4_nl"), ("bf16", "f32")],
)
def test_types_of_k_and_v_apart(type_k: str, type_v: str) -> None:
    """Each has products of its own."""
    call = make(Case(Heads(128, 64, 8, 2, type_k, type_v), sequences=RAGGED))
    assert nmse(on_gpu(call), call.exact()) <= LIMIT


@pytest.mark.parametrize(
    ("n_head", "n_head_kv"), [(1, 1), (3, 3), (12, 4), (16, 2), (14, 2), (128, 1), (40, 1)]
)
def test_groups_of_heads(n_head: int, n_head_kv: int) -> None:
    """1 to 128 query heads for a KV head."""
    heads = Heads(64, 64, n_head, n_head_kv, "q8_0", "f16")
    call = make(Case(heads, sequences=((1, 77), (3, 40), (11, 30))))
    assert nmse(on_gpu(call), call.exact()) <= LIMIT


@pytest.mark.parametrize(
    ("kv_type", "n_head", "params"),
    [
        ("f16", 128, Params()),
        ("f16", 70, Params(fast=True, max_bias=4.0)),
        ("bf16", 64, Params(window=60, window_type="sliding")),
        ("bf16", 128, Params(fast=True)),
        ("q8_0", 96, Params(softcap=20.0, block_size=24)),
    ],
    ids=str,
)
def test_latent_attention_of_many_heads(kv_type: str, n_head: int, params: Params) -> None:
    """Tiles of 64 rows, of which a last one has fewer; sequences of one query are split."""
    heads = Heads(576, 512, n_head, 1, kv_type, kv_type)
    sequences = ((1, 70), (0, 9), (2, 530), (17, 41), (1, 5))
    call = make(Case(heads, params, sequences, sinks=n_head == 70, v_of_k=True, loose_rows=1))
    out = on_gpu(call)
    assert nmse(out, call.exact()) <= (FAST_LIMITS.get(kv_type, LIMIT) if params.fast else LIMIT)
    assert same_bits(on_gpu(poisoned(call, 0xFF), blocks=1), out)
    q0 = int(call.table[2, 0])
    assert same_bits(on_gpu(call.alone(2)), out[q0 : q0 + 2])


@pytest.mark.parametrize(
    "params",
    [
        Params(scale=0.3),
        Params(max_bias=8.0),
        Params(softcap=30.0),
        Params(window=70, window_type="sliding"),
        Params(window=1, window_type="sliding"),
        Params(window=40, window_type="chunked"),
        Params(window=600, window_type="chunked", max_bias=4.0, softcap=20.0),
        Params(block_size=128, window=200, window_type="sliding"),
        Params(block_size=256),
    ],
    ids=str,
)
@pytest.mark.parametrize("sinks", [False, True])
def test_parameters(params: Params, sinks: bool) -> None:
    """Over ragged batches."""
    call = make(Case(Heads(64, 64, 6, 2, "f16", "q8_0"), params, RAGGED, sinks))
    assert nmse(on_gpu(call), call.exact()) <= LIMIT


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_1"])
def test_foreign_slots_change_nothing(kv_type: str) -> None:
    """NaN in slots that no table names, and behind the last token of a block."""
    call = make(Case(Heads(96, 64, 8, 2, kv_type, kv_type), sequences=RAGGED, loose_rows=1))
    out = on_gpu(call)
    assert np.isfinite(out).all()
    assert same_bits(on_gpu(poisoned(call, 0xFF)), out)


@pytest.mark.parametrize("kv_type", ["f16", "q5_0"])
def test_bits_are_the_same_alone_and_for_any_number_of_blocks(kv_type: str) -> None:
    """What a sequence gets depends on the sequence alone."""
    call = make(Case(Heads(64, 64, 8, 2, kv_type, kv_type), sequences=RAGGED))
    together = on_gpu(call, blocks=1)
    assert same_bits(on_gpu(call, blocks=7), together)
    for index, (n_q, _) in enumerate(call.case.sequences):
        q0 = int(call.table[index, 0])
        assert same_bits(on_gpu(call.alone(index), blocks=3), together[q0 : q0 + n_q])


@pytest.mark.parametrize("workspace_bytes", [1, 40_000, 200_000])
def test_parts_of_a_call_have_the_bits_of_the_whole(workspace_bytes: int) -> None:
    """Partial results that do not fit into the workspace are computed in turns; rows of no sequence are 0."""
    call = make(Case(Heads(64, 64, 8, 2, "f16", "q8_0"), sequences=RAGGED, loose_rows=2))
    assert same_bits(on_gpu(call, workspace_bytes=workspace_bytes), on_gpu(call))


@pytest.mark.parametrize("n_q", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [64, 255, 257, 2049, 3000])
def test_a_block_goes_on_over_the_borders_of_splits(n_q: int, length: int) -> None:
    """One thread block computes all splits, or each of many computes one."""
    call = make(Case(Heads(32, 32, 6, 2, "q4_0", "f16"), sequences=((1, 300), (n_q, length), (1, 65))))
    out = on_gpu(call, blocks=1)
    assert nmse(out, call.exact()) <= LIMIT
    assert same_bits(on_gpu(call, blocks=50), out)


@pytest.mark.parametrize("group", [1, 4, 16, 17])
def test_a_call_of_single_queries_has_the_bits_of_any_call(group: int) -> None:
    """Saying that no sequence has more than one query spares a launch and changes nothing."""
    call = make(
        Case(Heads(64, 64, 2 * group, 2, "q8_0", "q4_0"), sequences=((1, 600), (1, 1), (0, 9), (1, 40)))
    )
    single = replace(call, case=replace(call.case, params=Params(single=True)))
    assert same_bits(on_gpu(single), on_gpu(call))


@pytest.mark.parametrize("d", [32, 96, 256])
@pytest.mark.parametrize(
    "types", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q4_0", "f16"), ("f16", "q8_0")], ids=str
)
def test_codes_in_any_place(types: tuple[str, str], d: int) -> None:
    """An odd number of KV heads, so that rows begin anywhere, and blocks that are no multiple of sixteen."""
    for block_size in (8, 24, 48):
        heads = Heads(d, d, 9, 3, *types)
        call = make(Case(heads, Params(block_size=block_size), sequences=((1, 333), (3, 70), (1, 2))))
        assert nmse(on_gpu(call), call.exact()) <= LIMIT


@pytest.mark.parametrize("kilobytes", [64, 96, 99, 163])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_bits_do_not_depend_on_tiles_of_fewer_rows(kv_type: str, kilobytes: int) -> None:
    """Many thread blocks have tiles of 64 rows, a few have 128, if these fit."""
    call = make(Case(Heads(128, 128, 8, 2, kv_type, kv_type), sequences=((40, 155), (30, 64))))
    room = kilobytes << 10
    few = on_gpu(call, blocks=1, shared_bytes=room)
    assert nmse(few, call.exact()) <= LIMIT
    assert same_bits(on_gpu(call, blocks=50, shared_bytes=room), few)


MIXED = ((1, 70), (19, 130), (2, 520), (0, 64), (3, 300))
ORDER_CASES = {
    "halves as they lie": Case(Heads(64, 64, 8, 2, "f16", "f16"), sequences=MIXED),
    "codes": Case(Heads(96, 64, 8, 2, "q8_0", "q4_1"), sequences=MIXED, sinks=True),
    "floats in two parts": Case(Heads(40, 40, 2, 1, "f32", "f32"), sequences=MIXED),
    "weights in two parts": Case(Heads(80, 80, 6, 2, "bf16", "bf16"), Params(softcap=20.0), sequences=MIXED),
    "latent": Case(Heads(576, 512, 16, 1), sequences=((1, 300), (5, 70)), v_of_k=True),
    "latent of many heads": Case(Heads(576, 512, 70, 1), sequences=((1, 300), (2, 70)), v_of_k=True),
    "fast latent": Case(
        Heads(576, 512, 128, 1), Params(fast=True), sequences=((1, 270), (2, 70)), v_of_k=True
    ),
    "fast": Case(Heads(64, 64, 8, 2, "q5_0", "f16"), Params(fast=True), sequences=MIXED),
    "window": Case(Heads(64, 64, 4, 4), Params(window=90, window_type="sliding"), sequences=MIXED),
    "rows of no sequence": Case(Heads(40, 40, 2, 1), sequences=MIXED, loose_rows=2),
    "one prefix": Case(
        Heads(64, 64, 8, 2), sequences=tuple((1, n) for n in range(523, 543)), shared_blocks=16
    ),
    "items without tokens": Case(Heads(32, 32, 17, 1), sequences=((16, 769), (2, 40), (16, 1025))),
    "a window that begins between queries": Case(
        Heads(32, 32, 17, 1, "q4_0", "q4_0"),
        Params(window=888, window_type="chunked"),
        sequences=((16, 900), (3, 70)),
    ),
    "a long table": Case(Heads(16, 16, 1, 1), sequences=[(1 + n % 2, 3 + n % 40) for n in range(270)]),
}
"""Each barrier of the kernels is needed in one of them; a table of many rows is looked through in turns."""


@pytest.mark.parametrize("name", ORDER_CASES)
def test_threads_may_take_turns_in_any_order(name: str) -> None:
    """A warp gets as far ahead as barriers let it, and copies arrive early or late: no bit changes."""
    call = make(ORDER_CASES[name])
    call = replace(call, table=lab.find_shared(call.table, call.case.params.block_size))
    expected = on_gpu(call, blocks=3)
    assert nmse(expected, call.exact()) <= LIMIT
    for order in (-1, 1, 2, 3):
        assert same_bits(on_gpu(call, blocks=3, order=order), expected)
    assert same_bits(on_gpu(call, blocks=100), expected)


@pytest.mark.parametrize("order", [-1, 1])
def test_threads_without_tensor_cores_may_take_turns_in_any_order(order: int) -> None:
    """Lanes exchange what matrices hold, one number after the other."""
    call = make(Case(Heads(32, 32, 2, 1), sequences=((1, 70), (3, 40))))
    expected = on_gpu(call, shared_bytes=96 << 10, tensor_cores=False)
    assert same_bits(on_gpu(call, shared_bytes=96 << 10, tensor_cores=False, order=order), expected)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("d", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (128, 256))])
def test_fast_rounds_once_where_rows_are_many(kv_type: str, d: int) -> None:
    """And nowhere else: a sequence of few rows keeps its bits, and floats of 256, whose tiles are small."""
    call = make(
        Case(Heads(d, d, 4, 1, kv_type, kv_type), sequences=((20, 150), (1, 300), (17, 90), (4, 280)))
    )
    exactly = on_gpu(call)
    out = on_gpu(replace(call, case=replace(call.case, params=Params(fast=True))))
    many = np.repeat([True, False, True, False], [20, 1, 17, 4])
    assert same_bits(out[~many], exactly[~many])
    if (kv_type, d) == ("f32", 256):
        assert same_bits(out, exactly)
        return
    assert not (out[many] == exactly[many]).all(axis=(1, 2)).any()
    expected = call.exact()[many]
    assert nmse(exactly[many], expected) < nmse(out[many], expected) <= FAST_LIMITS.get(kv_type, LIMIT)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_1"])
@pytest.mark.parametrize("d", [40, 64, pytest.param(128, marks=pytest.mark.slow)])
def test_without_tensor_cores(kv_type: str, d: int) -> None:
    """Ordinary instructions stand for products and for loads of their numbers: the sums differ, no more."""
    if kv_type in QUANTIZED and d % 32:
        d = 96
    call = make(Case(Heads(d, d, 4, 1, kv_type, kv_type), sequences=((1, 70), (5, 41)), loose_rows=1))
    out = on_gpu(call, shared_bytes=96 << 10, tensor_cores=False)
    assert nmse(out, call.exact()) <= LIMIT
    assert not same_bits(out, on_gpu(call, shared_bytes=96 << 10))
    poison = on_gpu(poisoned(call, 0xFF), shared_bytes=96 << 10, tensor_cores=False)
    assert same_bits(poison, out)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_strides(kv_type: str) -> None:
    """K and V with bytes of others between heads and slots, so that rows begin anywhere within 16 bytes."""
    call = make(Case(Heads(64, 96, 8, 4, kv_type, kv_type), sequences=RAGGED))

    def spread(x: lab.Bytes) -> lab.Bytes:
        wide = np.full((x.shape[0], x.shape[1] + 1, x.shape[2] + 2), 0xFF, np.uint8)
        wide[:, :-1, : x.shape[2]] = x
        return wide[:, :-1, : x.shape[2]]

    assert call.v is not None
    apart = replace(call, k=spread(call.k), v=spread(call.v))
    assert same_bits(on_gpu(apart), on_gpu(call))


@pytest.mark.parametrize("kilobytes", [48, 64, 100, 164])
def test_less_shared_memory_has_smaller_tiles(kilobytes: int) -> None:
    """Shared memory of other cards. Heads that do not fit are refused."""
    call = make(Case(Heads(128, 128, 8, 2, "q8_0", "q8_0"), sequences=((1, 300), (40, 90))))
    assert nmse(on_gpu(call, shared_bytes=kilobytes << 10), call.exact()) <= LIMIT
    with pytest.raises(ValueError, match="does not fit into a block's shared memory"):
        on_gpu(call, shared_bytes=4096)


@pytest.mark.parametrize(
    ("d_k", "d_v", "why"), [(40, 20, "multiples of 8"), (64, 576, "head size of V must be at most 512")]
)
def test_heads_that_no_kernel_takes(d_k: int, d_v: int, why: str) -> None:
    """They stay on the CPU."""
    call = make(Case(Heads(d_k, d_v, 4, 2), sequences=((1, 10),)))
    with pytest.raises(ValueError, match=why):
        on_gpu(call)
