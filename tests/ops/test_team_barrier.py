"""The barrier between the nodes of a graph."""

from __future__ import annotations

import pytest

from .lab import meet


@pytest.mark.parametrize("n_threads", [1, 2, 3, 9])
def test_nobody_leaves_before_all_have_come(n_threads: int) -> None:
    """Some are late by more than others spin, and at nine threads some have no core."""
    meet(n_threads, 2000)
