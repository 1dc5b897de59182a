"""Loads: requests that are held until the blocks of their prompts are in the pool."""

from __future__ import annotations

from array import array
from collections import abc, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from pyvelo.kv.adopt import SNAPSHOT, Part, parts_to_load
from pyvelo.kv.prefix import BlockHashes
from pyvelo.store.link import Link

__all__ = ["Loads"]

# of the engine, which imports this folder
Request = Any
Parent = Any
EngineCore = Any

AT_ONCE = 8  # blocks that are put into the pool between two steps
UNIT = 0.05  # seconds of a unit of loading
MOST_HELD = 1.0  # seconds of a load whose worth is unknown
WEIGHT = 0.2  # of the newest measurement
FORGETTING = 0.9  # factor of a measurement for each load that it prevents


@dataclass(eq=False)
class _Held:
    """Samples of a prompt that wait for its blocks.

    until: time from which on loading would not pay.
    parts: what is to be loaded; None: the pool was not looked at yet. stored: what the store has.
    n_before: blocks that are a hit without loading.
    """

    requests: list[Request]
    hashes: BlockHashes
    n_blocks: int
    until: float
    stored: set[Part] = field(default_factory=set)
    parts: list[Part] | None = None
    n_before: int = 0


class Loads:
    """Held requests, in the order of their arrival. A unit of work is a lookup, or a load of a few blocks.

    tokens_loaded: of all prompts; tokens_from_host: the ones of them that were in host memory.
    ended: all requests arrive, and no others are held.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._new: deque[_Held] = deque()
        self._loading: deque[_Held] = deque()
        self._per_record = 0.0  # seconds to load one
        self.tokens_loaded = self.tokens_from_host = 0
        self.ended = False

    def submit(self, requests: abc.Sequence[Request]) -> bool:
        """Submit requests to the engine or hold them, in the loop's lock; return whether some are held."""
        inbox, at_once, n_held = self._link.core.inbox, list[Request](), 0
        for _, samples in groupby(requests, key=lambda request: id(request.parent)):
            group = list(samples)
            if self._may_load(group[0]):
                inbox.hold(group)
                self._new.append(self._held(group))
                n_held += 1
            else:
                at_once += group
        if at_once:
            inbox.submit(at_once)
        return n_held > 0

    def end(self) -> None:
        """Let all requests arrive, and hold no others."""
        self.ended = True
        for queue in (self._new, self._loading):
            with suppress(IndexError):
                while True:
                    self._let_arrive(queue.popleft())

    def work(self) -> bool:
        """Do a unit of work, new requests first; return whether there was one."""
        if self._new:
            self._advance(self._new, self._look_up)
        elif self._loading:
            self._advance(self._loading, self._load_some)
        else:
            return False
        return True

    def _may_load(self, request: Request) -> bool:
        link = self._link
        if link.identity is None or self.ended or link.store.is_away or not self._n_blocks(request):
            return False
        return request.sequence.table is None and request.sequence.swapped is None

    def _n_blocks(self, request: Request) -> int:
        """Return the full blocks of a prompt that can be a hit: its last token is computed."""
        most = len(request.tokens) - 1
        if request.max_cached is not None:
            most = min(most, request.max_cached)
        return most // self._link.layout.block_size

    def _held(self, requests: list[Request]) -> _Held:
        first, size, now = requests[0], self._link.layout.block_size, self._link.clock()
        n_blocks = self._n_blocks(first)
        hashes = BlockHashes(array("i", first.tokens[: n_blocks * size]), size, first.hashes.extra)
        seconds = self._link.core.costs.seconds_for(n_blocks * size) or MOST_HELD
        if first.params.timeout is not None:
            seconds = min(seconds, first.params.timeout)
        return _Held(requests, hashes, n_blocks, now + seconds)

    def _advance(self, queue: deque[_Held], work: Callable[[_Held], bool]) -> None:
        """Work for the first requests of a queue; let them arrive unless there is more to load."""
        held, goes_on = queue.popleft(), False
        try:
            goes_on = not self._is_over(held) and work(held) and not self._is_over(held)
        finally:
            if goes_on:
                self._loading.append(held) if queue is self._new else self._loading.appendleft(held)
            else:
                self._let_arrive(held)

    def _is_over(self, held: _Held) -> bool:
        """Whether requests need no load any more: it takes too long, or they have ended."""
        ended = all(request.finished or request.parent.aborted for request in held.requests)
        return ended or self.ended or self._link.clock() >= held.until

    def _let_arrive(self, held: _Held) -> None:
        self._link.loop.submit_held(held.requests)

    def _look_up(self, held: _Held) -> bool:
        """Look for the blocks of a prompt in the store; return whether it has some."""
        groups = [*range(self._link.layout.n_groups), *([SNAPSHOT] if self._link.layout.state_blocks else [])]
        parts = [Part(number, group) for number in range(held.n_blocks) for group in groups]
        addresses = [self._link.address(held.hashes, part) for part in parts]
        found = self._link.store.lookup(addresses, held.until - self._link.clock())
        held.stored = {part for part, there in zip(parts, found, strict=True) if there}
        return bool(held.stored)

    def _load_some(self, held: _Held) -> bool:
        """Load some parts of a prompt, and put them into the pool; return whether there are more."""
        if held.parts is None:
            with self._link.loop.visit() as core:
                held.n_before = core.manager.hit_blocks(held.hashes, held.n_blocks)
                held.parts = self._left(core, held)
            return self._pays(held)
        start, payloads, n_before = self._link.clock(), list[bytes](), self._link.store.counts.n_host
        for part in held.parts[:AT_ONCE]:
            now = self._link.clock()
            if now >= held.until or (payloads and now - start >= UNIT):
                break
            payload = self._link.store.load(self._link.address(held.hashes, part), held.until - now)
            if payload is None:
                break
            payloads.append(payload)
        self._measure((self._link.clock() - start) / max(1, len(payloads)))
        n_host = min(len(payloads), self._link.store.counts.n_host - n_before)
        return bool(payloads) and self._adopt(held, payloads, n_host)

    def _pays(self, held: _Held) -> bool:
        """Return whether loading is quicker than computing, as far as both were measured."""
        if not held.parts:
            return False
        n_tokens = self._link.layout.block_size * (held.parts[-1].number + 1 - held.n_before)
        seconds = self._link.core.costs.seconds_for(n_tokens) or MOST_HELD
        held.until = min(held.until, self._link.clock() + seconds)
        if self._per_record * len(held.parts) < seconds:
            return True
        self._per_record *= FORGETTING  # so that a store that was slow once is tried again
        return False

    def _measure(self, per_record: float) -> None:
        self._per_record += (WEIGHT if self._per_record else 1.0) * (per_record - self._per_record)

    def _left(self, core: EngineCore, held: _Held) -> list[Part]:
        """Return the parts that are to be loaded: others may have loaded or computed some."""
        published = core.manager.published_parts(held.hashes, held.n_blocks)
        return parts_to_load(self._link.layout, published, held.stored, held.n_blocks)

    def _adopt(self, held: _Held, payloads: abc.Sequence[bytes], n_host: int) -> bool:
        """Put parts into the pool, `n_host` of them from host memory; return whether more are left."""
        data = np.frombuffer(b"".join(payloads), np.uint8).reshape(-1, self._link.block_bytes)

        def write(blocks: abc.Sequence[int]) -> None:
            self._link.context.write_blocks(blocks, data[: len(blocks)])

        parts = (held.parts or [])[: len(payloads)]
        with self._link.loop.visit() as core:
            n_adopted: int = core.manager.adopt(held.hashes, parts, write)
            n_blocks = core.manager.hit_blocks(held.hashes, held.n_blocks)
            left = self._left(core, held)
        n_tokens = self._link.layout.block_size * max(0, n_blocks - held.n_before)
        self._count(held.requests[0].parent, n_tokens, n_host / len(payloads))
        progress = len(left) < len(held.parts or [])
        held.parts = left
        return n_adopted == len(payloads) and progress and bool(left)

    def _count(self, parent: Parent, n_tokens: int, host_share: float) -> None:
        """Note that `n_tokens` of a prompt are loaded; host_share: of the new ones, by records."""
        n_new = n_tokens - parent.n_loaded - parent.n_host
        n_host = round(n_new * host_share)
        self.tokens_loaded += n_new
        self.tokens_from_host += n_host
        parent.n_host += n_host
        parent.n_loaded += n_new - n_host
