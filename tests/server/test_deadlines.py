"""Requests whose time is up: a status in the queue, a finish reason in an answer."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pyvelo.server import app as app_module

from .conftest import Serve
from .servers import WAIT, Server, body_of, events_of

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [8] * 20, "max_tokens": 450, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("by_header", [False, True], ids=["field", "header"])
def test_a_deadline_in_the_queue_is_a_status_of_its_own(
    server: Server, stream: bool, by_header: bool
) -> None:
    body = {**SHORT, "stream": stream, **({} if by_header else {"timeout": 0})}
    answer = server.post(COMPLETIONS, body, {"Request-Timeout-Ms": "0"} if by_header else {})
    assert answer.status == 504
    assert answer.headers["x-should-retry"] == "false"
    assert (answer.error["code"], answer.error["type"]) == ("timeout", "timeout_error")
    assert "0 s" in answer.error["message"]
    server.until_idle()


def test_the_field_counts_and_not_the_header(server: Server) -> None:
    answer = server.post(COMPLETIONS, {**SHORT, "timeout": 1000}, {"Request-Timeout-Ms": "0"})
    assert answer.status == 200
    assert server.post(COMPLETIONS, SHORT, {"Request-Timeout-Ms": "1000000"}).status == 200
    for wrong in ("soon", "-1", "1.5", "9" * 13):
        answer = server.post(COMPLETIONS, SHORT, {"Request-Timeout-Ms": wrong})
        assert (answer.status, answer.error["param"]) == (400, "Request-Timeout-Ms")


def pass_time(server: Server) -> None:
    """Let all deadlines pass."""
    inbox = server.serving.engine.core.inbox
    inbox._clock = lambda: time.perf_counter() + 10_000.0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_deadline_of_an_answer_in_progress_ends_it(serve: Serve, stream: bool) -> None:
    server = serve()
    answers = []
    body = {**LONG, "timeout": 1000, "stream": stream}
    with server.paused_at(lambda stats: stats.completion_tokens == 5) as wait:
        thread = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, body)))
        thread.start()
        wait()
        pass_time(server)
    thread.join(WAIT)
    [answer] = answers
    assert answer.status == 200
    if stream:
        choices = [event["choices"][0] for event in events_of(answer.data)]
        assert [choice["finish_reason"] for choice in choices][-1] == "timeout"
        assert 1 < len(choices) < 10
    else:
        assert answer.json["choices"][0]["finish_reason"] == "timeout"
        assert answer.json["usage"]["completion_tokens"] == 5
    server.until_idle()


def test_a_deadline_in_the_queue_after_a_ping_ends_the_stream(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status has been sent, so the finish reason says it."""
    server = serve(max_num_seqs=1)
    monkeypatch.setattr(app_module, "TICK_SECONDS", 0.005)
    monkeypatch.setattr(app_module, "PING_SECONDS", 0.01)
    with server.client() as runs, server.client() as waits:
        with server.paused_at(lambda stats: stats.completion_tokens == 1) as wait:
            runs.send(COMPLETIONS, LONG)
            wait()
            waits.send(COMPLETIONS, {**SHORT, "timeout": 1000, "stream": True})
            found = waits.until(b": ping")
            pass_time(server)
        [event] = events_of(body_of(found + waits.rest_of_stream()))
        assert event["choices"][0]["finish_reason"] == "timeout"
    server.until_idle()
