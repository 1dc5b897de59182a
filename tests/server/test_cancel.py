"""Clients that leave, and the end of the server: requests end, and nothing is left of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pyvelo.engine.stats import EngineStats
from pyvelo.server import connection

from .conftest import Serve
from .servers import WAIT, Server, body_of, events_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"prompt": [8] * 20, "max_tokens": 450, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}


def check_alive(server: Server) -> None:
    """Check that nothing is left of the requests, and that the next one is answered."""
    server.until_idle()
    assert server.ask(COMPLETIONS, SHORT)["usage"]["completion_tokens"] == 2
    server.until_idle()


# ---- disconnects ----

MOMENTS: dict[str, tuple[dict[str, Any], Callable[[EngineStats], bool]]] = {
    "prefill": (LONG | {"prompt": [8] * 300}, lambda stats: stats.running == 1),
    "the first token": (LONG, lambda stats: stats.completion_tokens == 1),
    "decode": (LONG, lambda stats: stats.completion_tokens == 9),
    "samples": (LONG | {"n": 4, "temperature": 1.0}, lambda stats: stats.completion_tokens >= 9),
    "several prompts": (LONG | {"prompt": [[8] * 40, [9] * 200, [7]]}, lambda stats: stats.running >= 2),
}


@pytest.fixture
def server_of_small_steps(serve: Serve) -> Server:
    return serve(max_batch_tokens=32, max_num_seqs=8)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_client_that_leaves_ends_its_request_within_a_step(
    server_of_small_steps: Server, moment: str, stream: bool, reset: bool
) -> None:
    server = server_of_small_steps
    body, condition = MOMENTS[moment]
    with server.client() as client, server.paused_at(condition) as wait:
        client.send(COMPLETIONS, {**body, "stream": stream})
        wait()
        begun = server.serving.engine._picture()
        client.close(reset)
        server.until_open(0)
    server.until_idle()
    ended = server.serving.engine.stats()
    assert ended.steps <= begun.steps + 1
    assert ended.completion_tokens < 60
    check_alive(server)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n_behind", [1, connection.MAX_PIPELINED - 1])
def test_a_client_with_requests_behind_the_first_may_leave(serve: Serve, stream: bool, n_behind: int) -> None:
    server = serve()
    with server.client() as client, server.paused_at(lambda stats: stats.completion_tokens == 9) as wait:
        for _ in range(1 + n_behind):
            client.send(COMPLETIONS, {**LONG, "stream": stream})
        wait()
        begun = server.serving.engine._picture()
        client.close()
        server.until_open(0)
    server.until_idle()
    assert server.serving.engine.stats().steps <= begun.steps + 1
    check_alive(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_the_queue_never_runs(serve: Serve, path: str, stream: bool) -> None:
    server = serve(max_num_seqs=1)
    admission = server.serving.admission
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": "Hello"}
    with server.client() as runs, server.client() as waits:
        with server.paused_at(lambda stats: stats.completion_tokens == 1) as wait:
            runs.send(COMPLETIONS, {**LONG, "max_tokens": 30, "stream": True})
            wait()
            waits.send(path, {**asked, "stream": stream})
            server.until(lambda: admission.queued_tokens() > 0)
            waits.close()
            server.until_open(1)
            assert admission.queued_tokens() == 0
        assert len(events_of(body_of(runs.rest_of_stream()))) > 1
    server.until_idle()
    assert server.serving.engine.stats().prompt_tokens == 20  # of the other request alone
    check_alive(server)


@pytest.mark.parametrize("sent", [b"", b'{"prompt": "a'])
def test_a_client_may_leave_while_its_body_arrives(
    serve: Serve, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(n_ctx=64)
    with server.client() as client:
        client.send(COMPLETIONS, sent, length=1000)
        server.until(lambda: server.app._reading.total() == 1)
        client.close()
    server.until(lambda: server.app._reading.total() == 0)
    check_alive(server)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a", "pooling": "mean"}),
    ],
)
def test_a_client_may_leave_while_its_request_is_prepared(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """The thread that tokenizes goes on alone; what it makes is dropped."""
    server = serve(n_ctx=64)
    begun, go_on, model = threading.Event(), threading.Event(), server.serving.engine.model
    tokenize = model.tokenize

    def slow(*arguments: Any, **options: Any) -> list[int]:
        begun.set()
        assert go_on.wait(WAIT)
        return tokenize(*arguments, **options)

    monkeypatch.setattr(model, "tokenize", slow)
    with server.client() as client:
        client.send(path, body)
        assert begun.wait(WAIT)
        client.close()
        server.until_open(0)
        assert len(server.serving.admission) == 0
        go_on.set()
    check_alive(server)
    assert server.serving.engine.stats().completion_tokens == 2  # of the check alone


def test_a_client_may_leave_while_its_texts_are_embedded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(n_ctx=64)
    embeddings = server.serving.engine.embeddings
    begun, ended = threading.Event(), threading.Event()
    embed = embeddings.embed

    def watched(texts: Any, pooling: Any, normalize: Any, stopped: Callable[[], bool], lora: Any) -> Any:
        begun.set()
        deadline = threading.Event()
        while not stopped():
            assert not deadline.wait(0.001)
        try:
            return embed(texts, pooling, normalize, stopped, lora)
        finally:
            ended.set()

    monkeypatch.setattr(embeddings, "embed", watched)
    with server.client() as client:
        client.send("/v1/embeddings", {"input": ["a", "b"], "pooling": "mean"})
        assert begun.wait(WAIT)
        client.close()
        assert ended.wait(WAIT)
    check_alive(server)


def test_many_clients_that_leave_at_any_moment_leave_nothing(serve: Serve) -> None:
    server = serve(max_num_seqs=4, max_batch_tokens=64)
    clients = [server.client() for _ in range(24)]
    for number, opened in enumerate(clients):
        with opened as client:
            body = {**LONG, "prompt": [number % 5] * (7 * number + 1), "n": 1 + number % 3}
            client.send(COMPLETIONS, {**body, "stream": number % 2 == 0, "echo": number % 4 == 0})
            if number % 2 == 0 and number % 3 == 0:
                client.until(b"data:")
    check_alive(server)


def test_a_request_after_another_on_one_connection(server: Server) -> None:
    """The end of an answer is no disconnect of the next request."""
    with server.client() as client:
        for _ in range(3):
            client.send(COMPLETIONS, {**SHORT, "stream": True})
            assert len(events_of(body_of(client.rest_of_stream()))) > 0
            client.send(COMPLETIONS, SHORT)
            assert b" 200 " in client.answer()


# ---- the end ----


def test_draining_refuses_new_requests_and_ends_the_others(serve: Serve) -> None:
    server = serve()
    body = {**LONG, "max_tokens": 30, "stream": True}
    with server.client() as client:
        with server.paused_at(lambda stats: stats.completion_tokens == 3) as wait:
            client.send(COMPLETIONS, body)
            wait()
            drained = server.drain(WAIT)
            server.call(lambda: None)
            refused = server.post(COMPLETIONS, SHORT)
            assert (refused.status, refused.error["code"]) == (503, "draining")
            assert server.get("/health").status == 503
            assert server.get("/health").json == {"status": "draining"}
            assert server.get("/metrics").status == 200
            assert not drained.done()
        events = events_of(body_of(client.rest_of_stream()))
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    drained.result(WAIT)
    assert server.serving.engine.stats().blocks_used == 0


def test_the_end_of_the_drain_cancels_what_is_left(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(max_num_seqs=1)
    with server.client() as whole, server.client() as waits, server.client() as stream:
        with server.paused_at(lambda stats: stats.completion_tokens == 5) as wait:
            stream.send(COMPLETIONS, {**LONG, "stream": True})
            wait()
            begin = stream.until(b"data:")
            whole.send(COMPLETIONS, LONG)
            waits.send(COMPLETIONS, b"{", length=10)
            server.until(lambda: len(server.serving.admission) + server.app._reading.total() == 3)
            drained = server.drain(0.0)
            for client in (whole, waits):
                found = client.until(b"\n")
                assert b" 503 " in found
        drained.result(WAIT)
        *_, last = events_of(body_of(begin + stream.rest_of_stream()))
        assert (last["error"]["code"], last["error"]["message"]) == (
            "draining",
            "the server ends before the answer is complete",
        )
    server.until_idle()
    assert not [record for record in caplog.records if "500" in record.message or record.exc_info]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("begun", [False, True], ids=["before the answer", "within the answer"])
def test_an_error_of_a_step_ends_its_requests_and_no_other(serve: Serve, stream: bool, begun: bool) -> None:
    server = serve(n_ctx=64)
    core, step = server.serving.engine.core, server.serving.engine.core.step
    n_left = 3 if begun else 0

    def fail() -> bool:
        nonlocal n_left
        if n_left:
            n_left -= 1
            return step()
        core.step = step  # type: ignore[method-assign]
        raise ZeroDivisionError("a defect")

    core.step = fail  # type: ignore[method-assign]
    answer = server.post(COMPLETIONS, {**SHORT, "max_tokens": 20, "stream": stream})
    if answer.status == 200:
        assert stream
        *events, last = events_of(answer.data)
        assert all(event["choices"][0]["finish_reason"] is None for event in events)
        error = last["error"]
    else:
        assert (answer.status, stream and begun) == (500, False)
        error = answer.error
    assert error["type"] == "server_error"
    assert "a defect" not in error["message"]  # it is in the log
    check_alive(server)
