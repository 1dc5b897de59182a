"""Bytes of KV events: MessagePack, as vLLM sends them.

A batch is an array of the time in seconds, the events and the data-parallel rank, which is 0 here. An event
is a map with its name under "type" ("map", vLLM since 0.24), or an array that begins with the name ("array",
vLLM before).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyvelo.events.feed import Block, Changes

__all__ = ["END", "batch_bytes", "chains", "events_of", "sequence_bytes"]

MEDIUM = "GPU"  # vLLM's word for blocks that hit without a transfer; consumers score other words lower
RANK = 0
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number that ends a replay."""

Event = dict[str, Any]


def sequence_bytes(sequence: int) -> bytes:
    """Return a sequence number as 8 bytes, the highest first."""
    return sequence.to_bytes(8, "big")


def batch_bytes(encode: Callable[[Any], bytes], time: float, events: Iterable[Event], encoding: str) -> bytes:
    """Return the bytes of a batch.

    Args:
        encode: MessagePack encoder.
        encoding: "map" or "array".
    """
    found: list[Any] = list(events)
    if encoding == "array":
        found = [list(event.values()) for event in found]
    return encode([time, found, RANK])


def events_of(changes: Changes, block_size: int) -> Iterator[Event]:
    """Yield the events of changes: what is removed first, then what is stored, each after its parent."""
    if changes.removed:
        yield {"type": "BlockRemoved", "block_hashes": changes.removed, "medium": MEDIUM}
    if changes.clears:
        yield {"type": "AllBlocksCleared"}
    for chain in chains(changes.stored):
        yield _stored(chain, block_size)


def chains(blocks: Iterable[Block]) -> list[list[Block]]:
    """Return blocks as lists in which each block follows the one before it.

    A block's parent is in the same list or in an earlier one, if it is among the blocks.
    """
    found: list[list[Block]] = []
    ends: dict[int, list[Block]] = {}
    for block in blocks:
        chain = ends.pop(block.parent, None) if block.parent is not None else None
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(block)
        ends[block.hash] = chain
    return found


def _stored(chain: list[Block], block_size: int) -> Event:
    """Return the event of a chain. Its fields are in the order that the array has."""
    lora, salt = chain[0].identity
    tokens = array("i")
    tokens.frombytes(b"".join(block.tokens for block in chain))
    of_all = [lora] if lora is not None else []
    extra_keys = [list(of_all) for _ in chain]
    if salt is not None and chain[0].parent is None:  # as vLLM: the first block's alone
        extra_keys[0].append(salt)
    return {
        "type": "BlockStored",
        "block_hashes": [block.hash for block in chain],
        "parent_block_hash": chain[0].parent,
        "token_ids": tokens.tolist(),
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": lora,
        "extra_keys": [keys or None for keys in extra_keys],
    }
