"""Two ends of a store: the engine's pool of blocks, between two steps, and the records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyvelo.kv.adopt import SNAPSHOT, Part
from pyvelo.kv.prefix import ROOT, BlockHashes, BlockLayout
from pyvelo.store.guard import GuardedStore
from pyvelo.store.record import Address

__all__ = ["Identity", "Link"]

# of the engine, which imports this folder
EngineLoop = Any
EngineCore = Any
Context = Any


class Identity(NamedTuple):
    """32 bytes of the model's file, and 32 of all that K and V depend on besides the tokens."""

    model: bytes
    fingerprint: bytes


@dataclass(eq=False)
class Link:
    """Engine and store.

    clock: seconds.
    identity: of the model; None: not known yet, and the store is not in use.
    """

    loop: EngineLoop
    core: EngineCore
    context: Context
    store: GuardedStore
    clock: Callable[[], float]
    identity: Identity | None = None

    @property
    def layout(self) -> BlockLayout:
        layout: BlockLayout = self.core.manager.layout
        return layout

    @property
    def block_bytes(self) -> int:
        n_bytes: int = self.context.info.block_bytes
        return n_bytes

    def address(self, hashes: BlockHashes, part: Part) -> Address:
        """Return where a part of a sequence is stored."""
        if self.identity is None:
            raise RuntimeError("the model is not identified")
        number, group = part
        return Address(
            self.identity.fingerprint,
            hashes.block_hash(number - 1) if number else ROOT,
            hashes.block_hash(number),
            hashes.extra,
            hashes.block_tokens(number),
            group,
            self.block_bytes * (self.layout.state_blocks if group == SNAPSHOT else 1),
        )
