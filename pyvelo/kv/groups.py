"""Groups of layers that remember alike: which blocks of a sequence each group needs, and how many at most.

A sequence has a block table for each group. A block holds `block_size` tokens for the layers of one group. All
blocks have the same bytes, so a block that the window of one group leaves behind serves any group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["FULL", "BlockLayout", "Window"]


class Window(NamedTuple):
    """Tokens that a query attends: the last `size`, its own included, or those since the last multiple of it.

    `size` 0: all tokens.
    """

    size: int = 0
    chunked: bool = False

    def first_token(self, position: int) -> int:
        """Return the first position that a query at `position` attends."""
        if not self.size:
            return 0
        return position // self.size * self.size if self.chunked else max(0, position - self.size + 1)


FULL = Window()


@dataclass(frozen=True)
class BlockLayout:
    """Block size in tokens, the window of each group, and the most tokens that a sequence computes in a step."""

    block_size: int
    windows: tuple[Window, ...] = (FULL,)
    max_chunk: int = 1 << 31

    @property
    def n_groups(self) -> int:
        return len(self.windows)

    @property
    def is_windowed(self) -> bool:
        """Whether a group frees blocks before the sequence ends."""
        return any(window.size for window in self.windows)

    def blocks_for(self, n_tokens: int) -> int:
        """Return the blocks of `n_tokens` tokens in a group without a window."""
        return -(-n_tokens // self.block_size)

    def first_blocks(self, n_tokens: int) -> tuple[int, ...]:
        """Return the first block that each group still needs after `n_tokens` tokens.

        The last of these tokens may be computed again, for its logits.
        """
        position = max(0, n_tokens - 1)
        return tuple(window.first_token(position) // self.block_size for window in self.windows)

    def most_blocks(self, window: Window, n_blocks: int) -> int:
        """Return the most blocks that a group holds at once for a sequence of `n_blocks` blocks.

        A step needs the window before its first token and its own tokens. These `size + max_chunk` tokens begin
        and end anywhere in a block.
        """
        if not window.size:
            return n_blocks
        return min(n_blocks, (window.size + self.max_chunk - 2) // self.block_size + 2)

    def peak_blocks(self, n_tokens: int) -> int:
        """Return the most blocks that a sequence of `n_tokens` tokens holds at once, over all groups."""
        n_blocks = self.blocks_for(n_tokens)
        return sum(self.most_blocks(window, n_blocks) for window in self.windows)

    def most_tokens(self, n_blocks: int) -> int:
        """Return the tokens of the longest sequence that fits in `n_blocks` blocks."""
        if not self.is_windowed:
            return n_blocks // self.n_groups * self.block_size
        low, high = 0, 1 << 31  # a sequence of windows alone fits at any length, or not at all
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak_blocks(middle) <= n_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def wanted(self, firsts: Sequence[int], n_blocks: int, goal: int) -> int:
        """Return the blocks to reserve for a table of `n_blocks` blocks that shall grow to `goal` blocks.

        Args:
            firsts: the first block that each group holds.
            n_blocks: blocks from the start of the sequence to the end of the table.
            goal: the same after all growth.
        """
        if goal <= n_blocks:
            return 0
        total = 0
        for first, window in zip(firsts, self.windows, strict=True):
            most = self.most_blocks(window, goal)
            total += max(0, min(goal - max(first, n_blocks), most - max(0, n_blocks - first)))
        return total
