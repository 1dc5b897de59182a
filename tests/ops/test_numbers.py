"""The operator against the oracle: every type, size, parameter and shape, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import lab
from .cases import RAGGED, Call, Case, make, poisoned, same_bits
from .lab import HEADER, KV_TYPES, QUANTIZED, Heads, Params, Run
from .reference import Doubles, nmse

SIZES = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (576, 512)]
LIMIT = 1e-7
"""NMSE against float64 where queries stay floats."""


def whole(kv_type: str, d: int) -> bool:
    """Whether a head is a whole number of the type's groups."""
    return kv_type not in QUANTIZED or d % 32 == 0


def limit(call: Call, exact: Doubles | None = None) -> float:
    """NMSE against float64: over quantized keys what quantizing the queries as stock does would cost."""
    if call.case.heads.type_k not in QUANTIZED:
        return LIMIT
    rounded = lab.dequantize("q8_0", lab.quantize("q8_0", call.q), call.q.shape[-1])
    exact = call.exact() if exact is None else exact
    return LIMIT + 1.5 * nmse(replace(call, q=rounded).exact(), exact)


def assert_right(call: Call) -> None:
    """Kernel, deterministic kernel and scalar reference against the oracle."""
    exact = call.exact()
    most = limit(call, exact)
    assert nmse(call.run(), exact) <= most
    assert nmse(call.run(Run(threads=1), deterministic=True), exact) <= most
    assert nmse(call.run(Run(threads=1, use_ref=True)), exact) <= LIMIT


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(("d_k", "d_v"), SIZES)
def test_every_type_and_head_size(kv_type: str, d_k: int, d_v: int) -> None:
    """All of them where the groups divide the head, a clear refusal elsewhere."""
    heads = Heads(d_k, d_v, 8, 2, kv_type, kv_type)
    if whole(kv_type, d_k) and whole(kv_type, d_v):
        assert_right(make(Case(heads, sequences=((1, 70), (9, 41), (2, 520)), v_of_k=d_k == 576)))
    else:
        with pytest.raises(ValueError, match="groups"):
            lab.row_size(kv_type, d_k)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_fast_is_bfloat16_at_worst(kv_type: str, deterministic: bool) -> None:
    """The flag allows 8 bits in the products of many rows, and the same bits in any batch."""
    params = Params(fast=True, deterministic=deterministic)
    call = make(Case(Heads(96, 64, 8, 2, kv_type, kv_type), params, ((70, 90), (1, 33), (33, 600))))
    together, exact = call.run(), call.exact()
    assert nmse(together, exact) <= 2e-5 + limit(call, exact)
    for index, (n_q, _) in enumerate(call.case.sequences):
        q0 = int(call.table[index, 0])
        assert same_bits(call.alone(index).run(Run(threads=3)), together[q0 : q0 + n_q])


@pytest.mark.parametrize(
    ("type_k", "type_v"), [("f16", "q8_0"), ("q8_0", "q4_0"), ("f32", "bf16"), ("q5_1", "iq4_nl")]
)
def test_types_of_k_and_v_apart(type_k: str, type_v: str) -> None:
    """K and V need not have one type."""
    assert_right(make(Case(Heads(128, 64, 8, 2, type_k, type_v), sequences=RAGGED)))


@pytest.mark.parametrize(
    ("n_head", "n_head_kv"), [(1, 1), (3, 3), (12, 4), (16, 2), (14, 2), (128, 1), (40, 1)]
)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_groups_of_heads(n_head: int, n_head_kv: int, kv_type: str) -> None:
    """1 to 128 query heads for a KV head."""
    assert_right(
        make(Case(Heads(64, 64, n_head, n_head_kv, kv_type, kv_type), sequences=((1, 77), (3, 40), (11, 30))))
    )


