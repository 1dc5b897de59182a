"""Past batches for replays, and what was cached before the first of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pyvelo.events.feed import Block, Changes

__all__ = ["History"]

MOST_BATCHES = 10_000  # as vLLM
MOST_BYTES = 64 << 20


class _Batch(NamedTuple):
    sequence: int
    payload: bytes
    changes: Changes


class History:
    """Batches by their sequence numbers, the latest ones only, and the blocks before and after them.

    A batch that is dropped changes `before`, so a replay can always begin with a whole listing.
    """

    def __init__(self, most_batches: int = MOST_BATCHES, most_bytes: int = MOST_BYTES) -> None:
        self.now: dict[int, Block] = {}
        """Blocks by their hashes after the last batch, each behind its parent."""
        self.next_sequence = 0
        self._before: dict[int, Block] = {}
        self._batches: deque[_Batch] = deque()
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self._n_bytes = 0

    def append(self, payload: bytes, changes: Changes) -> int:
        """Add a batch; return its sequence number."""
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        _apply(self.now, changes)
        self._batches.append(_Batch(sequence, payload, changes))
        self._n_bytes += len(payload)
        while len(self._batches) > self._most_batches or (
            self._n_bytes > self._most_bytes and len(self._batches) > 1
        ):
            oldest = self._batches.popleft()
            self._n_bytes -= len(oldest.payload)
            _apply(self._before, oldest.changes)
        return sequence

    @property
    def first_sequence(self) -> int:
        """Sequence number of the oldest batch that is still here, or of the next one."""
        return self._batches[0].sequence if self._batches else self.next_sequence

    def before(self) -> Iterable[Block]:
        """Return the blocks before the oldest batch, each behind its parent."""
        return self._before.values()

    def payload(self, sequence: int) -> bytes:
        """Return the payload of a batch that is here."""
        return self._batches[sequence - self.first_sequence].payload


def _apply(blocks: dict[int, Block], changes: Changes) -> None:
    """Change a listing of blocks."""
    for each in changes.removed:
        blocks.pop(each, None)
    if changes.clears:
        blocks.clear()
    blocks.update((block.hash, block) for block in changes.stored)
