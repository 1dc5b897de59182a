"""The block map of /v1/blocks/stream equals the engine's tables, and costs nothing without viewers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from pyvelo.server.auth import ANYBODY, Keys, Tenant, _digest
from pyvelo.server.blocks import STATES, Snapshot
from pyvelo.server.errors import HttpError
from pyvelo.server.live import MAX_VIEWERS, MAX_VIEWERS_OF_KEY, PERIOD, Recording
from pyvelo.server.settings import Settings
from tests.engine.test_engine_machine import OPERATIONS
from tests.engine.toy_engine import ToyEngine

from .servers import Server

KINDS = ("header", "snapshot", "delta", "requests", "rates")


class Viewer:
    """Client that keeps the state which the events tell."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.requests: dict[int, dict[str, Any]] = {}
        self.state: dict[str, Any] = {}
        self.rates: list[list[float]] = []
        self.seen: list[str] = []
        self.header: dict[str, Any] = {}

    def read(self, text: bytes | str) -> None:
        """Take whole events."""
        text = text.decode() if isinstance(text, bytes) else text
        for event in text.split("\n\n"):
            if event and not event.startswith(":"):
                name, data = event.removeprefix("event: ").split("\ndata: ")
                self.seen.append(name)
                getattr(self, f"_{name}")(json.loads(data))

    def _header(self, data: dict[str, Any]) -> None:
        self.header = data

    def _snapshot(self, data: dict[str, Any]) -> None:
        self.blocks = {}
        self._delta(data)

    def _delta(self, data: dict[str, Any]) -> None:
        for row in data.pop("blocks"):
            if row[1]:
                self.blocks[row[0]] = row
            else:
                self.blocks.pop(row[0], None)
        self.state = data

    def _requests(self, data: dict[str, Any]) -> None:
        if data["all"]:
            self.requests = {}
        for key in data["gone"]:
            self.requests.pop(key)
        self.requests |= {row["key"]: row for row in data["rows"]}

    def _rates(self, data: dict[str, Any]) -> None:
        self.rates += data["rows"]

    def count(self, state: str) -> int:
        return sum(STATES[row[1]] == state for row in self.blocks.values())


class Watched:
    """A recording of a toy engine, and a viewer of its deltas."""

    def __init__(self, engine: ToyEngine) -> None:
        self.engine = engine
        engine.core.observer = None
        self.snapshots: list[Snapshot] = []
        with engine.loop.visit() as core:
            self.recording = Recording(core, lambda _, snapshot: self.snapshots.append(snapshot))
        self.viewer = Viewer()
        self.take()
        self.viewer.read(self.recording.whole(ANYBODY))

    def take(self) -> None:
        while self.snapshots:
            before = self.recording.version
            self.recording.take(self.snapshots.pop(0))
            if before and self.recording.version > before:
                self.viewer.read(self.recording.changes(ANYBODY))

    def check(self) -> None:
        """Compare the viewer with the engine, and with a viewer that connects now."""
        self.recording.flush(self.engine.loop)
        self.take()
        new = Viewer()
        new.read(self.recording.whole(ANYBODY))
        assert (new.blocks, new.requests, new.state) == (
            self.viewer.blocks,
            self.viewer.requests,
            self.viewer.state,
        )
        manager, pool = self.engine.manager, self.engine.manager._pool
        assert new.state["counts"]["free"] == manager.n_free
        assert new.state["counts"]["cached"] == new.count("cached") == manager.n_cached
        assert new.count("used") + new.count("shared") == manager.n_used
        assert new.count("shared") == sum(pool.references(b) > 1 for b in range(manager.n_blocks))
        assert (new.state["reserved"], new.state["swapped"]) == (
            manager.n_reserved,
            manager.swap.n_blocks - manager.swap.n_free,
        )
        rows = new.blocks.values()
        assert {r[0]: r[2] for r in rows if r[2]} == {
            b: n for b in range(manager.n_blocks) if (n := pool.references(b))
        }
        assert sum(r[3] for r in rows if r[2]) == manager.n_stored
        self._check_owners(new)

    def _check_owners(self, viewer: Viewer) -> None:
        core = self.engine.core
        open_ = {request.number: request for request in core._active.open.values()}
        for row in viewer.blocks.values():
            assert len(row[4:]) == row[2] == len(set(row[4:]))
            for key in row[4:]:
                held = open_[key].sequence.table.held if key > 0 else None  # type: ignore[union-attr]
                assert held is None or row[0] in held
        states = [row["state"] for row in viewer.requests.values()]
        assert states.count("idle") == sum(not sequence.busy for sequence in core.idle)
        assert states.count("prefill") + states.count("decode") == core.n_running
        assert states.count("waiting") + states.count("swapped") == core.n_waiting
        for key, row in viewer.requests.items():
            assert row["blocks"] == sum(key in block[4:] for block in viewer.blocks.values())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_the_map_is_the_engine_after_any_operations(seed: int, fails: bool) -> None:
    rng = Random(seed)
    engine = ToyEngine(rng)
    watched = Watched(engine)
    never = {ToyEngine.record} if fails else {ToyEngine.record, ToyEngine.fail_soon}
    operations = {operation: n for operation, n in OPERATIONS.items() if operation not in never}
    for _ in range(120):
        rng.choices(list(operations), list(operations.values()))[0](engine, rng)
        watched.take()
        if fails:
            engine.faults.off()
            engine.survive(lambda: engine.loop.cancel(()))  # raises what an observer has raised
        if engine.broken:
            return
        watched.check()
    watched.recording.ended = True
    engine.finish()
    assert engine.core.observer is None


