"""Thread that publishes batches over ZMQ: a PUB socket for subscribers and a ROUTER socket for replays."""

from __future__ import annotations

import errno
import importlib.util
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from pyvelo.errors import ConfigError
from pyvelo.events.addresses import check_path
from pyvelo.events.feed import Changes
from pyvelo.events.history import History
from pyvelo.events.replays import Replays
from pyvelo.events.wire import batch_bytes, events_of, sequence_bytes
from pyvelo.finalizer import Finalizer
from pyvelo.kv_events import KVEvents

__all__ = ["Publisher"]

_log = logging.getLogger("pyvelo")

MOST_QUEUED = 1000  # steps whose changes wait for the thread; later steps are merged
MOST_UNSENT = 1000  # batches that wait for a slow subscriber; it loses later ones
MOST_UNSENT_REPLAY = 8  # batches that wait for a slow client of a replay, which pauses then
LISTED_AT_ONCE = 1024  # blocks in a batch of a listing
LISTING_PAUSE = 1.0  # seconds between two listings for new subscribers
CLOSING = 2.0  # seconds that the thread has to publish the rest
WORK, STOP = b"\1", b"\0"

Zmq = Any
Socket = Any


class _Item(NamedTuple):
    time: float
    changes: Changes


class Publisher:
    """Open sockets and the thread that uses them.

    A new subscriber makes the thread publish a listing of all blocks, which begins with AllBlocksCleared. So
    each subscriber knows everything, however late it joined.

    endpoint, replay_endpoint: addresses with the port in use; no replay: None.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """

    def __init__(self, settings: KVEvents, history: History | None = None) -> None:
        for module, package in (("zmq", "pyzmq"), ("msgspec", "msgspec")):
            if importlib.util.find_spec(module) is None:
                raise ConfigError(f"kv_events needs {package}: pip install 'pyvelo[events]'")
        import msgspec
        import zmq

        self._zmq: Zmq = zmq
        self._settings = settings
        self._history = history or (History() if settings.replay is not None else History(most_batches=0))
        self._encode = msgspec.msgpack.Encoder().encode
        self._queue: deque[_Item] = deque()
        self._is_awake = self._is_starved = False
        self._listing_at: float | None = None  # a listing is to be published then
        self._listed = float("-inf")
        self.block_size = 0
        self.on_room: Callable[[], object] = lambda: None
        """Called by the thread when the queue was full and has room again."""
        self._context = zmq.Context()
        self._sockets: list[Socket] = []
        try:
            self._publish = self._open(zmq.XPUB, settings.endpoint, {"XPUB_VERBOSE": 1})
            self._replays: Replays | None = None
            if settings.replay is not None:
                options = {"ROUTER_MANDATORY": 1, "SNDHWM": MOST_UNSENT_REPLAY}
                replay = self._open(zmq.ROUTER, settings.replay, options)
                topic = settings.topic.encode()
                self._replays = Replays(zmq, replay, self._history, topic, self._payload)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._publish.last_endpoint.decode()
        self.replay_endpoint = None if self._replays is None else self._sockets[-1].last_endpoint.decode()
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._finalizer: Finalizer | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pyvelo-kv-events", daemon=True)
        self._thread.start()

    def close_with(self, owner: object) -> None:
        """End the thread soon after `owner` is dropped, if `close` was not called."""
        self._finalizer = Finalizer(owner, partial(self._bell.send, STOP))

    # ---- for the thread that steps, which never waits ----

    @property
    def has_room(self) -> bool:
        """Whether `put` may be called; if not, `on_room` will be called."""
        if len(self._queue) < MOST_QUEUED:
            return True
        self._is_starved = True
        self._wake()
        return False

    def put(self, changes: Changes) -> None:
        """Let the thread publish changes."""
        self._queue.append(_Item(time.time(), changes))
        self._wake()

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            with suppress(OSError):  # it is closed, or its buffer is full
                self._bell.send(WORK)

    def close(self) -> None:
        """Publish what is in the queue, for at most two seconds, and close the sockets."""
        if not self._closed:
            self._closed = True
            if self._finalizer is not None:
                self._finalizer.detach()
            with suppress(OSError):  # the thread has ended
                self._bell.send(STOP)
            self._thread.join(CLOSING)

    # ---- sockets ----

    def _open(self, kind: int, address: str, options: dict[str, int]) -> Socket:
        """Return a socket that is bound to an address."""
        zmq = self._zmq
        check_path(address)
        opened = self._context.socket(kind)
        settings = {"LINGER": 0, "SNDHWM": MOST_UNSENT, "TCP_KEEPALIVE": 1, "IPV6": int("[" in address)}
        for name, value in {**settings, **options}.items():
            opened.setsockopt(getattr(zmq, name), value)
        try:
            opened.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"kv_events: {address} cannot be used: {_reason(error)}") from error
        self._sockets.append(opened)
        return opened

    # ---- for the thread ----

    def _run(self) -> None:
        try:
            poller = self._zmq.Poller()
            for each in (*self._sockets, self._ear):
                poller.register(each, self._zmq.POLLIN)
            while self._turn(dict(poller.poll(self._timeout()))):
                pass
        except Exception as error:  # the engine goes on without events
            _log.warning("KV events ended: %s", error)
        finally:
            self._context.destroy(linger=0)
            if self._finalizer is not None:
                self._finalizer.detach()  # it would ring a bell that is closed
            self._ear.close()
            self._bell.close()

    def _timeout(self) -> float | None:
        """Return the milliseconds until there is something to do; None: there is nothing."""
        found = [] if self._listing_at is None else [max(0.0, self._listing_at - time.monotonic()) * 1000]
        if self._replays is not None and self._replays.timeout is not None:
            found.append(self._replays.timeout)
        return min(found, default=None)

    def _turn(self, ready: dict[Any, int]) -> bool:
        """Do what is to do now; return False at the end."""
        going = True
        if self._ear.fileno() in ready:
            heard = self._ear.recv(16)
            going = bool(heard) and STOP not in heard
            self._is_awake = False  # before the queue is read
        while self._queue:
            item = self._queue.popleft()
            self._send(item.time, item.changes)
        if self._publish in ready:
            self._note_subscribers()
        if self._listing_at is not None and time.monotonic() >= self._listing_at:
            self._list_all()
        if self._replays is not None:
            if self._sockets[-1] in ready:
                self._replays.read()
            self._replays.go_on()
        if self._is_starved and going:
            self._is_starved = False
            self.on_room()
        return going

    def _send(self, when: float, changes: Changes) -> None:
        """Publish changes as the next batch."""
        payload = self._payload(when, changes)
        sequence = self._history.append(payload, changes)
        with suppress(self._zmq.Again):
            frames = (self._settings.topic.encode(), sequence_bytes(sequence), payload)
            self._publish.send_multipart(frames, self._zmq.NOBLOCK)

    def _payload(self, when: float, changes: Changes) -> bytes:
        events = events_of(changes, self.block_size)
        return batch_bytes(self._encode, when, events, self._settings.encoding)

    def _note_subscribers(self) -> None:
        """Read subscriptions; plan a listing for new ones to our topic."""
        with suppress(self._zmq.Again):
            while True:
                message = self._publish.recv(self._zmq.NOBLOCK)
                if message[:1] == b"\1" and self._settings.topic.encode().startswith(message[1:]):
                    soon = max(time.monotonic(), self._listed + LISTING_PAUSE)
                    self._listing_at = soon if self._listing_at is None else self._listing_at

    def _list_all(self) -> None:
        """Publish all blocks, as if they were removed and stored again."""
        self._listing_at, self._listed = None, time.monotonic()
        blocks = list(self._history.now.values())
        for first in range(0, len(blocks) or 1, LISTED_AT_ONCE):
            self._send(time.time(), Changes([], blocks[first : first + LISTED_AT_ONCE], first == 0))


def _reason(error: Any) -> str:
    """Return in words why an address cannot be bound."""
    reasons = {
        errno.EADDRINUSE: "the port is in use: choose another one",
        errno.EADDRNOTAVAIL: "this machine does not have the address",
        errno.ENODEV: "this machine does not have the address",
        errno.EACCES: "this user may not open it",
    }
    return reasons.get(error.errno, str(error))
