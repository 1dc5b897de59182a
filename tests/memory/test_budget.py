"""Sizes of pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.errors import ConfigError, OutOfMemory
from pyvelo.kv.geometry import Geometry, make_geometry
from pyvelo.memory.budget import DEFAULT_BYTES, PoolRequest, PoolSize, size_pool

GIB = 1 << 30


@dataclass(frozen=True)
class Layer:
    layer: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    window_type: int = 0
    device: int = 0


SMALL = make_geometry("small", [Layer(i, 8, 64, 64) for i in range(16)])  # 32 KiB a token
LARGE = make_geometry("large", [Layer(i, 32, 128, 128) for i in range(32)])  # 512 KiB a token


def size(geometry: Geometry = SMALL, *, max_chunk: int = 512, **settings: Any) -> PoolSize:
    want: dict[str, Any] = {
        "max_num_seqs": 256,
        "n_ctx": None,
        "n_ctx_train": 131072,
        "kv_cache_bytes": None,
        "memory_utilization": 0.9,
        "free_bytes": 64 * GIB,
        "other_bytes": GIB,
    }
    return size_pool(geometry, geometry.layout(max_chunk), PoolRequest(**(want | settings)))


def test_the_default_pool_has_room_for_four_sequences() -> None:
    assert size() == PoolSize(n_blocks=1024, n_tokens=32768, n_ctx=32768, n_sequences=1)


def test_the_default_pool_has_two_gib_or_one_short_sequence() -> None:
    assert size(LARGE).n_tokens == 4096
    assert size(LARGE, free_bytes=1024 * GIB).n_tokens * LARGE.token_bytes == DEFAULT_BYTES
    odd = make_geometry("odd", [Layer(i, 8, 128, 128) for i in range(28)])
    assert 0.98 * DEFAULT_BYTES < size(odd).n_tokens * odd.token_bytes <= DEFAULT_BYTES


def test_the_default_pool_has_room_for_four_sequences_of_n_ctx() -> None:
    assert size(n_ctx=4096) == PoolSize(n_blocks=512, n_tokens=16384, n_ctx=4096, n_sequences=4)
    assert size(n_ctx=4096).n_sequences == 4


def test_short_sequences_still_run_in_parallel() -> None:
    assert size(n_ctx=256) == PoolSize(n_blocks=256, n_tokens=8192, n_ctx=256, n_sequences=32)
    assert size(n_ctx=256, max_num_seqs=4).n_tokens == 1024


def test_one_sequence_of_a_large_n_ctx_fits() -> None:
    assert size(LARGE, n_ctx=32768) == PoolSize(n_blocks=1024, n_tokens=32768, n_ctx=32768, n_sequences=1)


def test_a_small_machine_gets_a_smaller_pool() -> None:
    pool = size(free_bytes=2 * GIB, other_bytes=GIB)
    assert 0 < pool.n_tokens * SMALL.token_bytes <= int(0.9 * 2 * GIB) - GIB
    assert pool.n_ctx == pool.n_tokens


def test_the_pool_is_no_larger_than_the_sequences_can_use() -> None:
    assert size(max_num_seqs=1, n_ctx=1000).n_tokens == 1024
    assert size(max_num_seqs=1, n_ctx=1000, kv_cache_bytes=8 * GIB).n_tokens == 1024


def test_bytes_are_rounded_down_to_whole_blocks() -> None:
    block = SMALL.block_bytes
    assert size(kv_cache_bytes=16 * block).n_blocks == 16
    assert size(kv_cache_bytes=24 * block - 1).n_blocks == 16
    assert size(kv_cache_bytes=24 * block - 1).n_ctx == 512


def test_n_ctx_may_be_longer_than_the_pool() -> None:
    assert size(kv_cache_bytes=8 * SMALL.block_bytes, n_ctx=4096) == PoolSize(8, 256, 4096, 0)


def test_too_few_bytes_raise_an_error_with_the_minimum() -> None:
    least = 256 * SMALL.token_bytes
    with pytest.raises(ConfigError, match=f"kv_cache_bytes={least - 1} is too little.*takes {least}"):
        size(kv_cache_bytes=least - 1)


def test_more_bytes_than_are_free_raise() -> None:
    with pytest.raises(OutOfMemory, match=f"only {GIB} bytes are free"):
        size(kv_cache_bytes=2 * GIB, free_bytes=GIB)


def test_n_ctx_that_does_not_fit_raises_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory) as refused:
        size(LARGE, n_ctx=131072, free_bytes=16 * GIB)
    for number in (131072, 131072 * LARGE.token_bytes, 16 * GIB, GIB, int(0.9 * 16 * GIB) - GIB):
        assert str(number) in str(refused.value)


def test_weights_that_fill_the_memory_leave_no_pool() -> None:
    with pytest.raises(OutOfMemory, match="leaves 0"):
        size(free_bytes=GIB, other_bytes=GIB)


def test_kv_cache_bytes_is_required_if_free_memory_is_unknown() -> None:
    with pytest.raises(ConfigError, match="give kv_cache_bytes"):
        size(free_bytes=None)
    assert size(free_bytes=None, kv_cache_bytes=GIB).n_tokens == 32768


@settings(deadline=None)
@given(
    st.sampled_from([SMALL, LARGE]),
    st.one_of(st.none(), st.integers(1, 200_000)),
    st.integers(1, 200_000),
    st.integers(1, 300),
    st.integers(0, 64) | st.integers(0, 64 * GIB),
    st.floats(0.01, 1.0),
)
def test_every_pool_is_within_its_limits(
    geometry: Any, n_ctx: int | None, n_ctx_train: int, max_num_seqs: int, free: int, share: float
) -> None:
    try:
        pool = size(
            geometry,
            n_ctx=n_ctx,
            n_ctx_train=n_ctx_train,
            max_num_seqs=max_num_seqs,
            free_bytes=free,
            other_bytes=0,
            memory_utilization=share,
        )
    except OutOfMemory:
        return
    assert pool.n_blocks * geometry.block_size == pool.n_tokens
    assert pool.n_tokens % 256 == 0
    assert 0 < pool.n_tokens * geometry.token_bytes <= free * share
    assert pool.n_ctx == (n_ctx or min(n_ctx_train, pool.n_tokens))
    assert pool.n_ctx <= pool.n_tokens, "one sequence of full length always fits"


# ---- windows ----


def layers_with_windows(window: int, every: int = 6, n: int = 36) -> list[Layer]:
    """Return layers with the window, but for the last of each `every`; 0: all have the window."""
    return [Layer(i, 8, 64, 64, 0 if every and i % every == every - 1 else window, 1) for i in range(n)]


SIX_GROUPS = make_geometry("windows", layers_with_windows(1024))  # 12 KiB a token of a block
IN_WINDOWS = make_geometry("all", layers_with_windows(1024, 0))
WITHOUT = make_geometry("without", layers_with_windows(1024), windows=False)


def test_a_pool_with_windows_fits_more_and_longer_sequences() -> None:
    assert len(SIX_GROUPS.groups) == 6
    whole, some = (
        size(WITHOUT, kv_cache_bytes=4 * GIB, n_ctx=8192),
        size(SIX_GROUPS, kv_cache_bytes=4 * GIB, n_ctx=8192),
    )
    assert 0.99 < some.n_blocks * SIX_GROUPS.block_bytes / (whole.n_blocks * WITHOUT.block_bytes) < 1.01
    assert some.n_sequences == some.n_blocks // SIX_GROUPS.layout(512).peak_blocks(8192)
    assert some.n_sequences >= 3 * whole.n_sequences
    assert some.n_tokens > 5 * whole.n_tokens


def test_n_tokens_is_the_longest_sequence_that_fits() -> None:
    layout = SIX_GROUPS.layout(512)
    for n_blocks in (248, 480, 1000):
        pool = size(SIX_GROUPS, kv_cache_bytes=n_blocks * SIX_GROUPS.block_bytes)
        assert pool.n_blocks == n_blocks
        assert layout.peak_blocks(pool.n_tokens) <= n_blocks < layout.peak_blocks(pool.n_tokens + 1)
        assert pool.n_ctx == min(131072, pool.n_tokens)


def test_a_sequence_in_windows_alone_fits_at_any_length_or_not_at_all() -> None:
    peak = IN_WINDOWS.layout(512).peak_blocks(1 << 20)
    assert peak == (1024 + 512 - 2) // 32 + 2
    pool = size(IN_WINDOWS, kv_cache_bytes=56 * IN_WINDOWS.block_bytes, n_ctx=131072)
    assert (pool.n_blocks, pool.n_ctx, pool.n_sequences) == (56, 131072, 1)
    assert pool.n_tokens > 1 << 30
    less = size(IN_WINDOWS, kv_cache_bytes=48 * IN_WINDOWS.block_bytes, n_ctx=131072)
    assert (less.n_blocks, less.n_sequences) == (48, 0)
    assert less.n_tokens == 48 * 32, "as long as nothing has left the window"


def test_the_default_pool_with_windows_has_room_for_n_ctx() -> None:
    layout = SIX_GROUPS.layout(512)
    for n_ctx in (256, 4096, 131072):
        pool = size(SIX_GROUPS, n_ctx=n_ctx)
        assert pool.n_sequences >= 1
        assert pool.n_tokens >= n_ctx
        assert pool.n_blocks * SIX_GROUPS.block_bytes <= max(
            DEFAULT_BYTES, (layout.peak_blocks(n_ctx) + 8) * SIX_GROUPS.block_bytes
        )
    most = size(SIX_GROUPS, n_ctx=131072, max_num_seqs=1, kv_cache_bytes=32 * GIB)
    assert layout.peak_blocks(131072) <= most.n_blocks < layout.peak_blocks(131072) + 8


def test_the_smallest_pool_has_a_block_for_each_group() -> None:
    many = make_geometry("many", [Layer(i, 8, 64, 64, (i % 12) * 64, 1) for i in range(12)])
    assert len(many.groups) == 12
    least = 2 * 256 * many.slot_bytes
    with pytest.raises(ConfigError, match=f"the smallest pool, 512 tokens of .* takes {least}"):
        size(many, kv_cache_bytes=least - 1)
    assert size(many, kv_cache_bytes=least).n_blocks == 16


@settings(deadline=None)
@given(
    st.sampled_from([SIX_GROUPS, IN_WINDOWS]),
    st.one_of(st.none(), st.integers(1, 200_000)),
    st.integers(1, 200_000),
    st.integers(1, 300),
    st.integers(0, 64) | st.integers(0, 64 * GIB),
    st.sampled_from([1, 100, 512, 4096]),
)
def test_every_pool_with_windows_is_within_its_limits(
    geometry: Geometry, n_ctx: int | None, n_ctx_train: int, max_num_seqs: int, free: int, max_chunk: int
) -> None:
    wanted: dict[str, Any] = {"n_ctx": n_ctx, "n_ctx_train": n_ctx_train, "max_num_seqs": max_num_seqs}
    try:
        pool = size(
            geometry, max_chunk=max_chunk, free_bytes=free, other_bytes=0, memory_utilization=1.0, **wanted
        )
    except OutOfMemory:
        return
    layout = geometry.layout(max_chunk)
    assert pool.n_blocks % geometry.grain_blocks == 0
    assert 0 < pool.n_blocks * geometry.block_bytes <= free
    assert layout.peak_blocks(pool.n_tokens) <= pool.n_blocks
    assert pool.n_ctx == (n_ctx or min(n_ctx_train, pool.n_tokens))
    assert pool.n_ctx <= pool.n_tokens, "one sequence of full length always fits"
    assert pool.n_sequences == pool.n_blocks // layout.peak_blocks(pool.n_ctx) >= 1
