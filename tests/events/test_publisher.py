"""The sockets: subscribers that join late, lose messages or hang; replays; bytes as vLLM documents them."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from pyvelo.config import EngineConfig, KVEvents
from pyvelo.errors import ConfigError
from pyvelo.events import publisher as module
from pyvelo.events.connection import is_local, publishing
from pyvelo.events.feed import Block, Changes, Identity
from pyvelo.events.history import History
from pyvelo.events.publisher import Publisher

from .naive import Consumer, Key
from .subscribers import WAIT, Subscriber, subscribed

SIZE = 4
PLAIN = Identity(None, None)


def blocks_of(*numbers: int, parent: int | None = None, identity: Identity = PLAIN) -> list[Block]:
    """Return blocks, each after the one before, whose tokens are their numbers."""
    found = []
    for number in numbers:
        found.append(Block(number, parent, number.to_bytes(4, "little") * SIZE, identity))
        parent = number
    return found


def stored(*numbers: int, parent: int | None = None) -> Changes:
    return Changes([], blocks_of(*numbers, parent=parent), False)


def removed(*numbers: int) -> Changes:
    return Changes(list(numbers), [], False)


@contextmanager
def published(history: History | None = None, **settings: Any) -> Iterator[Publisher]:
    given = {"endpoint": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", **settings}
    publisher = Publisher(KVEvents(**given), history)
    publisher.block_size = SIZE
    try:
        yield publisher
    finally:
        publisher.close()
        assert not publisher._thread.is_alive()


def test_two_subscribers_know_the_same(context: zmq.Context[Any]) -> None:
    with published() as publisher:
        two = [subscribed(context, publisher), subscribed(context, publisher)]
        publisher.put(stored(1, 2, 3))
        publisher.put(removed(3))
        publisher.put(stored(4, parent=2))
        for each in two:
            each.until(lambda each=each: set(each.consumer.keys) == {1, 2, 4})
            assert each.n_gaps == 0
        assert two[0].consumer.keys == two[1].consumer.keys


def test_one_that_joins_late_gets_a_listing(context: zmq.Context[Any], monkeypatch: Any) -> None:
    """It needs no replay, and the listing changes nothing for the others."""
    monkeypatch.setattr(module, "LISTED_AT_ONCE", 3)
    monkeypatch.setattr(module, "LISTING_PAUSE", 0.0)
    with published(replay=None) as publisher:
        first = subscribed(context, publisher, replay=False)
        publisher.put(stored(*range(1, 8)))
        publisher.put(removed(7))
        first.until(lambda: set(first.consumer.keys) == set(range(1, 7)))
        late = subscribed(context, publisher, replay=False)
        late.until(lambda: set(late.consumer.keys) == set(range(1, 7)))
        assert [len(events) for _, events in late.batches] == [2, 1]
        first.until(lambda: first.sequence == late.sequence)
        assert first.consumer.keys == late.consumer.keys


def test_listings_have_a_pause_between_them(context: zmq.Context[Any]) -> None:
    with published() as publisher:
        crowd = [Subscriber(context, publisher.endpoint) for _ in range(20)]
        for each in crowd:
            each.until_listed()
        assert publisher._history.next_sequence <= 4


def test_another_topic_gets_nothing(context: zmq.Context[Any]) -> None:
    with published(topic="kv@a@demo") as publisher:
        mine = subscribed(context, publisher, topic="kv@")
        other = Subscriber(context, publisher.endpoint, topic="kv@b")
        publisher.put(stored(1))
        mine.until(lambda: 1 in mine.consumer.keys)
        assert mine.topics == {b"kv@a@demo"}
        assert not other.read(0.05)


def test_a_replay_begins_anywhere(context: zmq.Context[Any]) -> None:
    with published() as publisher:
        follower = subscribed(context, publisher)
        for number in range(1, 10):
            publisher.put(stored(number))
        follower.until(lambda: 9 in follower.consumer.keys)
        last = publisher._history.next_sequence - 1
        for start in (0, 3, last, last + 1, last + 100):
            assert [number for number, _ in follower.replay(start)] == list(range(start, last + 1))


def test_a_request_may_lack_the_empty_frame_and_bad_ones_are_ignored(context: zmq.Context[Any]) -> None:
    with published() as publisher:
        follower = subscribed(context, publisher)
        publisher.put(stored(1))
        follower.until(lambda: 1 in follower.consumer.keys)
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(publisher.replay_endpoint)
            for bad in ([b""], [b"", b"12"], [b"x" * 9], [b"a", b"b", b"c"]):
                dealer.send_multipart(bad)
            dealer.send((0).to_bytes(8, "big"))
            assert dealer.poll(WAIT * 1000)
            assert [len(frame) for frame in dealer.recv_multipart()][:2] == [0, 8]


def test_after_the_oldest_batch_a_replay_begins_with_a_listing(context: zmq.Context[Any]) -> None:
    """However much is gone, the replay leads to what is cached now."""
    rng = random.Random(5)
    with published(History(most_batches=5)) as publisher:
        follower, there = subscribed(context, publisher), list[int]()
        for number in range(1, 60):
            if there and rng.random() < 0.4:
                publisher.put(removed(there.pop()))
            else:
                publisher.put(stored(number, parent=there[-1] if there else None))
                there.append(number)
        follower.until(lambda: follower.sequence == 59)
        assert set(follower.consumer.keys) == set(there)
        for start in (0, 20, 54):
            again = Consumer()
            numbers = []
            for number, payload in follower.replay(start):
                numbers.append(number)
                for event in msgspec.msgpack.decode(payload)[1]:
                    again.apply(event)
            assert numbers == list(range(54, 60)), "the listing has the number before the oldest"
            assert again.keys == follower.consumer.keys


def test_a_history_is_bounded_by_bytes() -> None:
    history = History(most_bytes=1000)
    for number in range(10):
        history.append(bytes(40), stored(number))
    assert (history.first_sequence, history.next_sequence) == (7, 10), "changes count, too"
    assert history.payload(9) == bytes(40)
    assert [block.hash for block in history.before()] == list(range(7))
    history.append(bytes(10_000), stored(10))
    assert (history.first_sequence, history.next_sequence) == (10, 11), "the last batch stays"
    history.append(b"", removed(*range(30)))
    assert (history.first_sequence, history.next_sequence, history.now) == (11, 12, {})


def test_without_a_replay_address_no_batch_is_kept(context: zmq.Context[Any]) -> None:
    with published(replay=None) as publisher:
        follower = subscribed(context, publisher, replay=False)
        publisher.put(stored(1, 2))
        publisher.put(removed(2))
        follower.until(lambda: set(follower.consumer.keys) == {1})
        history = publisher._history
        assert history.first_sequence == history.next_sequence >= 3
        assert (set(history.now), list(history.before())) == ({1}, [])


def test_many_clients_ask_for_a_replay_at_once(context: zmq.Context[Any]) -> None:
    """Each of them gets its end."""
    with published() as publisher:
        follower = subscribed(context, publisher)
        for number in range(1, 400):
            publisher.put(stored(number))
        follower.until(lambda: 399 in follower.consumer.keys)
        last = publisher._history.next_sequence
        clients = [context.socket(zmq.DEALER) for _ in range(40)]
        for client in clients:
            client.connect(publisher.replay_endpoint)
            client.send_multipart([b"", bytes(8)])
        for client in clients:
            sequences = []
            while sequences[-1:] != [b"\xff" * 8]:
                assert client.poll(WAIT * 1000)
                sequences.append(client.recv_multipart()[2])
            assert len(sequences) == last + 1
            client.close(linger=0)


def test_few_messages_wait_for_slow_clients() -> None:
    with published() as publisher:
        events, replay = publisher._sockets
        assert (events.sndhwm, replay.sndhwm) == (module.MOST_UNSENT, module.MOST_UNSENT_REPLAY) == (1000, 8)


def test_a_slow_subscriber_sees_a_gap_and_catches_up(context: zmq.Context[Any], monkeypatch: Any) -> None:
    """One that reads nothing loses messages, blocks no other, and knows everything after a replay."""
    monkeypatch.setattr(module, "MOST_UNSENT", 100)
    little = {zmq.RCVHWM: 1, zmq.RCVBUF: 4096}
    with published() as publisher:
        quick = subscribed(context, publisher)
        slow = subscribed(context, publisher, options=little)
        n, pad = 900, 200
        for number in range(n):
            publisher.put(stored(*range(1 + number * pad, 1 + (number + 1) * pad)))
            if number % 5 == 4:
                quick.until(lambda number=number: (number + 1) * pad in quick.consumer.keys)
        assert quick.n_gaps == 0
        while slow.read(0.2):
            pass
        publisher.put(stored(2_000_000_001))
        slow.until(lambda: 2_000_000_001 in slow.consumer.keys)
        quick.until(lambda: 2_000_000_001 in quick.consumer.keys)
        assert slow.n_gaps > 0
        assert slow.n_replayed > 0
        assert quick.consumer.keys == slow.consumer.keys
        assert len(quick.consumer.keys) == n * pad + 1


def test_an_unread_replay_blocks_nothing(context: zmq.Context[Any]) -> None:
    with published() as publisher:
        follower = subscribed(context, publisher)
        for number in range(300):
            publisher.put(stored(*range(1 + number * 200, 1 + (number + 1) * 200)))
        with context.socket(zmq.DEALER) as silent:
            silent.setsockopt(zmq.LINGER, 0)
            silent.setsockopt(zmq.RCVHWM, 1)
            silent.setsockopt(zmq.RCVBUF, 4096)
            silent.connect(publisher.replay_endpoint)
            for _ in range(20):
                silent.send_multipart([b"", bytes(8)])
            publisher.put(stored(2_000_000_000))
            follower.until(lambda: 2_000_000_000 in follower.consumer.keys)


def test_the_queue_is_bounded_and_says_when_it_has_room(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 3)
    room = threading.Event()
    with published() as publisher:
        publisher.on_room = room.set
        hold = threading.Event()
        send = publisher._send
        publisher._send = lambda *a: (hold.wait(WAIT), send(*a))[1]  # type: ignore[method-assign]
        while publisher.has_room:
            publisher.put(stored(1))
        assert len(publisher._queue) == 3
        assert not room.is_set()
        hold.set()
        assert room.wait(WAIT)
        assert publisher.has_room


def test_put_waits_for_nothing(monkeypatch: Any) -> None:
    """The thread that steps only appends, whatever the other one does."""
    with published() as publisher:
        hold = threading.Event()
        send = publisher._send
        publisher._send = lambda *a: (hold.wait(WAIT), send(*a))[1]  # type: ignore[method-assign]
        start = time.monotonic()
        for number in range(1000):
            publisher.put(stored(number))
        assert time.monotonic() - start < WAIT / 4
        hold.set()


def test_closing_publishes_the_rest_and_does_not_hang(context: zmq.Context[Any]) -> None:
    with published() as publisher:
        Subscriber(context, publisher.endpoint)  # reads nothing
        subscribed(context, publisher)
        for number in range(100):
            publisher.put(stored(number + 1))
        start = time.monotonic()
        publisher.close()
        publisher.close()
        assert time.monotonic() - start < WAIT / 4
        assert publisher._history.next_sequence > 100
        again = socket.create_server(("127.0.0.1", int(publisher.endpoint.rpartition(":")[2])))
        again.close()


def test_a_dropped_owner_ends_the_thread() -> None:
    class Owner:
        pass

    owner = Owner()
    publisher = Publisher(KVEvents("tcp://127.0.0.1:*"))
    publisher.close_with(owner)
    del owner
    publisher._thread.join(WAIT)
    assert not publisher._thread.is_alive()
    publisher.close()


def test_a_broken_thread_warns_once_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with published() as publisher:
        publisher._payload = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        publisher.put(stored(1))
        publisher._thread.join(WAIT)
        publisher.put(stored(2))
    assert [record.message for record in caplog.records] == ["KV events ended: division by zero"]


# ---- the bytes ----


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class OldEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """As vLLM's example of a subscriber declares events, which it did until 0.23."""


class NewEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As vLLM declares events since 0.24."""


def declared(base: type[Any]) -> type[Any]:
    """Return the type of a batch whose events have a base, with vLLM's names and order of fields."""
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[bytes | int]),
            ("parent_block_hash", bytes | int | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None),
            ("group_idx", int | None, None),
        ],
        bases=(base,),
        tag=True,
    )
    gone = msgspec.defstruct(
        "BlockRemoved",
        [("block_hashes", list[bytes | int]), ("medium", str | None), ("group_idx", int | None, None)],
        bases=(base,),
        tag=True,
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], bases=(base,), tag=True)
    return msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[stored | gone | cleared]), ("data_parallel_rank", int | None, None)],  # type: ignore[valid-type]
        bases=(EventBatch,),
    )


@pytest.mark.parametrize(("encoding", "base"), [("map", NewEvent), ("array", OldEvent)])
def test_vllms_structs_decode_the_bytes(encoding: str, base: type[Any], context: zmq.Context[Any]) -> None:
    settings = {"encoding": encoding, "topic": "kv-events"}
    with published(**settings) as publisher, context.socket(zmq.SUB) as follower:
        follower.connect(publisher.endpoint)
        follower.subscribe("kv-events")
        assert follower.poll(WAIT * 1000)
        cleared = follower.recv_multipart()
        identity = Identity("poet", "pyvelo-salt:00")
        publisher.put(Changes([7, 2**64 - 1], blocks_of(1, 2, identity=identity), True))
        assert follower.poll(WAIT * 1000)
        topic, sequence, payload = follower.recv_multipart()
    assert (topic, sequence) == (b"kv-events", (1).to_bytes(8, "big"))
    decoder = msgspec.msgpack.Decoder(declared(base))
    first, batch = decoder.decode(cleared[2]), decoder.decode(payload)
    assert [type(event).__name__ for event in first.events] == ["AllBlocksCleared"]
    gone, clear, new = batch.events
    assert (gone.block_hashes, gone.medium) == ([7, 2**64 - 1], "GPU")
    assert type(clear).__name__ == "AllBlocksCleared"
    assert (new.block_hashes, new.parent_block_hash, new.block_size) == ([1, 2], None, SIZE)
    assert new.token_ids == [1] * SIZE + [2] * SIZE
    assert (new.lora_id, new.medium, new.lora_name, new.group_idx) == (None, "GPU", "poet", None)
    assert new.extra_keys == [("poet", "pyvelo-salt:00"), ("poet",)]
    assert batch.data_parallel_rank == 0


