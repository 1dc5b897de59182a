"""The barrier between the nodes of a graph."""

from __future__ import annotations

import pytest

from .lab import meet


@pytest.mark.parametrize("n_threads", [1, 2, 3, 9])
def test_no_thread_leaves_before_all_have_come(n_threads: int) -> None:
    """Some threads are late by more than the others spin, and of nine threads some have no core."""
    meet(n_threads, 2000)
