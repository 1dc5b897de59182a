"""The oracle itself: equal to dense attention written another way."""

from __future__ import annotations

import numpy as np
import pytest

from . import reference
from .cases import Call, Case, make
from .lab import HEADER, Heads, Params


def dense(call: Call, index: int) -> reference.Doubles:
    """Sequence `index` over K and V in position order, with a mask of all pairs: [n_q, n_head, d_v]."""
    heads, params = call.case.heads, call.case.params
    q0, n_q, length = (int(x) for x in call.table[index, :3])
    first = int(call.table[index, 4])
    blocks = call.table[index, HEADER : HEADER + -(-length // params.block_size) - first]
    k = np.concatenate([call.k_floats[b * params.block_size :][: params.block_size] for b in blocks])
    v = np.concatenate([call.v_floats[b * params.block_size :][: params.block_size] for b in blocks])
    own = np.arange(length - n_q, length)[:, None]
    other = np.arange(first * params.block_size, length)[None, :]
    n = other.size
    sees = other <= own
    if params.window_type == "sliding":
        sees &= own - other < params.window
    if params.window_type == "chunked":
        sees &= own // params.window == other // params.window
    out = np.zeros((n_q, heads.n_head, heads.d_v))
    slopes = reference.alibi_slopes(heads.n_head, params.max_bias)
    for h in range(heads.n_head):
        group = h // (heads.n_head // heads.n_head_kv)
        scores = call.q[q0 : q0 + n_q, h].astype(np.float64) @ k[:n, group].astype(np.float64).T
        scores *= np.float64(np.float32(heads.d_k**-0.5))
        if params.softcap:
            scores = np.tanh(scores / params.softcap) * params.softcap
        scores = np.where(sees, scores + slopes[h] * (other - own), -np.inf)
        if call.sinks is not None:  # a sink is one more token, without a value
            scores = np.concatenate([scores, np.full((n_q, 1), np.float64(call.sinks[h]))], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, h] = weights[:, :n] @ v[:n, group].astype(np.float64)
    return out


@pytest.mark.parametrize(
    ("params", "sinks"),
    [
        (Params(), False),
        (Params(), True),
        (Params(max_bias=8.0, block_size=64), False),
        (Params(softcap=5.0), True),
        (Params(window=23, window_type="sliding"), True),
        (Params(window=40, window_type="chunked", max_bias=4.0), False),
    ],
)
def test_reference_equals_dense_attention(params: Params, sinks: bool) -> None:
    """To 1e-12 of the largest output, over ragged sequences, permuted and shared blocks."""
    case = Case(
        Heads(32, 64, 6, 2, "f32", "f16"),
        params,
        ((1, 1), (40, 40), (3, 97), (0, 5), (1, 130)),
        sinks,
        shared_blocks=1,
    )
    call = make(case)
    ours = call.exact()
    for index, (n_q, _) in enumerate(case.sequences):
        q0 = int(call.table[index, 0])
        exact = dense(call, index)
        assert np.abs(ours[q0 : q0 + n_q] - exact).max(initial=0.0) <= 1e-12 * np.abs(call.v_floats).max()


def test_rows_of_no_sequence_are_zero() -> None:
    """What no sequence covers stays zero."""
    call = make(Case(Heads(32, 32, 2, 2), sequences=((2, 9), (1, 3)), loose_rows=2))
    out = call.exact()
    assert not out[[0, 1, 4, 5]].any()
    assert out[[2, 3, 6]].all()


def test_nmse_of_what_is_not_finite_is_infinite() -> None:
    """A NaN cannot hide in a sum."""
    exact = np.ones(3)
    assert reference.nmse(np.array([1.0, np.nan, 1.0]), exact) == float("inf")
    assert reference.nmse(exact, exact) == 0.0
