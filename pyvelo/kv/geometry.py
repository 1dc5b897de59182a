"""Bytes of tokens and blocks of the KV cache. Only this module computes them.

A token has, in each layer, a row of K and a row of V. Quantized types pack groups of 32 values, so a head
must be a whole number of groups, and a block of any type is a whole number of cache lines.

Layers that remember alike form groups, and a block has `block_size` tokens of the layers of one group. Groups
have equally many layers, or twice as many of rows half as long, and so on. So a block has the same bytes in
each group, and any group can use a block that the window of another has left. A model without windows has
one group. With layers on several devices a block has memory on each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Protocol

from pyvelo.errors import ConfigError, UnsupportedError, shown
from pyvelo.kv.prefix import FULL, BlockLayout, Window
from pyvelo.kv.types import KV_TYPES, TensorType

__all__ = [
    "BLOCK_SIZES",
    "CPU_LINE",
    "GPU_LINE",
    "POOL_GRAIN",
    "Geometry",
    "LayerGroup",
    "LayerRows",
    "LayerShape",
    "contiguous_bytes",
    "make_geometry",
    "parse_kv_type",
]

BLOCK_SIZES = (32, 64, 128, 256)  # tokens
POOL_GRAIN = 256  # tokens: a pool is a whole number of these
CPU_LINE = 64  # bytes
GPU_LINE = 128  # bytes
LONG = 32768  # tokens of the sequence for which groups are made
MOST_PADDING = 1.02  # bytes of such a sequence, as a multiple of the bytes without padding
CHUNKED = 2  # `window_type`
STOCK_PADDING = 256  # tokens
STATE_PARTS = 16  # blocks of a snapshot, if no layer has a cache


class LayerShape(Protocol):
    """Shape of a layer's cache for a token; `head_dim_v` is 0 if V is a view of K.

    `window` is in tokens, 0 without one. `window_type` 2: the tokens since the last multiple of `window`.
    `device` holds the layer.
    """

    @property
    def layer(self) -> int: ...
    @property
    def n_head_kv(self) -> int: ...
    @property
    def head_dim_k(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def window_type(self) -> int: ...
    @property
    def device(self) -> int: ...


@dataclass(frozen=True)
class LayerRows:
    """Bytes of one token in one layer, whose number is `layer`, in the memory of `device`."""

    layer: int
    k_bytes: int
    v_bytes: int
    device: int = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of K and V."""
        return self.k_bytes + self.v_bytes


@dataclass(frozen=True)
class LayerGroup:
    """Layers that remember alike, and share a block table.

    `n_shares` of its rows are together as long as the longest row of the model.
    """

    window: Window
    layers: tuple[int, ...]
    n_shares: int = 1