def test_snapshots_are_a_period_apart() -> None:
    rng = Random(3)
    engine = ToyEngine(rng)
    watched = Watched(engine)
    times = []
    watched.recording._deliver = lambda *_: times.append(engine.now)
    for _ in range(300):
        rng.choice((ToyEngine.submit, ToyEngine.step, ToyEngine.step))(engine, rng)
        engine.now += 0.03
    assert len(times) > 10
    assert min(b - a for a, b in pairwise(times)) >= PERIOD
    watched.recording.ended = True
    engine.finish()


# ---- over HTTP ----


class Stream:
    """Open stream of a server, read in a thread."""

    def __init__(self, client: httpx.Client) -> None:
        self.viewer = Viewer()
        self.ended = threading.Event()
        self._response = client.stream("GET", "/v1/blocks/stream")
        self.response = self._response.__enter__()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        text = ""
        try:
            for part in self.response.iter_text():
                *whole, text = (text + part).split("\n\n")
                self.viewer.read("\n\n".join(whole))
        except httpx.HTTPError:
            pass
        finally:
            self.ended.set()


@contextmanager
def watching(server: Server, key: str = "") -> Iterator[Viewer]:
    with connect(server, key) as client:
        stream = Stream(client)
        try:
            until(lambda: "requests" in stream.viewer.seen)
            yield stream.viewer
        finally:
            stream.response.close()


def connect(server: Server, key: str = "") -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=server.url, headers=headers, timeout=30)


