"""What it costs to get a sequence back that gave way: moving its blocks twice, or computing it again."""

from __future__ import annotations

__all__ = ["Costs"]

WEIGHT = 0.2
"""Of the newest measurement in a running average."""


class Costs:
    """Running averages of what was measured here; until both are known, moving is taken to be cheaper."""

    def __init__(self) -> None:
        self._per_block = 0.0  # seconds to move one between pool and host memory
        self._per_token = 0.0  # seconds to compute one of a prompt

    def moved(self, n_blocks: int, seconds: float) -> None:
        """That many blocks were moved one way."""
        self._per_block = _running_average(self._per_block, seconds / n_blocks, WEIGHT)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """A step of many tokens took so long."""
        self._per_token = _running_average(self._per_token, seconds / n_tokens, WEIGHT)

    def favour_swap(self, n_blocks: int, n_tokens: int) -> bool:
        """Whether a sequence is better moved out and back than computed again."""
        return not self._per_token or 2 * n_blocks * self._per_block <= n_tokens * self._per_token


def _running_average(before: float, now: float, weight: float) -> float:
    """With the newest measurement; `before` is 0 where it is the first."""
    return now if before == 0.0 else before + weight * (now - before)
