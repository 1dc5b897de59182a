"""Saves: the blocks of requests that have ended, from the pool to the store."""

from __future__ import annotations

import threading
from array import array
from collections import abc, deque
from dataclasses import dataclass, field
from typing import Any

from pyvelo.kv.adopt import Part
from pyvelo.kv.extra import salt_of
from pyvelo.kv.prefix import BlockHashes
from pyvelo.store.link import Link
from pyvelo.store.record import owner_of

__all__ = ["Saves"]

# of the engine, which imports this folder
Request = Any

AT_ONCE = 2  # blocks that are read between two steps
MOST_ENDED = 256  # ended requests whose blocks are to be saved; the oldest are dropped
SHARE = (
    0.012  # of the time that saving may take while requests run; the cores that it shares lose a little more
)


@dataclass(eq=False)
class _End:
    """Sequence whose blocks are to be saved.

    done: set when they are, for a caller that waits. forgotten: they are not to be saved any more.
    parts: its blocks in the pool; None: not looked at yet. missing: the parts that are still to be saved.
    """

    hashes: BlockHashes
    n_blocks: int
    done: threading.Event | None = None
    forgotten: bool = False
    parts: list[Part] | None = None
    missing: list[Part] = field(default_factory=list)


class Saves:
    """Sequences that have ended. A unit of work reads and saves a few blocks.

    Args:
        min_blocks: of a sequence that is saved, though nothing of it was a hit.
    """

    def __init__(self, link: Link, min_blocks: int) -> None:
        self._link, self._min_blocks = link, min_blocks
        self._ended: deque[_End] = deque(maxlen=MOST_ENDED)
        self._urgent: deque[_End] = deque()  # a caller waits for each
        self._current: _End | None = None
        self._not_before = 0.0  # by the clock, unless no request runs
        self.hurries = False
        """Whether saving no longer makes pauses."""

    def __len__(self) -> int:
        return len(self._ended) + len(self._urgent)

    def note_end(self, request: Request) -> bool:
        """Note a request that has ended, in the thread that steps; return whether it is to be saved."""
        n_blocks = request.n_computed // self._link.layout.block_size
        if n_blocks and (n_blocks >= self._min_blocks or request.n_cached):
            n_tokens = n_blocks * self._link.layout.block_size
            self.note(request.hashes.fork(array("i", request.tokens[:n_tokens]), n_tokens), n_tokens)
            return True
        return False

    def note(self, hashes: BlockHashes, n_tokens: int) -> None:
        """Note a sequence whose blocks are to be saved."""
        self._ended.append(_End(hashes, n_tokens // self._link.layout.block_size))

    def note_now(self, hashes: BlockHashes, n_tokens: int) -> threading.Event:
        """Note a sequence that is saved next; return what is set when that is over."""
        done = threading.Event()
        self._urgent.append(_End(hashes, n_tokens // self._link.layout.block_size, done))
        return done

    def forget(self, owner: bytes | None) -> None:
        """Save nothing of an owner, or of all, that has ended before."""
        ends = [*self._urgent.copy(), *self._ended.copy(), *filter(None, [self._current])]
        for end in ends:
            if owner is None or owner == owner_of(salt_of(end.hashes.extra)):
                end.forgotten = True

    def work(self) -> bool:
        """Do a unit of work; return whether there was one that may be done now."""
        if self._link.store.is_late or not (self._urgent or (self._ended and self._may_save())):
            return False
        self._save_next(self._urgent or self._ended)
        return True

    def _may_save(self) -> bool:
        return not self._link.core.n_running or self.hurries or self._link.clock() >= self._not_before

    def _save_next(self, queue: deque[_End]) -> None:
        """Save some blocks of the first sequence of a queue."""
        end, is_over = queue.popleft(), True
        self._current = end
        try:
            is_over = self._save_some(end)
        finally:
            if not is_over:
                queue.appendleft(end)
            elif end.done is not None:
                end.done.set()
            self._current = None

    def _save_some(self, end: _End) -> bool:
        """Save some of the blocks that are not stored; return whether there are no more."""
        if self._link.store.is_full or end.forgotten:
            return True
        if end.parts is None:
            with self._link.loop.visit() as core:
                end.parts = list(core.manager.published_parts(end.hashes, end.n_blocks))
            addresses = [self._link.address(end.hashes, part) for part in end.parts]
            found = self._link.store.lookup_stored(addresses)
            end.missing = [part for part, stored in zip(end.parts, found, strict=True) if not stored]
        parts, end.missing = end.missing[:AT_ONCE], end.missing[AT_ONCE:]
        if parts:
            self._save_parts(end, parts)
        if end.missing:
            return False
        # the first ones were used last, because nothing hits without them
        self._link.store.touch([self._link.address(end.hashes, part) for part in end.parts])
        return True

    def _save_parts(self, end: _End, parts: abc.Sequence[Part]) -> None:
        """Save parts that are still in the pool."""
        hashes = end.hashes
        with self._link.loop.visit() as core:
            start = self._link.clock()
            published = core.manager.published_parts(hashes, parts[-1].number + 1)
            there = [part for part in parts if part in published]
            data = {part: self._link.context.read_blocks(published[part]) for part in there}
        for part, payload in data.items():
            address = self._link.address(hashes, part)
            n_purges = self._link.store.n_purges(address)  # before it is looked at
            if not end.forgotten:
                self._link.store.save(address, payload.tobytes(), n_purges)
        now = self._link.clock()
        self._not_before = now + (now - start) / SHARE  # saving shares the cores with steps