PARAMS = [
    Params(scale=0.3),
    Params(max_bias=8.0),
    Params(softcap=30.0),
    Params(window=70, window_type="sliding"),
    Params(window=1, window_type="sliding"),
    Params(window=40, window_type="chunked"),
    Params(window=600, window_type="chunked", max_bias=4.0, softcap=20.0),
    Params(block_size=64),
    Params(block_size=128, window=200, window_type="sliding"),
    Params(block_size=256),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_parameters(params: Params, sinks: bool) -> None:
    """Scale, soft-cap, ALiBi, sinks, windows and block sizes, over ragged batches."""
    assert_right(make(Case(Heads(64, 64, 12, 4, "f16", "q8_0"), params, RAGGED, sinks)))


def test_head_sizes_that_are_no_whole_vector() -> None:
    """Odd sizes are served too."""
    assert_right(make(Case(Heads(40, 20, 4, 2), sequences=RAGGED)))


def strided(call: Call) -> Call:
    """The same numbers in wider memory: queries head-major, K and V with poison between heads and slots."""
    q = np.ascontiguousarray(call.q.transpose(1, 0, 2)).transpose(1, 0, 2)

    def spread(x: lab.Bytes) -> lab.Bytes:
        wide = np.full((x.shape[0], x.shape[1] + 1, x.shape[2] + 32), 0xFF, np.uint8)
        wide[:, :-1, : x.shape[2]] = x
        return wide[:, :-1, : x.shape[2]]

    assert call.v is not None
    return replace(call, q=q, k=spread(call.k), v=spread(call.v))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_1"])
def test_strides(kv_type: str) -> None:
    """A permuted q, and k and v with strides of their own, change no bit."""
    call = make(Case(Heads(64, 96, 8, 4, kv_type, kv_type), sequences=RAGGED))
    assert same_bits(strided(call).run(), call.run())
    assert same_bits(strided(call).run(Run(use_ref=True)), call.run(Run(use_ref=True)))


def test_rows_of_no_sequence_are_zero() -> None:
    """Even where the buffer held NaN."""
    call = make(Case(Heads(64, 64, 4, 2), sequences=RAGGED, loose_rows=2))
    for run in (Run(), Run(use_ref=True), Run(threads=3)):
        out = np.full((call.q.shape[0], 4, 64), np.nan, np.float32)
        lab.paged_attention(
            call.case.heads, call.case.params, call.q, call.k, call.v, call.table, run=run, out=out
        )
        free = np.ones(len(out), np.bool_)
        for q0, n_q in call.table[:, :2]:
            free[q0 : q0 + n_q] = False
        assert free.sum() == 2 * len(RAGGED)
        assert not out[free].any()
        assert np.isfinite(out).all()


def test_a_batch_of_empty_sequences_is_zero() -> None:
    """No query row at all is no error."""
    call = make(Case(Heads(64, 64, 4, 2), sequences=((0, 5), (0, 0))))
    assert not call.run().any()


def test_a_wrong_block_shows() -> None:
    """The checks above can fail: two blocks swapped, one token more or fewer, are far outside the limit."""
    call = make(Case(Heads(64, 64, 4, 2), sequences=((1, 100),)))
    exact = call.exact()
    swapped = call.table.copy()
    swapped[0, HEADER : HEADER + 2] = swapped[0, [HEADER + 3, HEADER + 0]]
    shorter = call.table.copy()
    shorter[0, 2] -= 1
    for table in (swapped, shorter):
        assert nmse(replace(call, table=table).run(), exact) > 1e-4


def fitting(kv_type: str) -> list[int]:
    """Small head sizes that the type takes."""
    return [d for d in (32, 48, 64, 80, 96, 128) if whole(kv_type, d)]


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Any shape and parameters, blocks shared between sequences, lengths ending anywhere."""
    type_k, type_v = draw(st.sampled_from(list(KV_TYPES))), draw(st.sampled_from(list(KV_TYPES)))
    n_head_kv = draw(st.integers(1, 3))
    heads = Heads(
        draw(st.sampled_from(fitting(type_k))),
        draw(st.sampled_from(fitting(type_v))),
        n_head_kv * draw(st.sampled_from([1, 2, 3, 5, 9])),
        n_head_kv,
        type_k,
        type_v,
    )
    window_type = draw(st.sampled_from(["none", "none", "sliding", "chunked"]))
    params = Params(
        max_bias=draw(st.sampled_from([0.0, 0.0, 8.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 15.0])),
        block_size=draw(st.sampled_from([32, 32, 64, 96, 5])),
        window=draw(st.integers(1, 300)),
        window_type=window_type,
    )
    sequences: Sequence[tuple[int, int]] = draw(
        st.lists(
            st.integers(0, 620).flatmap(lambda n: st.tuples(st.integers(0, min(n, 40)), st.just(n))),
            min_size=1,
            max_size=4,
        )
    )
    return Case(
        heads,
        params,
        tuple(sequences),
        sinks=draw(st.booleans()),
        shared_blocks=draw(st.integers(0, 3)),
        loose_rows=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 1 << 16)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=random_cases(), threads=st.sampled_from([1, 2, 3, 7]))
def test_random_shapes(case: Case, threads: int) -> None:
    """Right, the same bits on any number of threads, and deaf to garbage."""
    call = make(case)
    exact = call.exact()
    most = limit(call, exact)
    out = call.run(Run(threads=threads))
    assert nmse(out, exact) <= most
    assert same_bits(poisoned(call, 0xFF).run(Run(threads=2)), out)
    assert nmse(call.run(Run(threads=threads), deterministic=True), exact) <= most


@pytest.mark.parametrize(
    ("heads", "params", "says"),
    [
        (Heads(64, 64, 5, 2), Params(), "multiple of the number of KV heads"),
        (Heads(64, 64, 4, 2), Params(block_size=0), "block size"),
        (Heads(64, 64, 4, 2), Params(scale=float("nan")), "scale"),
        (Heads(64, 64, 4, 2), Params(softcap=-1.0), "soft-cap"),
        (Heads(64, 64, 4, 2), Params(max_bias=float("inf")), "ALiBi"),
        (Heads(64, 64, 4, 2), Params(window_type="sliding"), "window"),
    ],
)
def test_refusals_say_what_is_wrong(heads: Heads, params: Params, says: str) -> None:
    """A sentence, never an abort."""
    q = np.zeros((1, heads.n_head, 64), np.float32)
    k = np.zeros((32, 2, 128), np.uint8)
    table = np.array([[0, 1, 1, 0, 0]], np.int32)
    with pytest.raises(ValueError, match=says):
        lab.paged_attention(heads, params, q, k, k, table)


def test_types_outside_the_list_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that ggml knows but no cache has."""
    monkeypatch.setitem(lab.KV_TYPES, "i32", 26)
    heads = Heads(64, 64, 2, 2, "i32", "f16")
    q, k = np.zeros((1, 2, 64), np.float32), np.zeros((32, 2, 256), np.uint8)
    table = np.array([[0, 1, 1, 0, 0]], np.int32)
    with pytest.raises(ValueError, match="K and V must be f32"):
        lab.paged_attention(heads, Params(), q, k, k, table)


def test_heads_that_cut_a_group_are_refused() -> None:
    """A head of 16 elements is half a group: the operator's own sentence, on a view of wider rows."""
    heads = Heads(64, 16, 2, 2, "q8_0")
    q, k = np.zeros((1, 2, 64), np.float32), lab.quantize("q8_0", np.zeros((32, 2, 64), np.float32))
    table = np.array([[0, 1, 1, 0, 0]], np.int32)
    with pytest.raises(ValueError, match="groups of 32: use f32, f16 or bf16 for V"):
        lab.paged_attention(heads, Params(), q, k, None, table)


def test_type_numbers_are_the_librarys() -> None:
    """The table of type numbers is checked against the library that reads them."""
    assert [lab.type_name(number) for number in KV_TYPES.values()] == list(KV_TYPES)
