"""Store whose troubles are misses: calls have a deadline, and one that fails is left alone for a while."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pyvelo.store.base import BlockStore, RecordName, StoreError, StoreStats
from pyvelo.store.record import Address, BadRecord, Codec

__all__ = ["Counts", "GuardedStore"]

_log = logging.getLogger("pyvelo")

T = TypeVar("T")

DEADLINE = 1.0  # seconds of a call
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds


@dataclass
class Counts:
    """Totals since the store was opened. `n_bad`: records that were damaged, or of something else."""

    n_loaded: int = 0
    n_saved: int = 0
    n_bad: int = 0
    n_failures: int = 0


class GuardedStore:
    """Payloads in a store, behind a circuit breaker. No method but `purge` raises an error of the store.

    Calls run in a thread of their own, one after the other. One that fails or takes longer than the deadline
    opens the circuit: until a pause is over, and the late call has ended, each call is a miss at once.

    Args:
        open_store: opens the store, in that thread.
        name: of the store, for the warning.
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
        self._store: BlockStore | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._late: Future[object] | None = None
        self._pause, self._closed_until = 0.0, 0.0
        threading.Thread(target=self._run, name="pyvelo-store", daemon=True).start()

    @property
    def is_away(self) -> bool:
        """Whether a call would be a miss at once."""
        late = self._late is not None and not self._late.done()
        return late or self._clock() < self._closed_until

    def lookup(self, names: Sequence[RecordName]) -> list[bool]:
        """Return for each record whether the store has it."""
        return self._call(lambda store: store.lookup(names), [False] * len(names))

    def load(self, address: Address) -> bytes | None:
        """Return a payload; None: the store does not have it. Delete a record that is not as it should be."""
        name = address.name
        record = self._call(lambda store: store.load(name), None)
        if record is None:
            return None
        try:
            payload = self._codec.unpack(address, record)
        except BadRecord as error:
            self.counts.n_bad += 1
            _log.info("a record of the KV store in %s is deleted: %s", self.name, error)
            self._call(lambda store: store.delete(name), None)
            return None
        self.counts.n_loaded += 1
        return payload

    def save(self, address: Address, payload: bytes) -> None:
        """Save a payload, or lose it."""
        if self.is_away:
            return
        record = self._codec.pack(address, payload)
        name = address.name

        def call(store: BlockStore) -> int:
            store.save(name, record)
            return 1

        self.counts.n_saved += self._call(call, 0)

    def touch(self, names: Sequence[RecordName]) -> None:
        """Note that records were used."""
        self._call(lambda store: store.touch(names), None)

    def stats(self) -> StoreStats:
        """Return the size of the store, unknown if it is away."""
        return self._call(lambda store: store.stats(), StoreStats(None, None))

    def purge(self, tenant: bytes | None = None) -> int:
        """Delete the records of a tenant, or all; return how many.

        Raises:
            StoreError: the store is away.
        """
        return self._ask(lambda store: store.purge(tenant), None)

    def close(self) -> None:
        """Close the store when its last call has ended, without waiting for that."""
        self._calls.put(None)

    # ---- calls ----

    def _call(self, call: Callable[[BlockStore], T], otherwise: T) -> T:
        try:
            return self._ask(call, self._deadline)
        except StoreError:
            return otherwise

    def _ask(self, call: Callable[[BlockStore], T], deadline: float | None) -> T:
        """Return the result of a call; raise StoreError if the store is away, fails or is late."""
        if self.is_away:
            raise StoreError(f"the KV store {self.name} is away")
        future: Future[T] = Future()
        self._calls.put(partial(_answer, future, lambda: call(self._opened())))
        try:
            result = future.result(deadline)
        except FutureTimeoutError as error:
            self._late = future  # type: ignore[assignment]
            self._fail(f"no answer within {deadline:g} s")
            raise StoreError(str(error)) from error
        except (StoreError, OSError) as error:
            self._fail(str(error))
            raise StoreError(str(error)) from error
        self._pause = 0.0
        return result

    def _opened(self) -> BlockStore:
        if self._store is None:
            self._store = self._open()
        return self._store

    def _fail(self, why: str) -> None:
        self.counts.n_failures += 1
        if not self._pause:
            _log.warning("the KV store %s is not used for now: %s", self.name, why)
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._closed_until = self._clock() + self._pause

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
