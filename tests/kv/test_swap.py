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


def test_audit_sees_a_block_held_twice() -> None:
    pool = SwapPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(InternalError, match="neither free nor held, or both"):
        pool.audit([block, block])
