"""The operator against stock FLASH_ATTN_EXT on the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from . import lab
from .cases import Call, Case, make
from .lab import HEADER, KV_TYPES, Floats, Heads, Params
from .reference import nmse


def stock(call: Call) -> Floats:
    """FLASH_ATTN_EXT over each sequence's bytes in contiguous memory: [n_tokens, n_head, d_v]."""
    case, size = call.case, call.case.params.block_size
    out = np.zeros((call.q.shape[0], case.heads.n_head, case.heads.d_v), np.float32)
    for q0, n_q, length in call.table[:, :3]:
        if n_q == 0:
            continue
        row = call.table[call.table[:, 0] == q0][0]
        positions = np.arange(length)
        slots = row[HEADER:][positions // size] * size + positions % size
        distance = (length - n_q + np.arange(n_q))[:, None] - positions[None, :]
        mask = np.where(distance < 0, -np.inf, -distance if case.params.max_bias else 0.0).astype(np.float16)
        k = np.ascontiguousarray(call.k[slots])[None]
        v = None if call.v is None else np.ascontiguousarray(call.v[slots])[None]
        q = np.ascontiguousarray(call.q[q0 : q0 + n_q])[None]
        rows, _ = lab.flash_attention(case.heads, case.params, q, k, v, mask[None], call.sinks)
        out[q0 : q0 + n_q] = rows[0]
    return out


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize(
    "params", [Params(), Params(softcap=20.0), Params(max_bias=8.0)], ids=["plain", "softcap", "alibi"]
)
def test_never_less_exact_than_stock(kv_type: str, params: Params) -> None:
    """Same bytes: both near the oracle, ours no farther.

    Over quantized keys both round queries to 8 bits, so that is up to noise.
    """
    heads = Heads(64, 64, 8, 2, kv_type, kv_type)
    call = make(Case(heads, params, ((1, 133), (40, 40), (5, 700)), sinks=params.softcap > 0))
    exact = call.exact()
    theirs = nmse(stock(call), exact)
    assert theirs < 1e-3  # the same thing was computed
    noise = 1.0 if kv_type in ("f32", "f16", "bf16") else 1.01
    assert nmse(call.run(), exact) <= max(noise * theirs, 1e-12)
