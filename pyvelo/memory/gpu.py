"""What GGML's CUDA backend takes of a GPU while it computes, beside the tensors of a graph: bounds, in bytes.

Its operations work in a pool that grows to the most that one of them asks for, and stays so large. Nobody
allocates it beforehand, so who fills a GPU must leave room for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyvelo.models.gguf_scan import GgufTensor
from pyvelo.native import Layer

__all__ = ["LIBRARY_BYTES", "Step", "attention_bytes", "product_bytes", "workspace_bytes"]

LIBRARY_BYTES = 256 << 20
"""For cuBLAS (its code and 32 MiB to work in), streams, captured graphs."""
ROUNDING_BYTES = 32 << 20
"""Tiles of products that several blocks add up, lists of experts, and what the pool rounds up."""

# as native/ops/cuda/paged-split.h cuts a sequence's tokens
FEW_QUERIES = 16
SPLIT_TOKENS = 256
MOST_SPLITS = 32

ROW_PADDING = 512  # numbers; upstream's, of activations that it quantizes to 9 bits each
FLOATS = ("F32", "F16", "BF16")
CONVERTED = ("IQ1_M", "TQ1_0", "TQ2_0")  # of which upstream has no products with many rows


@dataclass(frozen=True)
class Step:
    """The largest step: its tokens, its sequences, rows of logits, tokens of the longest sequence, and to how
    many experts a token goes (1 where there are none)."""

    n_tokens: int
    n_rows: int
    n_outputs: int
    longest: int
    n_experts: int = 1


def attention_bytes(layers: Iterable[Layer], step: Step) -> int:
    """Partial results of sequences whose tokens are split among blocks of threads: of each query and head,
    and each part, a weighted sum of V and two numbers more."""
    queries = min(step.n_tokens, step.n_rows * FEW_QUERIES)
    parts = min(MOST_SPLITS, -(-max(1, step.longest) // SPLIT_TOKENS))
    widest = max((x.n_head * ((x.head_dim_v or x.head_dim_k) + 2) for x in layers), default=0)
    return 4 * queries * parts * widest


def product_bytes(tensors: Sequence[GgufTensor], step: Step) -> int:
    """Activations as a product takes them: quantized, or of 16 bits, and then the result likewise.

    Weights that no product takes as they are get converted whole. So are those in bf16 on cards that have no
    products of bf16 (before compute capability 8.0): that is not counted.
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
    """All of it: libraries, and the pool of the operation that asks for most."""
    return LIBRARY_BYTES + ROUNDING_BYTES + max(attention_bytes(layers, step), product_bytes(tensors, step))
