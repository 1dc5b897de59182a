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

MOST_IN_A_TURN = 1000  # messages to all clients
MOST_TO_A_CLIENT = 200  # of these
LOOK_AGAIN = 1.0  # milliseconds until a client that reads too slowly is tried again
LONGEST_PAUSE = 100.0  # milliseconds, if no client reads

Zmq = Any
Socket = Any
Frames = tuple[bytes, ...]


@dataclass
class _Replay:
    """Replay that goes on with batch `sequence`.

    envelope: frames in front of each reply.
    unsent: message for which the client had no room.
    """

    envelope: Frames
    sequence: int
    unsent: Frames = ()


class Replays:
    """Replays in progress on a ROUTER socket with ROUTER_MANDATORY. Not thread-safe.

    Each client has one replay, and clients take turns. The socket's high-water mark bounds what waits for a
    client that does not read, however often it asks; then its replay pauses.

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
        self._replays: dict[bytes, _Replay] = {}  # by client, the next one first
        self._pause = LOOK_AGAIN
        self.timeout: float | None = None
        """Milliseconds until `go_on` is to be called; None: there is nothing to send."""

    def read(self) -> None:
        """Read requests; a client's later request replaces its earlier one."""
        with suppress(self._zmq.Again):
            while True:
                frames: Sequence[bytes] = self._socket.recv_multipart(self._zmq.NOBLOCK)
                if len(frames) >= 2 and len(frames[-1]) == 8:
                    start = int.from_bytes(frames[-1], "big")
                    self._replays[frames[0]] = _Replay(tuple(frames[:-1]), start)
                    self.timeout = 0.0

    def go_on(self) -> None:
        """Send what the clients have room for, up to MOST_IN_A_TURN messages."""
        n_sent, is_waiting = 0, False
        for client, replay in list(self._replays.items()):
            if n_sent >= MOST_IN_A_TURN:
                break
            del self._replays[client]
            try:
                for _ in range(MOST_TO_A_CLIENT):
                    has_ended = self._send_next(replay)
                    n_sent += 1
                    if has_ended:
                        break
                else:
                    self._replays[client] = replay  # behind the others
            except self._zmq.Again:
                self._replays[client], is_waiting = replay, True
            except self._zmq.ZMQError:  # the client is gone
                pass
        self._pause = LOOK_AGAIN if n_sent else min(2 * self._pause, LONGEST_PAUSE)
        self.timeout = None
        if self._replays:
            self.timeout = self._pause if is_waiting and n_sent < MOST_IN_A_TURN else 0.0

    def _send_next(self, replay: _Replay) -> bool:
        """Send a message of a replay; return whether it was the last one."""
        frames = replay.unsent or self._next(replay)
        replay.unsent = frames  # a listing takes long to make
        self._socket.send_multipart((*replay.envelope, *frames), self._zmq.NOBLOCK)
        replay.unsent = ()
        return frames[1] == END

    def _next(self, replay: _Replay) -> Frames:
        """Return the frames of the next message of a replay, and advance it."""
        history = self._history
        if replay.sequence < history.first_sequence:
            listing = Changes([], list[Block](history.before()), True)
            payload = self._encode(time.time(), listing)
            replay.sequence = history.first_sequence
            return self._topic, sequence_bytes(history.first_sequence - 1), payload
        if replay.sequence < history.next_sequence:
            payload = history.payload(replay.sequence)
            replay.sequence += 1
            return self._topic, sequence_bytes(replay.sequence - 1), payload
        return b"", END, b""
