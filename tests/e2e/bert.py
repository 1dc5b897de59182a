"""The forward pass of a small BERT in NumPy, float64, from the tensors of its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EPSILON = 1e-6


def load(path: Path) -> dict[str, Array]:
    """Return all tensors, in NumPy's order of dimensions."""
    import gguf

    reader = gguf.GGUFReader(path)
    return {tensor.name: np.array(tensor.data, np.float64) for tensor in reader.tensors}


def _norm(x: Array, weights: Mapping[str, Array], name: str) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _linear(x: Array, weights: Mapping[str, Array], name: str) -> Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _gelu(x: Array) -> Array:
    """Return ggml's GELU: by tanh, from f16 to f16."""
    x = x.astype(np.float16).astype(np.float64)
    y = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x**2)))
    return y.astype(np.float16).astype(np.float64)


def token_vectors(weights: Mapping[str, Array], tokens: Sequence[int], n_layers: int, n_heads: int) -> Array:
    """Return BERT's output for every token, [n, embd]; each token attends to all."""
    x = weights["token_embd.weight"][list(tokens)] + weights["token_types.weight"][0]
    x = _norm(x + weights["position_embd.weight"][: len(tokens)], weights, "token_embd_norm")
    for layer in range(n_layers):
        own = {
            name.removeprefix(f"blk.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"blk.{layer}.")
        }
        q, k, v = (
            np.stack(np.split(_linear(x, own, f"attn_{part}"), n_heads, axis=1)) for part in ("q", "k", "v")
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        seen = np.concatenate(list(shares @ v), axis=1)
        x = _norm(x + _linear(seen, own, "attn_output"), own, "attn_output_norm")
        x = _norm(x + _linear(_gelu(_linear(x, own, "ffn_up")), own, "ffn_down"), own, "layer_output_norm")
    return x
