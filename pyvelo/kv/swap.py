"""Blocks in host memory, where sequences that give way leave their K and V: which of them are free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyvelo.errors import InternalError, OutOfBlocks

__all__ = ["SwapPool"]


class SwapPool:
    """Blocks 0..n_blocks-1, each free or held once. Not thread-safe."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))[::-1]

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Takes `n` blocks, all of them or OutOfBlocks."""
        if n > len(self._free):
            raise OutOfBlocks(f"{n} swap blocks wanted, {len(self._free)} of {self.n_blocks} are free")
        return [self._free.pop() for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back."""
        self._free.extend(reversed(blocks))

    def audit(self, held: Iterable[int]) -> None:
        """Checks that every block is free or held, once, or InternalError."""
        if sorted([*self._free, *held]) != list(range(self.n_blocks)):
            raise InternalError("swap: some block is neither free nor held, or both")
