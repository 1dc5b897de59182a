"""The pool of host memory allocates all blocks of a request or none, each block once."""

from __future__ import annotations

import pytest

from pyvelo.errors import InternalError, OutOfBlocks
from pyvelo.kv.pool import SwapPool


def test_blocks_are_allocated_and_freed() -> None:
    pool = SwapPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted([*first, *second]) == [0, 1, 2, 3]
    with pytest.raises(OutOfBlocks, match="1 swap blocks wanted, 0 of 4 are free"):
        pool.allocate(1)
    pool.release(first)
    assert pool.n_free == 3
    assert pool.allocate(3) == first
    pool.audit([*first, *second])


def test_growth_of_the_written_memory_is_reported() -> None:
    pool, told = SwapPool(8), list[int]()
    pool.on_growth = told.append
    written: set[int] = set()
    held: list[list[int]] = []
    for n in (2, 3, -1, 2, 1, -2, -1, 4, 0):
        if n < 0:
            pool.release(held.pop(n))
        else:
            held.append(pool.allocate(n))
            written.update(held[-1])
        assert len(written) == (told[-1] if told else 0)
    pool.clear()
    assert set(pool.allocate(8)) == set(range(8))
    assert told == [2, 5, 6, 8]


def test_audit_sees_a_block_held_twice() -> None:
    pool = SwapPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(InternalError, match="neither free nor held, or both"):
        pool.audit([block, block])
