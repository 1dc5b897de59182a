"""Store whose troubles are misses: calls have a deadline, and one that fails is left alone for a while."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pyvelo.errors import StoreError
from pyvelo.store.base import BlockStore, RecordName, StoreStats
from pyvelo.store.host import HostTier
from pyvelo.store.record import Addressed, BadRecord, Codec

__all__ = ["Counts", "GuardedStore"]

_log = logging.getLogger("pyvelo")

T = TypeVar("T")

DEADLINE = 1.0  # seconds of a call
LONGEST = 600.0  # seconds of a call that the user waits for
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds


@dataclass
class Counts:
    """Totals since the store was opened.

    n_host: payloads that were in host memory. n_bad: records that were damaged, or of something else.
    """

    n_loaded: int = 0
    n_host: int = 0
    n_saved: int = 0
    n_bad: int = 0
    n_failures: int = 0


class _Circuit:
    """Calls of one kind: after one that failed, none is made until a pause is over."""

    def __init__(self, kind: str) -> None:
        self.kind, self.why = kind, ""
        self.closed_until = self._pause = 0.0

    def fail(self, now: float, why: str) -> bool:
        """Begin a pause, twice as long as the one before; return whether it is the first."""
        self.why = why
        is_first = not self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self.closed_until = now + self._pause
        return is_first

    def succeed(self) -> None:
        self._pause = 0.0


@dataclass(eq=False)
class _Late:
    """Call that its caller no longer waits for; `reported`: it counted as a failure."""

    future: Future[object]
    circuit: _Circuit
    since: float
    reported: bool = False


class GuardedStore:
    """Payloads in a store, behind a circuit breaker for reads and one for writes, and in host memory.

    Only methods that say so raise StoreError. Calls run in a thread of their own, one after the other. One
    that fails or takes longer than the deadline opens its circuit: until a pause is over, each call of the
    kind is a miss at once. A caller may wait for less; until its late call has ended, all calls are misses.

    Args:
        open_store: opens the store, in that thread.
        name: of the store, for the warning.
        deadline: seconds of a call.
    """

    def __init__(
        self,
        open_store: Callable[[], BlockStore],
        name: str,
        codec: Codec,
        *,
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.counts = name, Counts()
        self._open, self._codec = open_store, codec
        self._deadline, self._clock = deadline, clock
        self._host = HostTier()
        self._store: BlockStore | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._late: _Late | None = None
        self._reads, self._writes = _Circuit("read"), _Circuit("written")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pyvelo-store", daemon=True)
        self._thread.start()

    @property
    def is_away(self) -> bool:
        """Whether each read would be a miss at once."""
        return not len(self._host) and self._is_away(self._reads)

    @property
    def is_full(self) -> bool:
        """Whether the store takes nothing, because a write failed."""
        return self._closed or self._clock() < self._writes.closed_until

    @property
    def is_late(self) -> bool:
        """Whether a call has not ended in time, and none is made before its end."""
        return self._late is not None and not self._late.future.done()

    def lookup(self, addresses: Sequence[Addressed], deadline: float | None = None) -> list[bool]:
        """Return for each payload whether the store or host memory has it; `deadline`: seconds."""
        names = [self._codec.name(address) for address in addresses]
        in_host = list(map(self._host.has, names, addresses))
        others = [name for name, there in zip(names, in_host, strict=True) if not there]
        found = iter(self._stored(others, deadline))
        return [there or next(found) for there in in_host]

    def lookup_stored(self, addresses: Sequence[Addressed]) -> list[bool]:
        """Return for each payload whether the store itself has it."""
        return self._stored([self._codec.name(address) for address in addresses])

    def n_purges(self, address: Addressed) -> int:
        """Return how often the records of this owner were purged."""
        return self._host.n_purges(self._codec.name(address))

    def load(self, address: Addressed, deadline: float | None = None) -> bytes | None:
        """Return a payload; None: the store does not have it. Delete a record that is not as it should be."""
        try:
            return self.demand(address, deadline)
        except StoreError:
            return None

    def demand(self, address: Addressed, deadline: float | None = None) -> bytes | None:
        """Return a payload as `load` does; raise StoreError if the store is away."""
        name = self._codec.name(address)
        n_purges = self._host.n_purges(name)
        if (payload := self._host.get(name, address)) is not None:
            self.counts.n_host += 1
            return payload
        record = self._ask(self._reads, lambda store: store.load(name), deadline)
        if record is None:
            return None
        try:
            payload = self._codec.unpack(address, record)
        except BadRecord as error:
            self.counts.n_bad += 1
            level = logging.WARNING if address.is_kept else logging.INFO
            _log.log(level, "a record of the KV store in %s is deleted: %s", self.name, error)
            with suppress(StoreError):
                self.delete(address)
            return None
        self.counts.n_loaded += 1
        self._keep(address, name, payload, n_purges)
        return payload

    def save(self, address: Addressed, payload: bytes, n_purges: int | None = None) -> None:
        """Save a payload, or lose it.

        n_purges: of the payload's owner, when it was decided to save it; it is lost after another purge.
        """
        with suppress(StoreError):
            self.insist(address, payload, n_purges)

    def insist(self, address: Addressed, payload: bytes, n_purges: int | None = None) -> bool:
        """Save a payload as `save` does; return whether the store has it.

        Raises:
            StoreError: the store takes none now.
        """
        name, keep = self._codec.name(address), address.is_kept
        before = self._host.n_purges(name) if n_purges is None else n_purges
        self._keep(address, name, payload, before)
        self._check(self._writes)
        record = self._codec.pack(address, payload)

        def call(store: BlockStore) -> bool:
            return before == self._host.n_purges(name) and store.save(name, record, keep)

        saved = self._ask(self._writes, call)
        self.counts.n_saved += saved
        return saved

    def delete(self, address: Addressed) -> None:
        """Delete a payload, if the store has it; raise StoreError if it takes no changes now."""
        name = self._codec.name(address)
        self._host.discard(name)
        self._ask(self._writes, lambda store: store.delete(name))

    def touch(self, addresses: Sequence[Addressed]) -> None:
        """Note that payloads were used, the first ones last."""
        names = [self._codec.name(address) for address in addresses]
        self._host.touch(names)
        with suppress(StoreError):
            self._ask(self._writes, lambda store: store.touch(names))

    def stats(self) -> StoreStats:
        """Return the size of the store, unknown if it is away."""
        try:
            return self._ask(self._reads, lambda store: store.stats())
        except StoreError:
            return StoreStats(None, None)

    def purge(self, owner: bytes | None = None) -> int:
        """Delete the records of an owner, or all, return how many.

        Raises:
            StoreError: the store takes no changes now.
        """
        stored = None if owner is None else self._codec.owner(owner)
        self._host.purge(stored)
        return self._ask(self._writes, lambda store: store.purge(stored), LONGEST)

    def limit_host(self, n_bytes: int) -> None:
        """Set the host memory for the blocks that were saved or loaded last."""
        self._host.limit(n_bytes)

    def close(self) -> None:
        """Close the store when its last call has ended; wait for that until the deadline of a call."""
        self._closed = True
        self._host.purge(None)
        self._calls.put(None)
        self._thread.join(self._deadline)

    def _stored(self, names: Sequence[RecordName], deadline: float | None = None) -> list[bool]:
        try:
            return self._ask(self._reads, lambda store: store.lookup(names), deadline) if names else []
        except StoreError:
            return [False] * len(names)

    def _keep(self, address: Addressed, name: RecordName, payload: bytes, n_purges: int) -> None:
        """Keep a block in host memory; another process may change a record that is no block."""
        if not address.is_kept:
            self._host.put(name, address, payload, n_purges)

    # ---- calls ----

    def _is_away(self, circuit: _Circuit) -> bool:
        late, now = self._late, self._clock()
        if late is None or not self.is_late:
            return self._closed or now < circuit.closed_until
        if now - late.since > self._deadline:
            self._report(late)
        return True

    def _check(self, circuit: _Circuit) -> None:
        if self._is_away(circuit):
            why = "it was closed" if self._closed else circuit.why or "it does not answer"
            raise StoreError(f"the KV store {self.name} is not {circuit.kind} now: {why}")

    def _ask(self, circuit: _Circuit, call: Callable[[BlockStore], T], deadline: float | None = None) -> T:
        """Return the result of a call; raise StoreError if the store is away, fails or is late."""
        self._check(circuit)
        future: Future[T] = Future()
        late = _Late(future, circuit, self._clock())  # type: ignore[arg-type]
        self._calls.put(partial(_answer, future, lambda: call(self._opened())))
        try:
            result = future.result(self._deadline if deadline is None or self._closed else deadline)
        except Exception as error:
            if not future.done():
                self._note_late(late)
                raise StoreError(f"the KV store {self.name} does not answer in time") from error
            why = str(error) or type(error).__name__
            self._fail(circuit, why)
            raise StoreError(f"the KV store {self.name}: {why}") from error
        circuit.succeed()
        return result

    def _note_late(self, late: _Late) -> None:
        self._late = late
        if self._clock() - late.since >= self._deadline:
            self._report(late)
        late.future.add_done_callback(lambda _: self._end_late(late))

    def _end_late(self, late: _Late) -> None:
        if late.future.exception() is not None or self._clock() - late.since > self._deadline:
            self._report(late)

    def _report(self, late: _Late) -> None:
        """Count a late call as a failure, once."""
        if not late.reported:
            late.reported = True
            self._fail(late.circuit, f"no answer within {self._deadline:g} s")

    def _opened(self) -> BlockStore:
        if self._store is None:
            self._store = self._open()
        return self._store

    def _fail(self, circuit: _Circuit, why: str) -> None:
        self.counts.n_failures += 1
        now = self._clock()
        is_known = any(now < other.closed_until for other in (self._reads, self._writes))
        if circuit.fail(now, why) and not is_known:
            _log.warning("the KV store %s is not %s for now: %s", self.name, circuit.kind, why)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        if self._store is not None:
            self._store.close()


def _answer(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
