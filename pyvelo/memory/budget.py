"""From bytes to blocks: how large a pool is made, and how long a sequence in it may become."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyvelo.errors import ConfigError, OutOfMemory
from pyvelo.kv.geometry import POOL_GRAIN, Geometry

__all__ = [
    "COMFORT_BYTES",
    "SCORED_TOKENS",
    "DeviceRoom",
    "Limits",
    "PoolRequest",
    "PoolSize",
    "size_pool",
    "wanted_tokens",
]

SCORED_TOKENS = 64
"""Of prompts, whose logits a step gives beside those that a token is drawn from: each is as long as the
vocabulary."""


class Limits(NamedTuple):
    """What one step may hold; `max_seqs` is at most `max_batch_tokens`, so that all who run can decode."""

    max_seqs: int
    max_batch_tokens: int

    @property
    def max_outputs(self) -> int:
        """Tokens whose logits are asked for."""
        return min(self.max_batch_tokens, self.max_seqs + SCORED_TOKENS)


COMFORT_BYTES = 2 << 30  # a pool that nobody asked for takes no more than this
COMFORT_CTX = 8192  # tokens of a sequence when nobody said how long; a default pool holds as many at least
SHORTEST_CTX = 4096  # tokens of one sequence that a default pool holds, even beyond COMFORT_BYTES
HOST = ""  # the name of its side
COMFORT_SEQS = 4  # full sequences that a default pool holds
MAX_SLOTS = (1 << 31) - POOL_GRAIN  # slots are int32


@dataclass(frozen=True)
class DeviceRoom:
    """A GPU that holds the rows of some layers, `token_bytes` of a token; free before anything was loaded."""

    name: str
    free_bytes: int
    other_bytes: int  # what it needs beside the pool: weights, and memory to compute
    token_bytes: int
    n_layers: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class PoolRequest:
    """What was asked for. `free_bytes` was measured before the weights were loaded; None: not known.

    `devices` hold the rows of their layers, the host those of the others: one block lies on all of them.
    """

    max_num_seqs: int
    n_ctx: int | None
    n_ctx_train: int
    kv_cache_bytes: int | None
    memory_utilization: float
    free_bytes: int | None
    other_bytes: int  # weights and recurrent states, which need memory beside the pool
    devices: tuple[DeviceRoom, ...] = ()

    def host_token_bytes(self, geometry: Geometry) -> int:
        """Bytes of a token that lie in host memory."""
        return geometry.token_bytes - sum(device.token_bytes for device in self.devices)


@dataclass(frozen=True)
class PoolSize:
    """A pool of `n_blocks` blocks, `n_tokens` tokens, for sequences of up to `n_ctx` tokens."""

    n_blocks: int
    n_tokens: int
    n_ctx: int

    @property
    def n_sequences(self) -> int:
        """Sequences of full length that it holds at once, where they share nothing."""
        return self.n_tokens // self.n_ctx


def size_pool(geometry: Geometry, want: PoolRequest) -> PoolSize:
    """Decides the number of blocks.

    With `kv_cache_bytes` the pool takes as many whole blocks as fit in it. Without, it holds four sequences
    of `n_ctx` tokens (8192 where that is None) and at least 8192 tokens, in at most 2 GiB or, if that is
    more, one sequence of `n_ctx` tokens (4096 where that is None), and never more than `memory_utilization`
    of the free memory less the weights. A pool that lies on GPUs alone takes all of that share. Either way it
    takes no more than `max_num_seqs` sequences of full length could use.

    Raises ConfigError or OutOfMemory, with the numbers, when that leaves too little.
    """
    longest = want.n_ctx or want.n_ctx_train
    grains = _asked(geometry, want) if want.kv_cache_bytes is not None else _default(geometry, want)
    useful = _grains_for(geometry.blocks_for(longest) * geometry.block_size * want.max_num_seqs)
    grains = min(grains, useful, MAX_SLOTS // POOL_GRAIN)
    n_tokens = grains * POOL_GRAIN
    n_ctx = want.n_ctx or min(want.n_ctx_train, n_tokens)
    return PoolSize(grains * geometry.grain_blocks, n_tokens, n_ctx)


def wanted_tokens(geometry: Geometry, want: PoolRequest) -> int:
    """Tokens of the pool that `size_pool` would make of memory without end, all of it the host's."""
    endless = replace(
        want, free_bytes=MAX_SLOTS * geometry.token_bytes, memory_utilization=1.0, other_bytes=0
    )
    return size_pool(geometry, replace(endless, devices=())).n_tokens


