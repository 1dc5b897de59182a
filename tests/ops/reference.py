"""Paged attention by its definition, in float64: the oracle of the operator's tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .lab import HEADER, Heads, Params, Table

Doubles = npt.NDArray[np.float64]


def alibi_slopes(n_head: int, max_bias: float) -> Doubles:
    """The slope of each head [n_head], as ggml's soft_max defines them; zeros without a bias."""
    if max_bias == 0.0:
        return np.zeros(n_head)
    power = 1 << (n_head.bit_length() - 1)
    low, high = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
    return np.array([low ** (h + 1) if h < power else high ** (2 * (h - power) + 1) for h in range(n_head)])


def first_visible(params: Params, position: int) -> int:
    """The first position that a query at `position` attends."""
    if params.window_type == "sliding":
        return max(0, position - params.window + 1)
    if params.window_type == "chunked":
        return position // params.window * params.window
    return 0


def paged_attention(
    heads: Heads,
    params: Params,
    q: npt.NDArray[np.float32],
    k: npt.NDArray[np.float32],
    v: npt.NDArray[np.float32],
    table: Table,
    sinks: npt.NDArray[np.float32] | None = None,
) -> Doubles:
    """out [n_tokens, n_head, d_v] from q [n_tokens, n_head, d_k], k [n_slots, n_head_kv, d_k] and v likewise.

    k and v are the dequantized pools; what no table names may hold anything.
    """
    out = np.zeros((q.shape[0], heads.n_head, heads.d_v))
    for row in table:
        q0, n_q, length = (int(x) for x in row[:3])
        if n_q == 0:
            continue
        first = int(row[4])
        positions = np.arange(first * params.block_size, length)
        blocks = row[HEADER:][positions // params.block_size - first].astype(np.int64)
        slots = blocks * params.block_size + positions % params.block_size
        keys, values = k[slots].astype(np.float64), v[slots].astype(np.float64)
        for j in range(n_q):
            position = length - n_q + j
            seen = slice(first_visible(params, position) - positions[0], position + 1 - positions[0])
            distance = position - positions[seen]
            out[q0 + j] = _attend(heads, params, q[q0 + j], keys[seen], values[seen], distance, sinks)
    return out


def _attend(
    heads: Heads,
    params: Params,
    q: npt.NDArray[np.float32],
    k: Doubles,
    v: Doubles,
    distance: npt.NDArray[np.int64],
    sinks: npt.NDArray[np.float32] | None,
) -> Doubles:
    """One query row [n_head, d_k] over the tokens it sees: k [n, n_head_kv, d_k], v [n, n_head_kv, d_v]."""
    group = heads.n_head // heads.n_head_kv
    scale = np.float64(np.float32(params.scale if params.scale is not None else heads.d_k**-0.5))
    grouped = q.astype(np.float64).reshape(heads.n_head_kv, group, heads.d_k)
    scores = np.matmul(grouped, k.transpose(1, 2, 0)).reshape(heads.n_head, -1) * scale
    if params.softcap:
        scores = params.softcap * np.tanh(scores / params.softcap)
    scores = scores - alibi_slopes(heads.n_head, params.max_bias)[:, None] * distance
    top = scores.max(axis=1)
    if sinks is not None:
        top = np.maximum(top, sinks.astype(np.float64))
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64) - top)
    weights = (weights / total[:, None]).reshape(heads.n_head_kv, group, -1)
    out: Doubles = np.matmul(weights, v.transpose(1, 0, 2))
    return out.reshape(heads.n_head, heads.d_v)


def nmse(ours: npt.NDArray[np.floating], exact: npt.NDArray[np.floating]) -> float:
    """Squared error over squared magnitude; infinite where anything is not finite."""
    error = ours.astype(np.float64) - exact.astype(np.float64)
    if not np.isfinite(error).all():
        return float("inf")
    return float(np.sum(error**2) / max(float(np.sum(exact.astype(np.float64) ** 2)), 1e-300))
