"""Requests through the ingress to replicas in this process: answers, hashes, cancellation, lost replicas."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyvelo.cluster import ingress
from pyvelo.cluster.forwarded import Forwarded, Message, answer_of, replica_of
from pyvelo.cluster.gather import Whole, merged, whole_answer
from pyvelo.cluster.ingress import ATTEMPTS, Ingress, ReplicaLost
from pyvelo.cluster.policy import Report, short
from pyvelo.cluster.preview import Preview
from pyvelo.cluster.report import Reporter
from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.engine.async_loop import open_engine_loop
from pyvelo.server.app import App
from pyvelo.server.auth import Keys, Tenant, _digest
from pyvelo.server.serving import Serving
from pyvelo.server.settings import Settings

CONFIG = EngineConfig(model=DEMO_MODEL, n_ctx=512, kv_cache_bytes=4 << 20, n_threads=1, deterministic=True)
LONG = "PyVelo cuts the KV cache into blocks, and a table says where the blocks of a sequence are. " * 3
CHAT = {
    "messages": [{"role": "user", "content": LONG}],
    "temperature": 0,
}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG, "max_tokens": 4}),
    ("/v1/completions", {"prompt": [[1] * 70, [2] * 40], "max_tokens": 2}),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 4, "cache_salt": "mine"}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 4}),
    ("/chat/completions", {**CHAT, "max_tokens": 4, "n": 2}),
    ("/v1/messages", {"model": "demo", "messages": CHAT["messages"], "max_tokens": 4}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 4}),
    ("/completion", {"prompt": LONG, "n_predict": 4}),
    (
        "/api/chat",
        {"messages": CHAT["messages"], "model": "demo", "stream": False, "options": {"num_predict": 4}},
    ),
    ("/api/generate", {"model": "demo", "prompt": LONG, "stream": False, "options": {"num_predict": 4}}),
]


class Replica:
    """Server of a model in this process."""

    def __init__(self, serving: Serving, settings: Settings) -> None:
        self.serving, self.app = serving, App(serving, settings)
        self.reporter = Reporter(serving)

    async def report(self) -> Report:
        return Report.unpack(await self.reporter.report(), "a")

    async def until(self, condition: Callable[[Any], bool]) -> None:
        """Wait for statistics of the engine."""
        for _ in range(2000):
            if condition(self.serving.engine.stats()):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"still {self.serving.engine.stats()}")


@asynccontextmanager
async def opened(**given: Any) -> AsyncIterator[Replica]:
    settings = Settings(hosts=("*",), model_names=("demo",), **given)
    loop = await open_engine_loop(CONFIG, threading.Event())
    try:
        serving = Serving(loop, CONFIG, settings)
        await serving.start()
        replica = Replica(serving, settings)
        yield replica
        await replica.app.drain(0.0)
    finally:
        await asyncio.to_thread(loop.close)


class Client:
    """One request to an application; `messages` is its answer so far."""

    def __init__(self, app: Any, path: str, body: Any, method: str = "POST", **headers: str) -> None:
        self.messages: list[Message] = []
        self.news = asyncio.Event()
        self._gone = asyncio.Event()
        self._bodies = [json.dumps(body).encode() if body is not None else b""]
        pairs = [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()]
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": pairs}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop()}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.messages.append(message)
        self.news.set()

    def leave(self) -> None:
        self._gone.set()

    async def first(self) -> None:
        """Wait for the first message with a body."""
        while not any(message.get("body") for message in self.messages):
            await asyncio.wait_for(self.news.wait(), 20)
            self.news.clear()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        await asyncio.wait_for(self.task, 20)
        start, *bodies = self.messages
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, b"".join(message["body"] for message in bodies)


async def no_hashes(request: Forwarded) -> tuple[bytes, ...]:
    return ()


async def no_answers(request: Forwarded) -> list[Whole]:
    return []


def to(replica: Replica) -> Ingress:
    return Ingress(lambda request: _call(replica, request), no_hashes, no_answers, 1 << 20)


async def _call(replica: Replica, request: Forwarded) -> AsyncGenerator[list[Message], None]:
    async with aclosing(answer_of(replica.app, request)) as batches:
        async for batch in batches:
            yield batch


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_the_hashes_are_the_ones_that_a_replica_publishes(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with opened() as replica:
            preview = Preview(CONFIG, replica.app.settings)
            request = Forwarded("POST", path, headers=((b"host", b"x"),), body=json.dumps(body).encode())
            hashes = await preview.hashes(request)
            assert len(hashes) >= 2
            assert short(hashes[0]) not in (await replica.report()).held
            status, _, data = await Client(to(replica), path, body).answer()
            assert status == 200, data
            assert set(map(short, hashes)) <= (await replica.report()).held

    run(test())


@pytest.mark.parametrize("path", ["/v1/sessions", "/sessions"])
@pytest.mark.parametrize("content", [{"prompt": LONG, "cache_salt": "mine"}, {"messages": CHAT["messages"]}])
def test_a_session_has_the_hashes_of_its_first_answer(path: str, content: dict[str, Any]) -> None:
    async def test() -> None:
        async with opened() as replica:
            preview = Preview(CONFIG, replica.app.settings)
            hashes = await preview.hashes(Forwarded("POST", path, body=json.dumps(content).encode()))
            assert len(hashes) >= 2
            status, _, data = await Client(to(replica), path, content).answer()
            assert status == 200, data
            generate = f"/v1/sessions/{json.loads(data)['id']}/generate"
            assert (await Client(to(replica), generate, {"max_tokens": 2}).answer())[0] == 200
            assert set(map(short, hashes)) <= (await replica.report()).held

    run(test())


def test_tenants_have_other_hashes() -> None:
    async def test() -> None:
        keys = Keys([Tenant("a", _digest("A")), Tenant("b", _digest("B"))])
        preview = Preview(CONFIG, Settings(keys=keys))
        body = json.dumps({"prompt": LONG}).encode()
        asked = Forwarded("POST", "/v1/completions", body=body)
        of = {
            key: await preview.hashes(replace(asked, headers=((b"authorization", f"Bearer {key}".encode()),)))
            for key in "ABC"
        }
        assert of["C"] == ()
        assert len(of["A"]) == len(of["B"]) >= 2
        assert set(of["A"]).isdisjoint(of["B"])

    run(test())


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", b"{"),
        ("POST", "/v1/completions", b'{"prompt": 3}'),
        ("POST", "/v1/completions", b'{"prompt": ""}'),
        ("POST", "/v1/chat/completions", b'{"messages": []}'),
        ("POST", "/v1/embeddings", b'{"input": "a"}'),
        ("GET", "/v1/completions", b""),
        ("GET", "/nowhere", b""),
        ("GET", "/v1/sessions", b""),
        ("POST", "/v1/sessions", b""),
        ("POST", "/v1/sessions", b"{}"),
        ("POST", "/v1/sessions", b'{"saved": "a"}'),
        ("POST", "/v1/sessions/{id}/generate", b"{}"),
    ],
)
def test_other_requests_have_no_hashes(
    method: str, path: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert asyncio.run(Preview(CONFIG, Settings()).hashes(Forwarded(method, path, body=body))) == ()
    assert not caplog.messages


def test_a_continued_response_is_found_whatever_its_field_looks_like() -> None:
    name = "resp_" + "0" * 32 + "_x"
    for body in (
        json.dumps({"previous_response_id": name}),
        json.dumps({"previous_response_id": name}).replace("id", "\\u0069d"),
        json.dumps({"previous_response_id": name}).replace("_response_", "\\u005Fresponse_"),
    ):
        assert ingress._previous(body.encode()) == name
    for other in ("{", '"\\u0041"', '{"a": "previous_response_id \\u0041"}'):
        assert ingress._previous(other.encode()) is None


def test_reports_tell_what_a_replica_has_to_do() -> None:
    async def test() -> None:
        async with opened() as replica:
            empty = await replica.report()
            assert (empty.n_open, empty.held) == (0, frozenset())
            body = {"prompt": LONG, "max_tokens": 300, "ignore_eos": True, "stream": True}
            client = Client(to(replica), "/v1/completions", body)
            await client.first()
            busy = await replica.report()
            assert (busy.n_open, busy.n_running) == (1, 1)
            with replica.reporter.answering(Forwarded("POST", "/v1/completions", router="a")):
                assert (await replica.report()).n_others == 0
                with replica.reporter.answering(Forwarded("POST", "/v1/completions", router="b")):
                    assert dict((await replica.reporter.report())["of_routers"]) == {"a": 1, "b": 1}
            assert busy.free_blocks < empty.free_blocks
            assert len(busy.held) >= 2
            client.leave()
            await client.task
            await replica.until(lambda stats: not stats.running)
            replica.serving.engine.reset_prefix_cache()
            assert (await replica.report()).held == frozenset()

    run(test())


def test_a_report_is_bounded_and_begins_with_what_was_asked() -> None:
    async def test() -> None:
        async with opened() as replica:
            preview = Preview(CONFIG, replica.app.settings)
            replica.reporter = Reporter(replica.serving, most=3)
            first, *others = [{"prompt": f"{n}{LONG}", "max_tokens": 1} for n in range(3)]
            for body in (first, *others):
                await Client(to(replica), "/v1/completions", body).answer()
            request = Forwarded("POST", "/v1/completions", body=json.dumps(first).encode())
            hashes = await preview.hashes(request)
            assert not {short(name) for name in hashes} & (await replica.report()).held
            named = replace(request, hashes=(b"never published".ljust(32), *hashes[:2]))
            with replica.reporter.answering(named):
                held = (await replica.report()).held
            assert len(held) == 3
            assert set(map(short, hashes[:2])) <= held

    run(test())


def test_answers_pass_through_with_their_status_and_headers() -> None:
    async def test() -> None:
        async with opened(max_queue=0) as replica:
            app = to(replica)
            status, headers, data = await Client(app, "/v1/models", None, "GET").answer()
            assert (status, json.loads(data)["data"][0]["id"]) == (200, "demo")
            status, headers, data = await Client(
                app, "/v1/completions", {"prompt": 3}, **{"x-request-id": "mine"}
            ).answer()
            assert (status, headers["x-request-id"]) == (400, "mine")
            status, headers, data = await Client(app, "/nowhere", None, "GET").answer()
            assert status == 404
            replica.serving.admission._max_open = 0
            status, headers, data = await Client(app, "/v1/completions", {"prompt": "a"}).answer()
            assert (status, json.loads(data)["error"]["code"]) == (503, "queue_full")
            assert int(headers["retry-after"]) >= 1

    run(test())


def test_a_body_that_is_too_long_never_reaches_a_replica() -> None:
    async def test() -> None:
        async def call(request: Forwarded) -> AsyncGenerator[list[Message], None]:
            raise AssertionError("forwarded")
            yield []

        app = Ingress(call, no_hashes, no_answers, max_body=100)
        status, _, data = await Client(app, "/api/chat", {"a": "b" * 100}).answer()
        assert (status, json.loads(data)) == (413, {"error": "the body is longer than 100 bytes"})

    run(test())


def test_events_arrive_one_by_one_and_a_client_that_leaves_cancels() -> None:
    async def test() -> None:
        async with opened() as replica:
            body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
            client = Client(to(replica), "/v1/completions", body)
            await client.first()
            await replica.until(lambda stats: stats.completion_tokens >= 1)
            assert not client.task.done()
            client.leave()
            await client.task
            await replica.until(lambda stats: not stats.running and not stats.blocks_used)
            assert replica.serving.engine.stats().requests_aborted == 1

    run(test())


def test_events_wait_for_each_other_but_the_first_and_the_last_do_not() -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(dict(START))
            for number in range(200):
                await send({"type": "http.response.body", "body": b"%d," % number, "more_body": True})
                await asyncio.sleep(0.001)
            await send({"type": "http.response.body", "body": b"end"})

        for pause, most in ((0.0, 1000), (0.1, 30)):
            batches = [batch async for batch in answer_of(app, Forwarded("GET", "/"), lambda: pause)]  # noqa: B023
            body = b"".join(message.get("body", b"") for batch in batches for message in batch)
            assert body == b"".join(b"%d," % number for number in range(200)) + b"end"
            assert batches[0][0]["type"] == "http.response.start"
            assert 2 <= len(batches) <= most
            assert len(batches) >= 50 or pause

    run(test())


def test_a_cancelled_ingress_cancels_its_request() -> None:
    async def test() -> None:
        async with opened() as replica:
            body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
            client = Client(to(replica), "/v1/completions", body)
            await client.first()
            client.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client.task
            await replica.until(lambda stats: not stats.running and not stats.blocks_used)

    run(test())


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def losing(
    n_lost: int, batches: list[list[Message]], error: Exception | None = None
) -> tuple[Ingress, list[Forwarded]]:
    """Return an ingress whose first `n_lost` replicas die after these messages; the next one answers."""
    seen: list[Forwarded] = []

    async def call(request: Forwarded) -> AsyncGenerator[list[Message], None]:
        seen.append(request)
        if len(seen) > n_lost:
            yield [{**START, "headers": []}, {"type": "http.response.body", "body": b"whole"}]
            return
        for batch in batches:
            yield batch
        raise error or ReplicaLost("killed")

    return Ingress(call, no_hashes, no_answers, 1 << 20), seen


def test_a_request_that_has_not_begun_goes_to_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "PAUSE", 0.001)

    async def test() -> None:
        app, seen = losing(3, [])
        assert (await Client(app, "/v1/completions", {}).answer())[0::2] == (200, b"whole")
        assert len(seen) == 4
        assert len(set(seen)) == 1
        app, seen = losing(99, [])
        status, headers, data = await Client(app, "/v1/messages", {}).answer()
        assert (status, headers["retry-after"], len(seen)) == (503, "5", ATTEMPTS)
        assert json.loads(data)["type"] == "error"

    run(test())


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        (
            "/v1/completions",
            "text/event-stream; charset=utf-8",
            b'data: {"error":{"message":"the replica was',
        ),
        ("/v1/messages", "text/event-stream", b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", "text/event-stream", b'event: error\ndata: {"type":"error","code":"replica_lost"'),
        ("/api/chat", "application/x-ndjson", b'{"error":"the replica was lost'),
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error(path: str, kind: str, expected: bytes) -> None:
    async def test() -> None:
        start = {**START, "headers": [(b"content-type", kind.encode())]}
        part = {"type": "http.response.body", "body": b"a piece\n\n", "more_body": True}
        app, seen = losing(1, [[start, part]])
        status, _, data = await Client(app, path, {}).answer()
        assert (status, len(seen)) == (200, 1)
        assert data.startswith(b"a piece\n\n" + expected)
        assert data.endswith(b"data: [DONE]\n\n") == (path == "/v1/completions")

    run(test())


def test_an_error_that_no_one_expects_is_an_answer() -> None:
    async def test() -> None:
        part = {"type": "http.response.body", "body": b"a piece\n\n", "more_body": True}
        for batches in ([], [[START, part]]):
            app, seen = losing(99, batches, RuntimeError("a defect"))
            status, _, data = await Client(app, "/v1/completions", {}).answer()
            assert (status, len(seen)) == (200 if batches else 500, 1)
            assert b'"error"' in data
            assert b"a defect" not in data

    run(test())


def test_an_answer_that_is_no_stream_breaks_off() -> None:
    async def test() -> None:
        app, _ = losing(1, [[{**START, "headers": [(b"content-length", b"10")]}]])
        with pytest.raises(ReplicaLost):
            await Client(app, "/v1/completions", {}).answer()

    run(test())


def test_sessions_and_responses_name_their_replica() -> None:
    seen: list[str] = []

    async def test() -> None:
        async with opened(replica="r7x") as replica:

            def call(request: Forwarded) -> AsyncGenerator[list[Message], None]:
                seen.append(request.replica)
                return _call(replica, request)

            app = Ingress(call, no_hashes, no_answers, 1 << 20)
            session = json.loads((await Client(app, "/v1/sessions", {"prompt": "Once"}).answer())[2])
            assert session["id"].endswith("_r7x")
            path = f"/v1/sessions/{session['id']}"
            assert (await Client(app, f"{path}/generate", {"max_tokens": 2}).answer())[0] == 200
            twins = json.loads((await Client(app, f"{path}/fork", {"n": 1}).answer())[2])["data"]
            assert twins[0]["id"].endswith("_r7x")
            assert (await Client(app, path.removeprefix("/v1"), None, "DELETE").answer())[0] == 200
            body = {"input": "Hi", "max_output_tokens": 2}
            stored = json.loads((await Client(app, "/v1/responses", body).answer())[2])
            more = {**body, "previous_response_id": stored["id"]}
            assert (await Client(app, "/v1/responses", more).answer())[0] == 200
            assert (await Client(app, f"/v1/responses/{stored['id']}", None, "GET").answer())[0] == 200

    run(test())
    assert seen == ["", "r7x", "r7x", "r7x", "", "r7x", "r7x"]


@pytest.mark.parametrize(
    ("path", "previous", "owner"),
    [
        (f"/v1/sessions/sess_{'a' * 32}_r-1/append", None, "r-1"),
        (f"/responses/resp_{'0' * 32}_x", None, "x"),
        (f"/v1/sessions/sess_{'a' * 32}", None, ""),
        ("/v1/sessions/else_r1", None, ""),
        ("/v1/sessions", None, ""),
        ("/v1/responses", f"resp_{'0' * 32}_x", "x"),
        ("/v1/responses", 3, ""),
        (f"/v1/models/sess_{'a' * 32}_r1", None, ""),
    ],
)
def test_the_replica_of_an_id(path: str, previous: object, owner: str) -> None:
    assert replica_of(path, previous) == owner


def test_metrics_of_all_replicas_have_a_label_more() -> None:
    async def test() -> None:
        async with opened() as replica:

            async def call_all(request: Forwarded) -> list[Whole]:
                return [await whole_answer(replica.app, request, name) for name in ("y", "x")]

            app = Ingress(lambda request: _call(replica, request), no_hashes, call_all, 1 << 20)
            await Client(app, "/v1/completions", {"prompt": "Once", "max_tokens": 2}).answer()
            status, headers, data = await Client(app, "/metrics", None, "GET").answer()
            assert (status, int(headers["content-length"])) == (200, len(data))
            one = await whole_answer(replica.app, Forwarded("GET", "/metrics"), "")
            found = parsed_metrics(data.decode())
            alone = parsed_metrics(one.body.decode())
            assert found.keys() == alone.keys()
            assert len(alone) >= 20
            for name, samples in alone.items():
                assert len(found[name]) == 2 * len(samples)
                assert {sample.labels["replica"] for sample in found[name]} == {"x", "y"}

    def parsed_metrics(text: str) -> dict[str, list[Any]]:
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families)
        samples = {
            family.name: [each for each in family.samples if each.labels.get("path") != "/metrics"]
            for family in families
        }
        return {name: found for name, found in samples.items() if found}

    run(test())


def test_sessions_of_all_replicas_are_one_list() -> None:
    kind = ((b"content-type", b"application/json"), (b"content-length", b"3"))
    of = {name: json.dumps({"object": "list", "data": [{"id": name}]}).encode() for name in "ba"}
    answers = [Whole(name, 200, kind, body) for name, body in of.items()]
    found = merged("/v1/sessions", answers)
    assert json.loads(found.body) == {"object": "list", "data": [{"id": "a"}, {"id": "b"}]}
    assert dict(found.headers)[b"content-length"] == str(len(found.body)).encode()
    refused = Whole("c", 401, kind, b"{}")
    assert merged("/v1/sessions", [*answers, refused]) is refused


def test_a_list_that_no_replica_gives_is_refused_for_now() -> None:
    async def test() -> None:
        app, _ = losing(0, [])
        status, headers, _ = await Client(app, "/v1/sessions", None, "GET").answer()
        assert (status, headers["retry-after"]) == (503, "5")

    run(test())
