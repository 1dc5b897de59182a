"""Subscribers as routers have them: a SUB socket, a DEALER socket for replays, and the naive consumer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
import zmq

from pyvelo.events.publisher import Publisher

from .naive import Consumer

WAIT = 60.0
"""Seconds after which something is taken to hang."""


FIELDS = {
    "BlockStored": [
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys"),
    ],
    "BlockRemoved": ["type", "block_hashes", "medium"],
    "AllBlocksCleared": ["type"],
}
"""Fields of events that are arrays."""


class Subscriber:
    """Consumer that notices gaps in the sequence numbers, and asks for a replay then."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        replay: str | None = None,
        topic: str = "",
        options: Mapping[int, int] | None = None,
    ) -> None:
        _open.append(self)  # until its context closes its socket
        self.consumer = Consumer()
        self.sequence: int | None = None
        self.n_gaps = self.n_replayed = 0
        self.batches: list[tuple[int, Any]] = []
        self.topics: set[bytes] = set()
        self._context, self._replay = context, replay
        self.socket = context.socket(zmq.SUB)
        for option, value in {zmq.LINGER: 0, **(options or {})}.items():
            self.socket.setsockopt(option, value)
        self.socket.connect(endpoint)
        self.socket.subscribe(topic)

    def read(self, timeout: float = 0.0) -> bool:
        """Take one message; return whether there was one within `timeout` seconds."""
        if not self.socket.poll(timeout * 1000):
            return False
        topic, sequence, payload = self.socket.recv_multipart()
        self.topics.add(topic)
        self._take(int.from_bytes(sequence, "big"), payload)
        return True

    def until(self, ready: Callable[[], bool]) -> None:
        """Read until a condition holds."""
        deadline = time.monotonic() + WAIT
        while not ready():
            assert time.monotonic() < deadline
            self.read(0.02)

    def until_listed(self) -> None:
        """Wait for the first listing."""
        self.until(lambda: self.sequence is not None)

    def _take(self, sequence: int, payload: bytes) -> None:
        """Take a message; ignore all before the first listing."""
        cleared = {"type": "AllBlocksCleared"}, ["AllBlocksCleared"]
        if self.sequence is None and msgspec.msgpack.decode(payload)[1][0] not in cleared:
            return
        if self.sequence is not None and sequence > self.sequence + 1:
            self.n_gaps += 1
            for number, missed in self.replay(self.sequence + 1):
                if number > self.sequence:
                    self.n_replayed += 1
                    self._apply(number, missed)
        if self.sequence is None or sequence > self.sequence:
            self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        moment, events, rank = msgspec.msgpack.decode(payload)
        assert abs(moment - time.time()) < 600
        assert rank == 0
        self.sequence = sequence
        self.batches.append((sequence, events))
        for event in events:
            named = event if isinstance(event, dict) else dict(zip(FIELDS[event[0]], event, strict=True))
            self.consumer.apply(named)

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the sequence numbers and payloads of past batches."""
        assert self._replay is not None
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        try:
            dealer.connect(self._replay)
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                assert dealer.poll(WAIT * 1000)
                empty, _, sequence, payload = dealer.recv_multipart()
                assert empty == b""
                if sequence == b"\xff" * 8:
                    assert payload == b""
                    return
                yield int.from_bytes(sequence, "big"), payload
        finally:
            dealer.close()


_open: list[Subscriber] = []


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    found: zmq.Context[Any] = zmq.Context()
    yield found
    found.destroy(linger=0)
    _open.clear()


def subscribed(
    context: zmq.Context[Any],
    publisher: Publisher,
    topic: str = "",
    *,
    replay: bool = True,
    options: Mapping[int, int] | None = None,
) -> Subscriber:
    """Return a subscriber that has the first listing."""
    address = publisher.replay_endpoint if replay else None
    found = Subscriber(context, publisher.endpoint, address, topic, options)
    found.until_listed()
    return found
