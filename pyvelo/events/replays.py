"""Replays of past batches to clients, each as fast as it reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pyvelo.events.feed import Block, Changes
from pyvelo.events.history import History
from pyvelo.events.wire import END, sequence_bytes

__all__ = ["Replays"]

MOST_AT_ONCE = 16  # clients; the one that waits longest is dropped
MOST_IN_A_TURN = 200  # messages to a client
LOOK_AGAIN = 10.0  # milliseconds, while clients read too slowly

Zmq = Any
Socket = Any
Frames = tuple[bytes, ...]


@dataclass
class _Replay:
    """Replay that goes on with batch `sequence`. `envelope`: frames in front of each reply."""

    envelope: Frames
    sequence: int


class Replays:
    """Replays in progress on a ROUTER socket with ROUTER_MANDATORY. Not thread-safe.

    A reply has the frames topic, sequence number and payload, and the last one the number END. If the wanted
    batches are gone, a listing comes in front, with the number before the oldest batch.

    Args:
        encode: returns the payload of changes at a time.
    """

    def __init__(
        self,
        zmq: Zmq,
        replay: Socket,
        history: History,
        topic: bytes,
        encode: Callable[[float, Changes], bytes],
    ) -> None:
        self._zmq, self._socket = zmq, replay
        self._history, self._topic, self._encode = history, topic, encode
        self._replays: dict[bytes, _Replay] = {}  # by client
        self.timeout: float | None = None
        """Milliseconds until `go_on` is to be called; None: there is nothing to send."""

    def read(self) -> None:
        """Read requests; a client's later request replaces its earlier one."""
        with suppress(self._zmq.Again):
            while True:
                frames: Sequence[bytes] = self._socket.recv_multipart(self._zmq.NOBLOCK)
                if len(frames) >= 2 and len(frames[-1]) == 8:
                    self._replays.pop(frames[0], None)
                    start = int.from_bytes(frames[-1], "big")
                    self._replays[frames[0]] = _Replay(tuple(frames[:-1]), start)
                    if len(self._replays) > MOST_AT_ONCE:
                        del self._replays[next(iter(self._replays))]
                    self.timeout = 0.0

    def go_on(self) -> None:
        """Send what the clients have room for."""
        self.timeout = None
        for client, replay in list(self._replays.items()):
            try:
                if self._send_some(replay):
                    del self._replays[client]
                else:
                    self.timeout = 0.0
            except self._zmq.Again:
                self.timeout = LOOK_AGAIN if self.timeout is None else self.timeout
            except self._zmq.ZMQError:  # it is gone
                del self._replays[client]

    def _send_some(self, replay: _Replay) -> bool:
        """Send some batches; return whether these were all."""
        history = self._history
        for _ in range(MOST_IN_A_TURN):
            if replay.sequence < history.first_sequence:
                listing = Changes([], list[Block](history.before()), True)
                payload = self._encode(time.time(), listing)
                self._send(replay, self._topic, sequence_bytes(history.first_sequence - 1), payload)
                replay.sequence = history.first_sequence
            elif replay.sequence < history.next_sequence:
                payload = history.payload(replay.sequence)
                self._send(replay, self._topic, sequence_bytes(replay.sequence), payload)
                replay.sequence += 1
            else:
                self._send(replay, b"", END, b"")
                return True
        return False

    def _send(self, replay: _Replay, *frames: bytes) -> None:
        self._socket.send_multipart((*replay.envelope, *frames), self._zmq.NOBLOCK)
