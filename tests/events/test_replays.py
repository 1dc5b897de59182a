"""Replays to clients that read slowly, or not at all, on a socket whose room the test sets."""

from __future__ import annotations

from collections import Counter, deque

import pytest
import zmq

from pyvelo.events import replays as module
from pyvelo.events.feed import Block, Changes, Identity
from pyvelo.events.history import History
from pyvelo.events.replays import Replays
from pyvelo.events.wire import END, sequence_bytes


class Router:
    """Socket with room for some messages to each client; a client that is gone has None."""

    def __init__(self) -> None:
        self.room: dict[bytes, int | None] = {}
        self.requests: deque[list[bytes]] = deque()
        self.sent: list[tuple[bytes, bytes, bytes]] = []

    def recv_multipart(self, _: int) -> list[bytes]:
        if not self.requests:
            raise zmq.Again
        return self.requests.popleft()

    def send_multipart(self, frames: tuple[bytes, ...], _: int) -> None:
        client, empty, topic, sequence, payload = frames
        room = self.room[client]
        if room is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if room == 0:
            raise zmq.Again
        assert (empty, topic) == (b"", b"" if sequence == END else b"kv")
        self.room[client] = room - 1
        self.sent.append((client, sequence, payload))

    def ask(self, client: bytes, start: int = 0) -> None:
        self.requests.append([client, b"", sequence_bytes(start)])


class Bench:
    """Replays of a history of so many batches."""

    def __init__(self, n_batches: int, **bounds: int) -> None:
        self.router, self.n_encoded = Router(), 0
        self.history = History(**bounds)
        for number in range(n_batches):
            block = Block(number, None, b"", Identity(None, None))
            self.history.append(b"%d" % number, Changes([], [block], False))
        self.replays = Replays(zmq, self.router, self.history, b"kv", self.encode)

    def encode(self, _: float, changes: Changes) -> bytes:
        self.n_encoded += 1
        return b"listing of %d" % len(changes.stored)

    def turn(self) -> None:
        self.replays.read()
        self.replays.go_on()

    def finish(self) -> None:
        for _ in range(1000):
            if self.replays.timeout is None:
                return
            self.replays.go_on()
        raise AssertionError("a replay did not end")


def test_a_client_that_does_not_read_gets_no_more_however_often_it_asks() -> None:
    bench = Bench(50)
    bench.router.room[b"a"] = 8
    for _ in range(20):
        bench.router.ask(b"a")
        bench.turn()
    assert len(bench.router.sent) == 8
    assert len(bench.replays._replays) == 1
    bench.router.sent, bench.router.room[b"a"] = [], 1000
    bench.finish()
    sequences = [sequence for _, sequence, _ in bench.router.sent]
    assert sequences == [*map(sequence_bytes, range(50)), END]


def test_a_client_that_does_not_read_stops_no_other_and_costs_ever_less() -> None:
    bench = Bench(50)
    bench.router.room |= {b"a": 3, b"b": 1000}
    bench.router.ask(b"a")
    bench.router.ask(b"b")
    bench.turn()
    assert Counter(client for client, _, _ in bench.router.sent) == {b"a": 3, b"b": 51}
    pauses = []
    for _ in range(12):
        pauses.append(bench.replays.timeout)
        bench.replays.go_on()
    assert pauses[0] == module.LOOK_AGAIN
    assert pauses[-1] == module.LONGEST_PAUSE
    bench.router.room[b"a"] = 1
    bench.replays.go_on()
    assert bench.replays.timeout == module.LOOK_AGAIN
    bench.router.room[b"a"] = None
    bench.replays.go_on()
    assert bench.replays.timeout is None


def test_all_clients_reach_the_end_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IN_A_TURN", 30)
    monkeypatch.setattr(module, "MOST_TO_A_CLIENT", 10)
    bench, clients = Bench(50), [b"%d" % n for n in range(40)]
    for client in clients:
        bench.router.room[client] = 1000
        bench.router.ask(client)
    bench.turn()
    assert len(bench.router.sent) == 30
    bench.finish()
    for client in clients:
        mine = [sequence for name, sequence, _ in bench.router.sent if name == client]
        assert mine == [*map(sequence_bytes, range(50)), END]
    firsts = [client for client, _, _ in bench.router.sent[::10]]
    assert firsts[:40] == clients


def test_a_listing_without_room_is_made_once() -> None:
    bench = Bench(10, most_batches=4)
    bench.router.room[b"a"] = 0
    bench.router.ask(b"a")
    bench.turn()
    for _ in range(5):
        bench.replays.go_on()
    assert bench.n_encoded == 1
    bench.router.room[b"a"] = 1000
    bench.finish()
    assert [payload for _, _, payload in bench.router.sent] == [b"listing of 6", b"6", b"7", b"8", b"9", b""]
