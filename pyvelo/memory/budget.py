"""Size of the pool of blocks, from bytes of memory, and the longest sequence in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyvelo.errors import ConfigError, OutOfMemory
from pyvelo.kv.geometry import POOL_GRAIN, Geometry
from pyvelo.kv.prefix import BlockLayout

__all__ = [
    "DEFAULT_BYTES",
    "SCORED_TOKENS",
    "DeviceRoom",
    "Limits",
    "PoolRequest",
    "PoolSize",
    "least_slots",
    "longest_sequence",
    "size_pool",
    "swap_blocks",
    "wanted_slots",
]

SCORED_TOKENS = 64
"""Prompt tokens whose logits one step returns beside the sampled rows. A row is as long as the vocabulary."""


class Limits(NamedTuple):
    """Limits of one step. `max_seqs` is at most `max_batch_tokens`, so every running sequence can decode."""

    max_seqs: int
    max_batch_tokens: int

    @property
    def max_outputs(self) -> int:
        """Rows of logits."""
        return min(self.max_batch_tokens, self.max_seqs + SCORED_TOKENS)


DEFAULT_BYTES = 2 << 30  # most bytes of a pool of default size
DEFAULT_CTX = 8192  # tokens of a sequence without n_ctx; also the least tokens of a default pool
MIN_CTX = 4096  # tokens of one sequence that fit in a default pool, even beyond DEFAULT_BYTES
HOST = ""  # name of the host among the devices
DEFAULT_SEQS = 4  # sequences of full length in a default pool
SNAPSHOTS = 2  # of the recurrent states of a sequence: after its prompt, and after its answer
MAX_SLOTS = (1 << 31) - POOL_GRAIN  # slots are int32


@dataclass(frozen=True)
class DeviceRoom:
    """GPU with some layers, whose rows take `slot_bytes` in each slot. Free memory is as before loading."""

    name: str
    free_bytes: int
    other_bytes: int  # weights, states and compute memory, beside the pool
    slot_bytes: int
    layers: range = range(0)
    weight_bytes: int = 0
    device: int = 0  # number among all devices


@dataclass(frozen=True)
class PoolRequest:
    """Settings and memory for a pool. `free_bytes` was measured before the weights were loaded; None:
    unknown.

    `devices` hold the rows of their layers, the host holds all other rows. One block has memory on all of
    them.
    """

    max_num_seqs: int
    n_ctx: int | None
    n_ctx_train: int
    kv_cache_bytes: int | None
    memory_utilization: float
    free_bytes: int | None
    other_bytes: int  # weights and recurrent states, beside the pool
    devices: tuple[DeviceRoom, ...] = ()

    def host_slot_bytes(self, geometry: Geometry) -> int:
        """Return the bytes of a slot in host memory."""
        return geometry.slot_bytes - sum(device.slot_bytes for device in self.devices)


@dataclass(frozen=True)
class PoolSize:
    """Size of a pool: `n_blocks` blocks, for sequences of up to `n_ctx` tokens.

    n_tokens: tokens of the longest sequence that fits.
    n_sequences: sequences of full length that fit at once if they share nothing.
    """

    n_blocks: int
    n_tokens: int
    n_ctx: int
    n_sequences: int


def size_pool(geometry: Geometry, layout: BlockLayout, want: PoolRequest) -> PoolSize:
    """Return the size of the pool for sequences with this layout.

    With `kv_cache_bytes` the pool has as many whole blocks as fit. Without, it has room for four sequences of
    `n_ctx` tokens (8192 if None) and at least 8192 tokens, in at most 2 GiB or, if that is more, one sequence
    of `n_ctx` tokens (4096 if None), and never more than `memory_utilization` of the free memory less the
    weights. A pool on GPUs alone uses this whole share. In both cases it is at most as large as
    `max_num_seqs` sequences of full length can use.

    Raises:
        ConfigError: `kv_cache_bytes` is too small, or is needed because the free memory is unknown.
        OutOfMemory: too little memory is left; the message has the numbers.
    """
    longest = want.n_ctx or want.n_ctx_train
    by_bytes = want.kv_cache_bytes is not None
    grains = _requested(geometry, layout, want) if by_bytes else _default(geometry, layout, want)
    useful = _grains_for(layout, longest, want.max_num_seqs, SNAPSHOTS)
    n_blocks = min(grains, useful, MAX_SLOTS // POOL_GRAIN) * geometry.grain_blocks
    n_tokens = longest_sequence(layout, n_blocks)
    n_ctx = want.n_ctx or min(want.n_ctx_train, n_tokens)
    return PoolSize(n_blocks, n_tokens, n_ctx, n_blocks // layout.peak_blocks(n_ctx))


def wanted_slots(geometry: Geometry, layout: BlockLayout, want: PoolRequest) -> int:
    """Return the slots of the pool that `size_pool` makes if the host has unlimited memory."""
    endless = replace(want, free_bytes=MAX_SLOTS * geometry.slot_bytes, memory_utilization=1.0, other_bytes=0)
    return size_pool(geometry, layout, replace(endless, devices=())).n_blocks * geometry.block_size


def least_slots(layout: BlockLayout, n_ctx: int | None) -> int:
    """Return the slots of the smallest pool for a sequence of `n_ctx` tokens; None: for any sequence."""
    return _grains_for(layout, n_ctx or 1) * POOL_GRAIN


def _requested(geometry: Geometry, layout: BlockLayout, want: PoolRequest) -> int:
    requested, grain_bytes = want.kv_cache_bytes or 0, POOL_GRAIN * geometry.slot_bytes
    least = max(1, -(-layout.peak_blocks(1) // geometry.grain_blocks))
    if requested < least * grain_bytes:
        raise ConfigError(
            f"kv_cache_bytes={requested} is too little: the smallest pool, {least * POOL_GRAIN} tokens of "
            f"{geometry.slot_bytes} bytes each, takes {least * grain_bytes}"
        )
    grains = requested // grain_bytes
    on_host = requested - grains * POOL_GRAIN * (geometry.slot_bytes - want.host_slot_bytes(geometry))
    if want.free_bytes is not None and on_host > want.free_bytes:
        raise OutOfMemory(f"kv_cache_bytes={requested}, but only {want.free_bytes} bytes are free")
    for device in want.devices:
        part, left = grains * POOL_GRAIN * device.slot_bytes, device.free_bytes - device.other_bytes
        if part > max(0, left):
            most = max(0, left) // device.slot_bytes * geometry.slot_bytes
            raise OutOfMemory(
                f"kv_cache_bytes={requested} puts {part} bytes on {device.name}, which has "
                f"{device.free_bytes} free bytes, {device.other_bytes} of them for weights and to compute; "
                f"{most} or fewer n_gpu_layers would fit"
            )
    return grains


def _default(geometry: Geometry, layout: BlockLayout, want: PoolRequest) -> int:
    length = want.n_ctx or min(want.n_ctx_train, DEFAULT_CTX)
    floor = want.n_ctx or min(want.n_ctx_train, MIN_CTX)
    default = _grains_for(layout, length, DEFAULT_SEQS, SNAPSHOTS)
    default = max(default, _grains_for(layout, DEFAULT_CTX))
    default = min(default, DEFAULT_BYTES // geometry.slot_bytes // POOL_GRAIN)
    wanted = max(_grains_for(layout, floor), default)
    needed = _grains_for(layout, want.n_ctx or 1)
    if want.host_slot_bytes(geometry) == 0:
        wanted = MAX_SLOTS // POOL_GRAIN  # memory of GPUs has no other use
    for room in _rooms(geometry, want):
        wanted = min(wanted, _fitting(room, want, needed))
    return wanted


def _rooms(geometry: Geometry, want: PoolRequest) -> Iterator[DeviceRoom]:
    """Yield the memory of the host and of the GPUs for the pool, the host first."""
    on_host = want.host_slot_bytes(geometry)
    if on_host and want.free_bytes is None:
        raise ConfigError("the free memory of this system is unknown: give kv_cache_bytes")
    yield DeviceRoom(HOST, want.free_bytes or 0, want.other_bytes, on_host)
    yield from want.devices


def _fitting(room: DeviceRoom, want: PoolRequest, needed: int) -> int:
    """Return the grains that fit on a device; raise OutOfMemory if they are fewer than needed."""
    if room.slot_bytes == 0:
        return MAX_SLOTS // POOL_GRAIN
    budget = max(0, int(room.free_bytes * want.memory_utilization) - room.other_bytes)
    fitting = budget // (POOL_GRAIN * room.slot_bytes)
    if fitting < needed:
        tokens = needed * POOL_GRAIN
        on, least = ("", "") if room.name == HOST else (f" on {room.name}", ", fewer n_gpu_layers")
        share = ", a larger memory_utilization" if want.memory_utilization < 1 else ""
        raise OutOfMemory(
            f"a KV cache of {tokens} tokens takes {tokens * room.slot_bytes} bytes{on}, but "
            f"memory_utilization={want.memory_utilization:g} of the {room.free_bytes} free bytes, less "
            f"{room.other_bytes} for the weights, leaves {budget}; a smaller n_ctx, a smaller "
            f"kv_type (such as q8_0){share}{least} or kv_cache_bytes would help"
        )
    return fitting


def longest_sequence(layout: BlockLayout, n_blocks: int) -> int:
    """Return the tokens of the longest sequence that fits in `n_blocks` blocks."""
    low, high = 0, MAX_SLOTS  # a sequence in windows alone fits at any length, or not at all
    while low < high:
        middle = (low + high + 1) // 2
        if layout.peak_blocks(middle) <= n_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _grains_for(layout: BlockLayout, n_tokens: int, n_sequences: int = 1, n_snapshots: int = 0) -> int:
    """Return the grains with the blocks of sequences of `n_tokens` tokens, and of snapshots of each."""
    n_blocks = (layout.peak_blocks(n_tokens) + n_snapshots * layout.state_blocks) * n_sequences
    return max(1, -(-n_blocks * layout.block_size // POOL_GRAIN))


def swap_blocks(swap_bytes: int, geometry: Geometry) -> int:
    """Return the blocks in host memory for preempted sequences."""
    return min(swap_bytes // geometry.block_bytes, (1 << 31) - 1)
