"""Bytes of tokens and blocks of the KV cache. Only this module computes them.

A token has, in each layer, a row of K and a row of V. A block has `block_size` tokens of every layer.
Quantized types pack groups of 32 values, so a head must be a whole number of groups, and a block of any type
is a whole number of cache lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pyvelo.errors import ConfigError, UnsupportedError, shown
from pyvelo.kv.types import KV_TYPES, TensorType

__all__ = [
    "BLOCK_SIZES",
    "CPU_LINE",
    "GPU_LINE",
    "POOL_GRAIN",
    "Geometry",
    "LayerRows",
    "LayerShape",
    "make_geometry",
    "parse_kv_type",
]

BLOCK_SIZES = (32, 64, 128, 256)  # tokens
POOL_GRAIN = 256  # tokens: a pool is a whole number of these
CPU_LINE = 64  # bytes
GPU_LINE = 128  # bytes


class LayerShape(Protocol):
    """Shape of a layer's cache for a token; `head_dim_v` is 0 if V is a view of K."""

    @property
    def layer(self) -> int: ...
    @property
    def n_head_kv(self) -> int: ...
    @property
    def head_dim_k(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...


@dataclass(frozen=True)
class LayerRows:
    """Bytes of one token in one layer."""

    layer: int
    k_bytes: int
    v_bytes: int


@dataclass(frozen=True)
class Geometry:
    """Types, block size (tokens) and bytes of a KV cache."""

    type_k: TensorType
    type_v: TensorType
    block_size: int
    rows: tuple[LayerRows, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(row.k_bytes + row.v_bytes for row in self.rows)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * self.token_bytes

    @property
    def grain_blocks(self) -> int:
        """A pool's number of blocks is a multiple of this."""
        return POOL_GRAIN // self.block_size

    def blocks_for(self, n_tokens: int) -> int:
        """Return the blocks for `n_tokens` tokens of one sequence."""
        return -(-n_tokens // self.block_size)


def parse_kv_type(kv_type: str | Sequence[str]) -> tuple[TensorType, TensorType]:
    """Return the types of K and V from a name or a pair of names; else raise ConfigError."""
    if not isinstance(kv_type, Sequence):
        raise ConfigError(f"kv_type={shown(kv_type)} must be a name or a pair (K, V)")
    names = (kv_type, kv_type) if isinstance(kv_type, str) else tuple(kv_type)
    if len(names) != 2:
        raise ConfigError(f"kv_type must be a name or a pair (K, V), got {len(names)} names")
    unknown = [name for name in names if not isinstance(name, str) or name not in KV_TYPES]
    if unknown:
        raise ConfigError(f"kv_type {shown(unknown[0])} does not exist; choose from {', '.join(KV_TYPES)}")
    return KV_TYPES[names[0]], KV_TYPES[names[1]]


def make_geometry(
    model: str,
    layers: Iterable[LayerShape],
    kv_type: str | Sequence[str] = "f16",
    block_size: int = 32,
    *,
    line_bytes: int = CPU_LINE,
) -> Geometry:
    """Return the geometry of the cache of `model` with `layers`.

    Args:
        model: its name, for errors.
        layers: the layers with a cache.
        kv_type: a type, or a pair of types for K and V.
        block_size: tokens; raised until the K and the V of a block are whole numbers of `line_bytes` in every
            layer.
        line_bytes: bytes of a cache line.

    Raises:
        ConfigError: a setting does not exist.
        UnsupportedError: no layer has a cache, or a head cannot be aligned.
    """
    if block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size={block_size} tokens; choose from {', '.join(map(str, BLOCK_SIZES))}")
    shapes = tuple(layers)
    if not shapes:
        raise UnsupportedError(f"{model}: no layer has a KV cache to page")
    type_k, type_v = parse_kv_type(kv_type)
    if all(shape.head_dim_v == 0 for shape in shapes):
        type_v = type_k
    for shape in shapes:
        _check_heads(model, shape, shapes, "K", shape.head_dim_k, type_k)
        _check_heads(model, shape, shapes, "V", shape.head_dim_v, type_v)
    rows = tuple(
        LayerRows(
            shape.layer,
            type_k.row_bytes(shape.n_head_kv * shape.head_dim_k),
            type_v.row_bytes(shape.n_head_kv * shape.head_dim_v),
        )
        for shape in shapes
    )
    return Geometry(type_k, type_v, _aligned(rows, block_size, line_bytes), rows)


def _check_heads(
    model: str, shape: LayerShape, shapes: Sequence[LayerShape], part: str, head_dim: int, kind: TensorType
) -> None:
    if head_dim % kind.group == 0:
        return
    dims = [shape.head_dim_k if part == "K" else shape.head_dim_v for shape in shapes]
    fitting = [t.name for t in KV_TYPES.values() if all(dim % t.group == 0 for dim in dims)]
    raise UnsupportedError(
        f"{model}, layer {shape.layer}: a head of {part} has {head_dim} values, which is not a multiple of "
        f"the {kind.group} that {kind.name} packs together; kv_type {', '.join(fitting)} would fit"
    )


def _aligned(rows: Sequence[LayerRows], block_size: int, line_bytes: int) -> int:
    """Return the smallest aligned block size of at least `block_size`. The largest one is always aligned."""

    def aligned(size: int) -> bool:
        return all(r.k_bytes * size % line_bytes == 0 == r.v_bytes * size % line_bytes for r in rows)

    return next((size for size in BLOCK_SIZES if size >= block_size and aligned(size)), BLOCK_SIZES[-1])