def _asked(geometry: Geometry, want: PoolRequest) -> int:
    asked, grain_bytes = want.kv_cache_bytes or 0, POOL_GRAIN * geometry.token_bytes
    if asked < grain_bytes:
        raise ConfigError(
            f"kv_cache_bytes={asked} is too little: the smallest pool, {POOL_GRAIN} tokens of "
            f"{geometry.token_bytes} bytes each, takes {grain_bytes}"
        )
    grains = asked // grain_bytes
    on_host = asked - grains * POOL_GRAIN * (geometry.token_bytes - want.host_token_bytes(geometry))
    if want.free_bytes is not None and on_host > want.free_bytes:
        raise OutOfMemory(f"kv_cache_bytes={asked}, but only {want.free_bytes} bytes are free")
    for device in want.devices:
        part, left = grains * POOL_GRAIN * device.token_bytes, device.free_bytes - device.other_bytes
        if part > max(0, left):
            most = max(0, left) // device.token_bytes * geometry.token_bytes
            raise OutOfMemory(
                f"kv_cache_bytes={asked} puts {part} bytes on {device.name}, where {device.free_bytes} are "
                f"free, {device.other_bytes} of them for weights and to compute; {most} or fewer "
                f"n_gpu_layers would do"
            )
    return grains


def _default(geometry: Geometry, want: PoolRequest) -> int:
    length = want.n_ctx or min(want.n_ctx_train, COMFORT_CTX)
    floor = want.n_ctx or min(want.n_ctx_train, SHORTEST_CTX)
    comfort = min(max(COMFORT_SEQS * length, COMFORT_CTX), COMFORT_BYTES // geometry.token_bytes)
    wanted = max(_grains_for(floor), comfort // POOL_GRAIN)
    needed = _grains_for(want.n_ctx) if want.n_ctx else 1
    if want.host_token_bytes(geometry) == 0:
        wanted = MAX_SLOTS // POOL_GRAIN  # what lies on GPUs is in nobody's way
    for room in _rooms(geometry, want):
        wanted = min(wanted, _fitting(room, want, needed))
    return wanted


def _rooms(geometry: Geometry, want: PoolRequest) -> Iterator[DeviceRoom]:
    """All sides of the pool, the host first."""
    on_host = want.host_token_bytes(geometry)
    if on_host and want.free_bytes is None:
        raise ConfigError("this system does not tell how much memory is free: give kv_cache_bytes")
    yield DeviceRoom(HOST, want.free_bytes or 0, want.other_bytes, on_host)
    yield from want.devices


def _fitting(room: DeviceRoom, want: PoolRequest, needed: int) -> int:
    """Grains for which a side has room; OutOfMemory where they are fewer than needed."""
    if room.token_bytes == 0:
        return MAX_SLOTS // POOL_GRAIN
    budget = max(0, int(room.free_bytes * want.memory_utilization) - room.other_bytes)
    fitting = budget // (POOL_GRAIN * room.token_bytes)
    if fitting < needed:
        tokens = needed * POOL_GRAIN
        on, least = ("", "") if room.name == HOST else (f" on {room.name}", ", fewer n_gpu_layers")
        raise OutOfMemory(
            f"a KV cache of {tokens} tokens takes {tokens * room.token_bytes} bytes{on}, but "
            f"memory_utilization={want.memory_utilization:g} of the {room.free_bytes} free bytes, less "
            f"{room.other_bytes} for the weights, leaves {budget}; a smaller n_ctx, a smaller "
            f"kv_type (such as q8_0){least} or, if you know better, kv_cache_bytes would do"
        )
    return fitting


def _grains_for(n_tokens: int) -> int:
    return max(1, -(-n_tokens // POOL_GRAIN))
