"""Past batches for replays, and what was cached before the first of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pyvelo.events.feed import Block, Changes

__all__ = ["History"]

MOST_BATCHES = 10_000  # as vLLM
MOST_BYTES = 64 << 20
BYTES_OF_BLOCK = 240  # of a stored block in Python, beside its tokens
BYTES_OF_HASH = 48  # of a removed one


class _Batch(NamedTuple):
    sequence: int
    payload: bytes
    changes: Changes

    @property
    def n_bytes(self) -> int:
        """Memory that it takes, about."""
        tokens = sum(len(block.tokens) for block in self.changes.stored)
        objects = BYTES_OF_BLOCK * len(self.changes.stored) + BYTES_OF_HASH * len(self.changes.removed)
        return len(self.payload) + tokens + objects


class History:
    """Batches by their sequence numbers, the latest ones only, and the blocks before and after them.

    A batch that is dropped changes `before`, so a replay can always begin with a whole listing.

    Args:
        most_batches: 0: without replays, only `now` and the sequence number are needed.
        most_bytes: of payloads and changes.
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
        if self._most_batches:
            batch = _Batch(sequence, payload, changes)
            self._batches.append(batch)
            self._n_bytes += batch.n_bytes
            self._drop_oldest()
        return sequence

    def _drop_oldest(self) -> None:
        """Drop batches beyond the bounds; the last one stays."""
        while len(self._batches) > self._most_batches or (
            self._n_bytes > self._most_bytes and len(self._batches) > 1
        ):
            oldest = self._batches.popleft()
            self._n_bytes -= oldest.n_bytes
            _apply(self._before, oldest.changes)

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