def test_the_first_subscriber_of_the_docs_reads_all_it_declares(context: zmq.Context[Any]) -> None:
    """Older declarations lack the last fields: what follows them is ignored."""

    class BlockStored(OldEvent, tag=True):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None

    payload = b""
    with published(encoding="array") as publisher:
        payload = publisher._payload(1.0, stored(5))
    batch = msgspec.msgpack.decode(payload, type=tuple[float, list[BlockStored], int])
    assert batch[1][0].block_hashes == [5]


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"endpoint": "127.0.0.1:5557"}, "give tcp://ADDRESS:PORT"),
        ({"endpoint": "udp://127.0.0.1:5557"}, "give tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://127.0.0.1"}, "give tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://127.0.0.1:99999"}, "give tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://:5557"}, "give tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://256.1.1.1:5557"}, "give tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://::1:5557"}, "tcp://[::1]:5557"),
        ({"endpoint": "tcp://[127.0.0.1]:5557"}, "give tcp://ADDRESS:PORT"),
        ({"endpoint": "ipc://"}, "ipc://PATH"),
        ({"endpoint": 5557}, "give tcp://ADDRESS:PORT"),
        ({"endpoint": None}, "give tcp://ADDRESS:PORT"),
        (
            {"endpoint": "tcp://127.0.0.1:1", "replay": "tcp://x"},
            "replay='tcp://x' of kv_events: give tcp://",
        ),
        ({"endpoint": "tcp://127.0.0.1:1", "replay": "tcp://127.0.0.1:1"}, "also the address of the replay"),
        ({"endpoint": "tcp://127.0.0.1:1", "topic": "a\n"}, "printable"),
        ({"endpoint": "tcp://127.0.0.1:1", "encoding": "json"}, "give 'map' or 'array'"),
    ],
    ids=str,
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        KVEvents(**settings)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("tcp://192.0.2.1:5557", "this machine does not have the address"),
        ("ipc:///nowhere/at/all", "cannot be used"),
    ],
)
def test_addresses_that_cannot_be_used(address: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Publisher(KVEvents(address))
    assert words in str(error.value)
    assert address in str(error.value)


def test_a_port_in_use() -> None:
    with published() as publisher, pytest.raises(ConfigError, match="the port is in use"):
        Publisher(KVEvents(publisher.endpoint))
    with published() as publisher, pytest.raises(ConfigError, match="the port is in use"):
        Publisher(KVEvents("tcp://127.0.0.1:*", publisher.replay_endpoint))


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package(package: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    with pytest.raises(ConfigError, match=r"pip install 'pyvelo\[events\]'"):
        Publisher(KVEvents("tcp://127.0.0.1:*"))


def test_the_log_has_the_ports(caplog: pytest.LogCaptureFixture) -> None:
    events = KVEvents("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    config = EngineConfig(model="m.gguf", kv_events=events)
    with caplog.at_level("INFO", "pyvelo"), publishing(config) as publisher:
        assert publisher is not None
        publisher.close()
        assert not publisher.endpoint.endswith("*")
        words = f"KV events at {publisher.endpoint}, replays at {publisher.replay_endpoint}"
        assert caplog.messages == [words]


def test_addresses_of_this_machine() -> None:
    local = ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///tmp/x", "tcp://127.9.9.9:*")
    assert all(map(is_local, local))
    assert not any(map(is_local, ("tcp://*:1", "tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://eth0:1")))


def test_an_ipc_address_and_ipv6(context: zmq.Context[Any], tmp_path: Any) -> None:
    for endpoint in (f"ipc://{tmp_path}/events", "tcp://[::1]:*"):
        with published(endpoint=endpoint) as publisher:
            follower = subscribed(context, publisher, options={zmq.IPV6: 1})
            publisher.put(stored(1))
            follower.until(lambda follower=follower: 1 in follower.consumer.keys)


def test_the_naive_consumer_finds_what_is_missing() -> None:
    consumer = Consumer()
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_name": None,
        "extra_keys": [None, None],
    }
    consumer.apply(event)
    assert consumer.prefixes() == {Key(None, None, (1, 2)), Key(None, None, (1, 2, 3, 4))}
    assert [consumer.hit(tokens) for tokens in ([1, 2, 3], [1, 2, 3, 4], [1, 3])] == [1, 2, 0]
    with pytest.raises(AssertionError, match="stored once"):
        consumer.apply(event)
    with pytest.raises(AssertionError, match="only known"):
        consumer.apply({"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"})
    consumer.apply({"type": "AllBlocksCleared"})
    with pytest.raises(KeyError):
        consumer.apply({**event, "parent_block_hash": 1})