@dataclass(frozen=True)
class Geometry:
    """Types, block size (tokens), groups and bytes of a KV cache.

    `rows` are what a token has in a block: a row of each layer, if there is one group; or as many of the
    longest rows on each device as the group needs that has the most layers there.
    `state_bytes`: of a saved recurrent state, 0 without one.
    """

    type_k: TensorType
    type_v: TensorType
    block_size: int
    rows: tuple[LayerRows, ...]
    groups: tuple[LayerGroup, ...]
    state_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in a block."""
        return sum(row.n_bytes for row in self.rows)

    def slot_bytes_with(self, layers: Sequence[int]) -> int:
        """Return the bytes of one token in a block on a device with these layers.

        The groups must have been made as if one device had all layers.
        """
        if len(self.groups) == 1:
            return sum(row.n_bytes for row in self.rows if row.layer in layers)
        return self.rows[0].n_bytes * _most_rows(self.groups, layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all groups, before a window frees any."""
        return self.slot_bytes * len(self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.slot_bytes

    @property
    def windows(self) -> tuple[Window, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """Group of each layer, -1 for a layer without a cache; empty if there is one group."""
        if len(self.groups) == 1:
            return ()
        found = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        return tuple(found.get(layer, -1) for layer in range(max(found) + 1))

    def sequence_bytes(self, n_tokens: int) -> int:
        """Return the bytes of a sequence of `n_tokens` tokens between two steps."""
        layout = self.layout(1)
        n_blocks = sum(layout.blocks_for(n_tokens) - first for first in layout.first_blocks(n_tokens))
        return n_blocks * self.block_bytes

    def layout(self, max_chunk: int) -> BlockLayout:
        """Return the layout of a sequence's blocks, if a step computes at most `max_chunk` of its tokens."""
        return BlockLayout(self.block_size, self.windows, max_chunk, self.state_blocks)

    @property
    def state_blocks(self) -> int:
        """Blocks of a snapshot of a recurrent state."""
        return -(-self.state_bytes // self.block_bytes)

    @property
    def grain_blocks(self) -> int:
        """A pool's number of blocks is a multiple of this."""
        return POOL_GRAIN // self.block_size

    def blocks_for(self, n_tokens: int) -> int:
        """Return the blocks for `n_tokens` tokens of one sequence in a group without a window."""
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
    windows: bool = True,
    state_bytes: int = 0,
) -> Geometry:
    """Return the geometry of the cache of `model` with `layers`.

    Args:
        model: its name, for errors.
        layers: the layers with a cache.
        kv_type: a type, or a pair of types for K and V.
        block_size: tokens; raised until the K and the V of a block are whole numbers of `line_bytes` in every
            layer.
        line_bytes: bytes of a cache line.
        windows: whether layers with windows get groups of their own.
        state_bytes: bytes of a saved recurrent state.

    Raises:
        ConfigError: a setting does not exist.
        UnsupportedError: no layer has a cache or a state, or a head cannot be aligned.
    """
    if block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size={block_size} tokens; choose from {', '.join(map(str, BLOCK_SIZES))}")
    shapes = tuple(layers)
    type_k, type_v = parse_kv_type(kv_type)
    if not shapes and state_bytes:
        return _of_states(type_k, type_v, block_size, state_bytes)
    if not shapes:
        raise UnsupportedError(f"{model}: no layer has a KV cache to page")
    if all(shape.head_dim_v == 0 for shape in shapes):
        type_v = type_k
    for shape in shapes:
        _check_heads(model, shape, shapes, "K", shape.head_dim_k, type_k)
        _check_heads(model, shape, shapes, "V", shape.head_dim_v, type_v)
    rows = {
        shape.layer: LayerRows(
            shape.layer,
            type_k.row_bytes(shape.n_head_kv * shape.head_dim_k),
            type_v.row_bytes(shape.n_head_kv * shape.head_dim_v),
            shape.device,
        )
        for shape in shapes
    }
    shares = _shares(shapes, rows) if windows else {}
    groups = _group(shapes, shares) if shares else ()
    if len(groups) <= 1:
        groups = (LayerGroup(FULL if not groups else groups[0].window, tuple(rows)),)
        held = tuple(rows.values())
    else:
        held = _held(rows, groups)
    size = _aligned(tuple(rows.values()), block_size, line_bytes)
    return Geometry(type_k, type_v, size, held, groups, state_bytes)


def _of_states(type_k: TensorType, type_v: TensorType, block_size: int, state_bytes: int) -> Geometry:
    """Return the geometry of a model of recurrent layers alone: blocks hold nothing but parts of snapshots.

    Its sequences count their tokens in blocks of one group, of which they hold the last one.
    """
    slot_bytes = -(-state_bytes // (STATE_PARTS * block_size * CPU_LINE)) * CPU_LINE
    rows = (LayerRows(-1, slot_bytes, 0),)
    return Geometry(type_k, type_v, block_size, rows, (LayerGroup(Window(1), ()),), state_bytes)


def contiguous_bytes(geometry: Geometry, layers: Iterable[LayerShape], n_tokens: int, n_batch: int) -> int:
    """Return the bytes of llama.cpp's caches for one sequence of at most `n_tokens` tokens.

    A layer with a window has room for the window and a batch, padded (`llama_kv_cache_iswa`).
    """
    total = 0
    for layer in layers:
        in_window = -(-(layer.window + n_batch) // STOCK_PADDING) * STOCK_PADDING
        k = geometry.type_k.row_bytes(layer.n_head_kv * layer.head_dim_k)
        v = geometry.type_v.row_bytes(layer.n_head_kv * layer.head_dim_v)
        total += (min(n_tokens, in_window) if layer.window else n_tokens) * (k + v)
    return total


def _shares(shapes: Sequence[LayerShape], rows: Mapping[int, LayerRows]) -> dict[int, int]:
    """Return how many rows of each layer are as long as the longest ones; empty: layers cannot share memory.

    They can, if all rows are whole parts of the longest ones, in K and V alike.
    """
    longest = max(rows.values(), key=lambda row: row.k_bytes)
    shares = {layer: longest.k_bytes // row.k_bytes for layer, row in rows.items()}
    whole = all(
        (row.k_bytes * shares[layer], row.v_bytes * shares[layer]) == (longest.k_bytes, longest.v_bytes)
        for layer, row in rows.items()
    )
    # upstream keeps the layers with a window in a cache of their own, whose rows are equally long
    kinds = {(shape.window > 0, shares[shape.layer]) for shape in shapes}
    alike = len(kinds) == len({windowed for windowed, _ in kinds})
    return shares if whole and alike else {}


def _held(rows: Mapping[int, LayerRows], groups: Sequence[LayerGroup]) -> tuple[LayerRows, ...]:
    """Return the rows of a token in a block that any of the groups can use."""
    longest = max(rows.values(), key=lambda row: row.k_bytes)
    devices = dict.fromkeys(row.device for row in rows.values())
    return tuple(
        replace(longest, device=device)
        for device in devices
        for _ in range(_most_rows(groups, [row.layer for row in rows.values() if row.device == device]))
    )


def _most_rows(groups: Sequence[LayerGroup], layers: Sequence[int]) -> int:
    """Return how many of the longest rows a group needs at most for its part of the layers of one device."""
    n_layers, room = Counter[Window](), Counter[Window]()
    for group in groups:
        n_layers[group.window] += sum(layer in layers for layer in group.layers)
        room[group.window] += group.n_shares
    return max(-(-n // room[window]) for window, n in n_layers.items())


def _window_of(shape: LayerShape) -> Window:
    return Window(shape.window, shape.window_type == CHUNKED) if shape.window else FULL


def _group(shapes: Sequence[LayerShape], shares: Mapping[int, int]) -> tuple[LayerGroup, ...]:
    """Return groups of `n` of the longest rows or fewer: as few as take little more memory than the best `n`.

    A step handles a table for each group of a sequence. A group with fewer rows wastes memory. The number of
    groups does not depend on the devices of the layers.
    """
    kinds: dict[Window, list[LayerShape]] = {}
    for shape in sorted(shapes, key=lambda shape: shape.window > 0):  # groups without a window first
        kinds.setdefault(_window_of(shape), []).append(shape)

    def count(kind: Sequence[LayerShape], n: int) -> int:
        return -(-len(kind) // (n * shares[kind[0].layer]))

    def cost(n: int) -> int:
        """Return the rows that a sequence of LONG tokens holds, padding included."""
        counts = ((window, count(kind, n)) for window, kind in kinds.items())
        return sum(count * n * (min(window.size, LONG) or LONG) for window, count in counts)

    costs = {n: cost(n) for n in range(1, len(shapes) + 1)}
    n = max(n for n, rows in costs.items() if rows <= MOST_PADDING * min(costs.values()))
    return tuple(
        LayerGroup(window, layers, shares[layers[0]])
        for window, kind in kinds.items()
        for layers in _deal(kind, count(kind, n), shares[kind[0].layer])
    )


def _deal(kind: Sequence[LayerShape], n_groups: int, n_shares: int) -> tuple[tuple[int, ...], ...]:
    """Deal layers to groups in turns, `n_shares` of a device at a time. Each gets some of every device."""
    groups: list[list[int]] = [[] for _ in range(n_groups)]
    turns = cycle(groups)
    for device in dict.fromkeys(shape.device for shape in kind):
        layers = [shape.layer for shape in kind if shape.device == device]
        for first in range(0, len(layers), n_shares):
            next(turns).extend(layers[first : first + n_shares])
    return tuple(map(tuple, groups))


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
