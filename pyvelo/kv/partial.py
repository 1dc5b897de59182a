"""Partial hits: blocks of the prefix cache of which only the first tokens are the wanted ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

__all__ = ["MAX_SIBLINGS", "PartialHit", "common_tokens", "find_partial_hit"]

MAX_SIBLINGS = 64
"""Blocks that are compared for a partial hit: the newest with the same parent."""


class PartialHit(NamedTuple):
    """Blocks, one of each group, whose first `n_tokens` tokens are the wanted ones."""

    blocks: tuple[int, ...]
    n_tokens: int


def common_tokens(a: bytes, b: bytes) -> int:
    """Return how many int32 at the start of both are equal."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    return ((differing & -differing).bit_length() - 1) // 32 if differing else n // 4


def find_partial_hit(
    siblings: Iterable[tuple[bytes, Sequence[tuple[int, ...]]]], wanted: bytes
) -> PartialHit | None:
    """Return the longest partial hit, of equally long ones the newest.

    Args:
        siblings: tokens, and blocks of each group, of the prefixes with the same parent; the newest first.
        wanted: tokens as int32.
    """
    best: PartialHit | None = None
    for tokens, groups in islice(siblings, MAX_SIBLINGS):
        n_tokens = common_tokens(tokens, wanted)
        if n_tokens > (best.n_tokens if best else 0) and all(groups):
            best = PartialHit(tuple(blocks[0] for blocks in groups), n_tokens)
    return best
