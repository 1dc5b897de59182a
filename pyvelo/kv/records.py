"""Plain data that the block manager returns: moves of blocks, events, totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Copy", "Counts", "Event", "EventKind", "Moves"]

EventKind = Literal["stored", "hit", "evicted", "reset", "duplicate", "copied", "swapped"]


class Copy(NamedTuple):
    """Copy of the block `source` to the block `target`."""

    source: int
    target: int


class Moves(NamedTuple):
    """Copies before a step, in this order: swaps to host memory, swaps from it, copies within the pool."""

    outs: list[Copy]
    ins: list[Copy]
    copies: list[Copy]


class Event(NamedTuple):
    """Event of a block.

    `kind`: "stored" (the block became a hit), "hit" (a sequence shares it), "evicted" (it was allocated for
    other tokens), "reset" (it was unpublished), "duplicate" (it was unpublished because another block has its
    tokens), "copied", "swapped" (to host memory).
    """

    kind: EventKind
    block: int


@dataclass
class Counts:
    """Totals since the manager was made."""

    queried: int = 0  # tokens of sequences that started and could have been hits
    hits: int = 0  # tokens of these sequences that were hits
    copies: int = 0  # blocks
    swapped_out: int = 0  # blocks
    swapped_in: int = 0  # blocks
    evictions: int = 0  # blocks
