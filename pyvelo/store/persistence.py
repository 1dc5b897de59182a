"""KV blocks that outlive the process: they are loaded before a request arrives, and saved when it has ended.

A request whose prompt may be in the store is held until a thread has read its blocks. The thread puts them
into the pool between two steps, as cached blocks; then the request arrives and finds a prefix hit like any
other. When a request ends, the thread reads its blocks from the pool, between two steps, and saves them.
It does so in small units of work: lookups of new requests first, then loads, then saves.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import abc
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from pyvelo.errors import StoreError, VeloError
from pyvelo.kv.prefix import BlockHashes
from pyvelo.store.base import StoreTotals
from pyvelo.store.guard import GuardedStore
from pyvelo.store.link import Identity, Link
from pyvelo.store.loads import Loads
from pyvelo.store.saves import Saves

__all__ = ["Persistence"]

_log = logging.getLogger("pyvelo")

Request = Any  # of the engine, which imports this folder

CLOSING = 5.0  # seconds that saving may take when an engine is closed
LAST_CALL = 2.0  # seconds to wait for a call of the store, so that another engine may write to it
LOOK_AGAIN = 0.005  # seconds
LONGEST_PAUSE = 0.1  # seconds; saving goes on sooner if no request runs any more


class Persistence:
    """Place between the callers of a loop and its core that holds requests while their blocks are loaded.

    Args:
        link: its store becomes this object's own.
        identify: returns what the model is, in the thread, because it may read the whole file.
        min_blocks: of a sequence that is saved, though nothing of it was a hit.
    """

    def __init__(self, link: Link, identify: Callable[[], Identity], min_blocks: int) -> None:
        self._link = link
        self._loads, self._saves = Loads(link), Saves(link, min_blocks)
        self._identified, self._stopped = threading.Event(), threading.Event()
        if link.identity is not None:
            self._identified.set()
        self._busy = False
        self.wake: SimpleQueue[bool] = SimpleQueue()
        """True: there is something to do; False: end. A put is a call of C, for finalizers."""
        target = (weakref.ref(self), link.store, self.wake, self._stopped, identify)
        self._thread = threading.Thread(target=_run, args=target, name="pyvelo-persistence", daemon=True)
        self._thread.start()
        _open.add(self)

    def submit(self, requests: abc.Sequence[Request]) -> None:
        """Submit requests, at once or when their blocks are loaded. The loop calls it in its lock."""
        for request in requests:
            request.on_end = _both(self._note_end, request.on_end)
        if self._loads.submit(requests):
            self.wake.put(True)

    def release(self) -> None:
        """Let the held requests arrive, and hold no others."""
        if not self._link.loop.home.left:
            self._loads.end()

    def stop(self) -> None:
        """End the thread soon, and let the held requests arrive; may be called again."""
        self._stopped.set()
        self.wake.put(False)
        self._loads.end()

    def close(self, timeout: float = CLOSING) -> None:
        """Save what is still to be saved, for at most `timeout` seconds; then stop."""
        if not self._link.loop.home.left:  # a forked process has not the thread
            self._saves.hurries = True
            self.flush(timeout)
            self.stop()
            if threading.current_thread() is not self._thread and not self.is_identifying:
                self._thread.join(LAST_CALL)

    def flush(self, timeout: float) -> bool:
        """Wait until the blocks of all ended requests are saved, and return whether they are."""
        deadline, store = time.monotonic() + timeout, self.store
        while (len(self._saves) or self._busy) and self._thread.is_alive() and not self._stopped.is_set():
            is_useless = store.is_full or not (self.ready or self.is_identifying)
            if is_useless or time.monotonic() >= deadline or self._link.loop.guard.interrupted:
                return False
            self._stopped.wait(LOOK_AGAIN)
        return not len(self._saves)

    @property
    def store(self) -> GuardedStore:
        return self._link.store

    @property
    def ready(self) -> bool:
        """Whether the model is identified, so that the store is in use."""
        return self._link.identity is not None

    @property
    def is_identifying(self) -> bool:
        """Whether the model's file is still being read."""
        return not self._identified.is_set()

    @property
    def identity(self) -> Identity:
        """What the model is; wait until its file is read. Raise StoreError if it cannot be, or was closed."""
        while not self._identified.wait(LOOK_AGAIN) and not self._stopped.is_set():
            self._link.loop.guard.raise_hit()
        if self._link.identity is None:
            raise StoreError(f"the KV store {self.store.name} is not in use")
        return self._link.identity

    @property
    def totals(self) -> StoreTotals:
        """Totals since the store was opened."""
        counts, loads = self.store.counts, self._loads
        failures = counts.n_failures + counts.n_bad
        return StoreTotals(loads.tokens_loaded, loads.tokens_from_host, counts.n_saved, failures)

    def save(self, hashes: BlockHashes, n_tokens: int, timeout: float) -> None:
        """Save the blocks of a sequence that are in the pool; wait for that, for at most `timeout` seconds.

        hashes: of the sequence, the caller's own.
        """
        done, deadline = self._saves.note_now(hashes, n_tokens), time.monotonic() + timeout
        self.wake.put(True)
        while not done.wait(LOOK_AGAIN) and not self._stopped.is_set() and time.monotonic() < deadline:
            self._link.loop.guard.raise_hit()

    def purge(self, owner: bytes | None) -> int:
        """Delete the records of an owner, or all, and save nothing of what has ended; return how many.

        Raises:
            StoreError: the store takes no changes now.
        """
        self._saves.forget(owner)
        return self.store.purge(owner)

    def _note_end(self, request: Request) -> None:
        if not self._stopped.is_set() and self._saves.note_end(request):
            self.wake.put(True)

    # ---- for the thread ----

    def set_identity(self, identity: Identity | None) -> None:
        """Begin to use the store; None: the model's file cannot be read."""
        self._link.identity = identity
        self._identified.set()

    def work(self) -> float | None:
        """Load and save what may be done now; return the seconds until there is more, None for never."""
        self._busy = True
        try:
            while not self._stopped.is_set():
                try:
                    if not (self._loads.work() or self._saves.work()):
                        break
                except VeloError:
                    pass  # the engine is closed or broken: the requests will say so
                except Exception as error:  # such as no memory for a copy
                    _log.warning("blocks were not loaded from or saved to %s: %s", self.store.name, error)
        finally:
            self._busy = False
        return LONGEST_PAUSE if len(self._saves) else None


def _both(
    first: Callable[[Request], None], second: Callable[[Request], None] | None
) -> Callable[[Request], None]:
    def call(request: Request) -> None:
        first(request)
        if second is not None:
            second(request)

    return call


def _run(
    owner: weakref.ref[Persistence],
    store: GuardedStore,
    wake: SimpleQueue[bool],
    stopped: threading.Event,
    identify: Callable[[], Identity],
) -> None:
    """Work when woken, until the end; an engine that is dropped meanwhile is freed."""
    try:
        identity = identify()
    except Exception as error:
        _log.warning("the KV store %s is not used: %s", store.name, error)
        identity = None
    if (persistence := owner()) is not None:
        persistence.set_identity(identity)
    del persistence
    pause = None
    while not stopped.is_set():
        with suppress(Empty):
            if not wake.get(timeout=pause):
                break
        if (persistence := owner()) is None:
            break
        pause = persistence.work()
        del persistence
    store.close()


_open: weakref.WeakSet[Persistence] = weakref.WeakSet()


def _flush_all() -> None:
    """Save what a program that ends has not saved, as `close` does."""
    for persistence in list(_open):
        persistence.close()


atexit.register(_flush_all)
