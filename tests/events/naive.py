"""Naive consumer of KV events: a dictionary of block hashes, as a router has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Key(NamedTuple):
    """All tokens of a prefix, and what it depends on beside them."""

    lora: str | None
    salt: str | None
    tokens: tuple[int, ...]


class Consumer:
    """Index of block hashes, rebuilt from events.

    strict: it has seen all events, so what is removed must be there.
    """

    def __init__(self, strict: bool = True) -> None:
        self.keys: dict[int, Key] = {}
        self.strict = strict
        self.block_size = 0

    def apply(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "BlockStored":
            self._store(event)
        elif kind == "BlockRemoved":
            assert event["medium"] == "GPU"
            for number in event["block_hashes"]:
                assert not self.strict or number in self.keys, "only known blocks are removed"
                self.keys.pop(number, None)
        else:
            assert kind == "AllBlocksCleared"
            self.keys.clear()

    def _store(self, event: Mapping[str, Any]) -> None:
        hashes, size = event["block_hashes"], event["block_size"]
        self.block_size, parent = size, event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(hashes) > 0
        assert len(event["extra_keys"]) == len(hashes)
        for at, (number, extra) in enumerate(zip(hashes, event["extra_keys"], strict=True)):
            tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
            before = self.keys[parent] if parent is not None else self._root(event["lora_name"], extra)
            own = [before.lora] if before.lora is not None else []
            own += [before.salt] if before.salt is not None and parent is None else []
            assert extra == (own or None)
            assert before.lora == event["lora_name"]
            assert 0 <= number < 1 << 64
            assert number not in self.keys, "a block is stored once"
            self.keys[number] = before._replace(tokens=before.tokens + tokens)
            parent = number

    def _root(self, lora: str | None, extra: Sequence[str] | None) -> Key:
        salts = [key for key in extra or () if key != lora]
        return Key(lora, salts[0] if salts else None, ())

    def prefixes(self) -> set[Key]:
        """Return all prefixes; two hashes never stand for one."""
        found = set(self.keys.values())
        assert len(found) == len(self.keys)
        return found

    def hit(self, tokens: Sequence[int], lora: str | None = None, salt: str | None = None) -> int:
        """Return the blocks of a prompt that are expected to be a hit, from the first one on."""
        known, size, n = self.prefixes(), self.block_size or 1, 0
        while (n + 1) * size <= len(tokens) and Key(lora, salt, tuple(tokens[: (n + 1) * size])) in known:
            n += 1
        return n