def run(server: Server, coroutine: Any) -> Any:
    """Return the result of a coroutine in the server's event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, server._loop).result(30)


@contextmanager
def serving(model: Path, settings: Settings | None = None, **config: Any) -> Iterator[Server]:
    server = Server(settings or Settings(), **{"model": model, "kv_cache_bytes": 1 << 21, **config})
    try:
        yield server
    finally:
        server.close()


def until(done: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server(endless_model: Path) -> Iterator[Server]:
    with serving(endless_model, n_ctx=2048) as running:
        yield running


def generate(client: httpx.Client, n: int = 4000, prompt: str = "a" * 300, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": n, "ignore_eos": True, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body)


@contextmanager
def generating(client: httpx.Client, name: str, prompt: str = "a" * 300, n_new: int = 1500) -> Iterator[None]:
    """Run a long request within a block."""
    body = {"prompt": prompt, "max_tokens": n_new, "ignore_eos": True, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield


def agrees(server: Server, viewer: Viewer) -> bool:
    stats, counts = server.serving.engine.stats(), viewer.state["counts"]
    return (
        counts["free"] == stats.blocks_free
        and counts["cached"] == stats.blocks_cached
        and counts["used"] + counts["shared"] == stats.blocks_used
        and viewer.state["reserved"] == stats.blocks_reserved
        and sum(row[3] for row in viewer.blocks.values() if row[2]) == stats.tokens_stored
    )


def test_a_stream_follows_requests(server: Server) -> None:
    with watching(server) as viewer, connect(server) as client:
        assert viewer.seen[:3] == ["header", "snapshot", "requests"]
        stats = server.serving.engine.stats()
        assert viewer.header["blocks"] == stats.blocks_total == sum(viewer.state["counts"].values())
        assert viewer.header["block_size"] == stats.block_size
        assert viewer.header["block_bytes"] == stats.block_bytes
        with generating(client, "first-one"):
            until(lambda: "decode" in [row["state"] for row in viewer.requests.values()])
            row = next(iter(viewer.requests.values()))
            assert (row["id"], row["tenant"]) == ("first-one", "anybody")
            held = [block for block in viewer.blocks.values() if row["key"] in block[4:]]
            assert len(held) == row["blocks"] > 0
        until(lambda: not viewer.requests and agrees(server, viewer))
        assert viewer.count("cached") > 0
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        until(lambda: viewer.rates)
        assert len(viewer.rates[0]) == len(viewer.header["rates"])


def test_a_fork_shows_shared_blocks(server: Server) -> None:
    with watching(server) as viewer, connect(server) as client:
        made = client.post("/v1/sessions", json={"prompt": "b" * 200}).json()["id"]
        twin = client.post(f"/v1/sessions/{made}/fork", json={}).json()["data"][0]["id"]
        until(lambda: {made, twin} <= {row["id"] for row in viewer.requests.values()})
        until(lambda: viewer.count("shared") > 2 and agrees(server, viewer))
        for name in (made, twin):
            client.delete(f"/v1/sessions/{name}")
        until(lambda: not viewer.requests and not viewer.count("shared"))


def test_nothing_is_recorded_without_viewers(server: Server) -> None:
    core = server.serving.engine.core

    def untouched() -> bool:
        return core.observer is None and core.manager._observer is None

    until(untouched)
    with connect(server) as client:
        generate(client, 5)
        assert untouched()
        with watching(server), watching(server):
            assert not untouched()
            assert server.serving.live.recording is not None
            recorder = core.observer
            generate(client, 5)
            assert core.observer == recorder, "both viewers share it"
        until(untouched)
        generate(client, 5)
        assert untouched()
        with watching(server) as viewer:
            assert agrees(server, viewer)


def test_a_viewer_that_missed_changes_gets_a_snapshot(server: Server) -> None:
    with watching(server) as viewer, connect(server) as client:
        live = server.serving.live
        slow = run(server, live.enter(ANYBODY))
        late = Viewer()
        run(server, _news(live, slow, late))
        assert late.seen[0] == "snapshot"
        for n in range(3):
            generate(client, 2, prompt=f"{n}" * 100)
            until(lambda: agrees(server, viewer) and not viewer.requests)
        late.seen.clear()
        run(server, _news(live, slow, late))
        assert late.seen[0] == "snapshot"
        assert late.blocks == viewer.blocks
        live.leave(slow)


async def _news(live: Any, viewer: Any, into: Viewer) -> None:
    into.read(live.news(viewer))


def test_too_many_viewers_are_refused(server: Server) -> None:
    live = server.serving.live
    until(lambda: not live._viewers)
    made = [run(server, live.enter(ANYBODY)) for _ in range(MAX_VIEWERS)]
    with connect(server) as client:
        refused = client.get("/v1/blocks/stream")
        assert refused.status_code == 503
        for viewer in made:
            live.leave(viewer)
        assert client.head("/v1/blocks/stream").status_code == 200


def test_a_key_gets_a_part_of_the_viewers_only(server: Server) -> None:
    live, (greedy, modest) = server.serving.live, (Tenant(name, _digest(name)) for name in ("one", "two"))
    until(lambda: not live._viewers)
    made = [run(server, live.enter(greedy)) for _ in range(MAX_VIEWERS_OF_KEY)]
    with pytest.raises(HttpError) as refused:
        run(server, live.enter(greedy))
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "10")
    made.append(run(server, live.enter(modest)))
    for viewer in made:
        live.leave(viewer)


def test_a_tenant_sees_its_own_names_only(endless_model: Path) -> None:
    tenants = [Tenant(name, _digest(f"key of {name}")) for name in ("one", "two")]
    with (
        serving(endless_model, Settings(keys=Keys(tenants)), n_ctx=32768, kv_cache_bytes=1 << 25) as server,
        connect(server, "key of one") as client,
        httpx.Client(base_url=server.url) as stranger,
    ):
        assert stranger.get("/v1/blocks/stream").status_code == 401
        with (
            watching(server, "key of one") as one,
            watching(server, "key of two") as two,
            generating(client, "secret-name", n_new=30_000),
        ):
            until(lambda: one.requests and two.requests)
            assert [(row["id"], row["tenant"]) for row in one.requests.values()] == [("secret-name", "one")]
            assert [(row["id"], row["tenant"]) for row in two.requests.values()] == [("other", "other")]
            session = client.post("/v1/sessions", json={"prompt": "c" * 100}).json()["id"]
            client.post(f"/v1/sessions/{session}/generate", json={"max_tokens": 2})
            until(lambda: session in [row["id"] for row in one.requests.values()])
            until(lambda: len(two.requests) == 2)
            assert {row["id"] for row in two.requests.values()} == {"other"}
            assert (one.header["tenant"], two.header["tenant"]) == ("one", "two")


def test_the_end_of_the_server_ends_the_streams(endless_model: Path) -> None:
    with serving(endless_model, n_ctx=512) as server:
        client = connect(server)
        stream = Stream(client)
        until(lambda: "requests" in stream.viewer.seen)
        begin = time.monotonic()
    assert stream.ended.wait(5)
    assert time.monotonic() - begin < 5
    client.close()
