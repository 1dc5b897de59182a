"""From bytes to blocks: how large a pool is made, and how long a sequence in it may become."""

from __future__ import annotations

from dataclasses import dataclass

from pyvelo.errors import ConfigError, OutOfMemory
from pyvelo.kv.geometry import POOL_GRAIN, Geometry

__all__ = ["COMFORT_BYTES", "PoolRequest", "PoolSize", "size_pool"]

COMFORT_BYTES = 2 << 30  # a pool that nobody asked for takes no more than this
COMFORT_CTX = 8192  # tokens of a sequence when nobody said how long; a default pool holds as many at least
SHORTEST_CTX = 4096  # tokens of one sequence that a default pool holds, even beyond COMFORT_BYTES
COMFORT_SEQS = 4  # full sequences that a default pool holds
MAX_SLOTS = (1 << 31) - POOL_GRAIN  # slots are int32


@dataclass(frozen=True)
class PoolRequest:
    """What was asked for. `free_bytes` was measured before the weights were loaded; None: not known."""

    max_num_seqs: int
    n_ctx: int | None
    n_ctx_train: int
    kv_cache_bytes: int | None
    memory_utilization: float
    free_bytes: int | None
    other_bytes: int  # weights and recurrent states, which need memory beside the pool


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
    of the free memory less the weights. Either way it takes no more than `max_num_seqs` sequences of full
    length could use.

    Raises ConfigError or OutOfMemory, with the numbers, when that leaves too little.
    """
    longest = want.n_ctx or want.n_ctx_train
    grains = _asked(geometry, want) if want.kv_cache_bytes is not None else _default(geometry, want)
    useful = _grains_for(geometry.blocks_for(longest) * geometry.block_size * want.max_num_seqs)
    grains = min(grains, useful, MAX_SLOTS // POOL_GRAIN)
    n_tokens = grains * POOL_GRAIN
    n_ctx = want.n_ctx or min(want.n_ctx_train, n_tokens)
    return PoolSize(grains * geometry.grain_blocks, n_tokens, n_ctx)


def _asked(geometry: Geometry, want: PoolRequest) -> int:
    asked, grain_bytes = want.kv_cache_bytes or 0, POOL_GRAIN * geometry.token_bytes
    if asked < grain_bytes:
        raise ConfigError(
            f"kv_cache_bytes={asked} is too little: the smallest pool, {POOL_GRAIN} tokens of "
            f"{geometry.token_bytes} bytes each, takes {grain_bytes}"
        )
    if want.free_bytes is not None and asked > want.free_bytes:
        raise OutOfMemory(f"kv_cache_bytes={asked}, but only {want.free_bytes} bytes are free")
    return asked // grain_bytes


def _default(geometry: Geometry, want: PoolRequest) -> int:
    if want.free_bytes is None:
        raise ConfigError("this system does not tell how much memory is free: give kv_cache_bytes")
    length = want.n_ctx or min(want.n_ctx_train, COMFORT_CTX)
    floor = want.n_ctx or min(want.n_ctx_train, SHORTEST_CTX)
    comfort = min(max(COMFORT_SEQS * length, COMFORT_CTX), COMFORT_BYTES // geometry.token_bytes)
    wanted = max(_grains_for(floor), comfort // POOL_GRAIN)
    budget = int(want.free_bytes * want.memory_utilization) - want.other_bytes
    fitting = max(0, budget) // (POOL_GRAIN * geometry.token_bytes)
    needed = _grains_for(want.n_ctx) if want.n_ctx else 1
    if fitting < needed:
        tokens = needed * POOL_GRAIN
        raise OutOfMemory(
            f"a KV cache of {tokens} tokens takes {tokens * geometry.token_bytes} bytes, but "
            f"memory_utilization={want.memory_utilization:g} of the {want.free_bytes} free bytes, less "
            f"{want.other_bytes} for the weights, leaves {max(0, budget)}; a smaller n_ctx, a smaller "
            f"kv_type (such as q8_0) or, if you know better, kv_cache_bytes would do"
        )
    return min(wanted, fitting)


def _grains_for(n_tokens: int) -> int:
    return max(1, -(-n_tokens // POOL_GRAIN))
