"""Upper bounds, in bytes, for the memory of GGML's CUDA backend beside the tensors of a graph.

Its operations allocate from a pool that grows to the largest request, and never shrinks. It is not allocated
in advance, so a KV cache that fills the GPU must leave room for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyvelo.models.gguf_scan import GgufTensor
from pyvelo.native import Layer

__all__ = ["LIBRARY_BYTES", "Step", "attention_bytes", "product_bytes", "workspace_bytes"]

LIBRARY_BYTES = 256 << 20
"""For cuBLAS (its code and 32 MiB of workspace), streams and captured graphs."""
ROUNDING_BYTES = 32 << 20
"""For tiles of products that several thread blocks add up, lists of experts, and rounding in the pool."""

# the KV splits of native/ops/kv-splits.h, and the workspace of native/ops/cuda/paged-launch.h
FEW_QUERIES = 16
SPLIT_TOKENS = 256
SPLIT_ALIGN = 64
SHORT_TOKENS = 2048
MAX_SPLITS = 32
PARTIAL_BYTES = 256 << 20

ROW_PADDING = 512  # numbers; upstream's, of activations that it quantizes to 9 bits each
FLOATS = ("F32", "F16", "BF16")
CONVERTED = ("IQ1_M", "TQ1_0", "TQ2_0")  # types without products of many rows upstream


@dataclass(frozen=True)
class Step:
    """Largest step: tokens, sequences, rows of logits, tokens of the longest sequence, and experts of a token
    (1 without experts).
    """

    n_tokens: int
    n_rows: int
    n_outputs: int
    longest: int
    n_experts: int = 1


def attention_bytes(layers: Iterable[Layer], step: Step) -> int:
    """Return the bytes of partial results of attention: for each query, head and KV split, a weighted sum of
    V and four more numbers; at most PARTIAL_BYTES, or what one sequence needs.
    """
    splits = _most_splits(step.longest + SPLIT_ALIGN)  # the first split may begin before the window
    widest = max((x.n_head * ((x.head_dim_v or x.head_dim_k) + 4) for x in layers), default=0)
    of_query = 4 * splits * widest
    one = min(step.n_tokens, FEW_QUERIES) * of_query
    return max(one, min(PARTIAL_BYTES, min(step.n_tokens, step.n_rows * FEW_QUERIES) * of_query))


def _most_splits(tokens: int) -> int:
    """Return the most KV splits of a sequence of up to so many tokens."""
    if tokens <= SHORT_TOKENS:
        return max(1, -(-tokens // SPLIT_TOKENS))
    splits = -(-tokens // (2 * SPLIT_TOKENS))
    return min(MAX_SPLITS, max(splits, SHORT_TOKENS // SPLIT_TOKENS))


def product_bytes(tensors: Sequence[GgufTensor], step: Step) -> int:
    """Return the bytes of the activations of a product: quantized, or 16 bits and then the result too.

    Weights of types without a product are converted as a whole. So are bf16 weights on cards without bf16
    products (before compute capability 8.0), which is not counted.
    """
    has_output = any(tensor.name == "output.weight" for tensor in tensors)
    most = 0
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        is_output = tensor.name == ("output.weight" if has_output else "token_embd.weight")
        rows = step.n_outputs if is_output else step.n_tokens
        most = max(most, _of_product(tensor, rows, step.n_experts if len(tensor.shape) > 2 else 1))
    return most


def _of_product(tensor: GgufTensor, rows: int, n_experts: int) -> int:
    n_in, n_out = tensor.shape[:2]
    rows *= n_experts
    kind = tensor.type_name.upper()
    if kind not in FLOATS and kind not in CONVERTED:
        return rows * -(-n_in // ROW_PADDING) * ROW_PADDING * 9 // 8
    whole = 2 * n_in * n_out if kind in CONVERTED else 0
    by_expert = 4 * rows * (n_in + n_out) if n_experts > 1 else 0
    in_16_bits = 0 if kind == "F32" else 2 * rows * (n_in + n_out)
    return whole + by_expert + in_16_bits


def workspace_bytes(layers: Iterable[Layer], tensors: Sequence[GgufTensor], step: Step) -> int:
    """Return the bytes of libraries, and of the pool for the largest operation."""
    return LIBRARY_BYTES + ROUNDING_BYTES + max(attention_bytes(layers, step), product_bytes(tensors, step))
