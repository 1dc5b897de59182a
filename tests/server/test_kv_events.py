"""`pyvelo serve --kv-events`: events of a process, its end, and errors of one line."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from pyvelo.cli.app import execute
from tests.events.subscribers import Subscriber, context

from .servers import WAIT
from .test_run import SMALL, Process, error_of, start, status_of

__all__ = ["context", "start"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

EVENTS = ("--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://127.0.0.1:*")


def address_of(process: Process) -> str:
    """Return the address that the second line names."""
    assert process.child.stdout is not None
    words = process.child.stdout.readline().split()
    assert words[:-1] == ["KV", "events", "are", "at"]
    return words[-1]


def ask(port: int, prompt: list[int]) -> None:
    assert status_of(port, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2}) == 200


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_events_of_a_process(start: Callable[..., Process], context: zmq.Context[Any], encoding: str) -> None:
    process = start(*SMALL, *EVENTS, "--kv-events-topic", "kv@a@demo", "--kv-events-encoding", encoding)
    port = process.wait_until_ready()
    follower = Subscriber(context, address_of(process), topic="kv@")
    follower.until_listed()
    prompt = list(range(10, 110))
    ask(port, prompt)
    follower.until(lambda: follower.consumer.hit(prompt) == 3)
    assert follower.topics == {b"kv@a@demo"}
    begin = time.monotonic()
    process.signal(signal.SIGTERM)
    status, _, errors = process.end()
    assert (status, "Traceback" in errors) == (0, False), errors
    assert time.monotonic() - begin < WAIT / 2, "a subscriber does not delay the end"


def test_tenants_have_keys_of_their_own(start: Callable[..., Process], context: zmq.Context[Any]) -> None:
    """Equal prompts of two tenants are two chains, and neither names the tenant nor its salt."""
    process = start(*SMALL, *EVENTS, PYVELO_API_KEY="sk-one,sk-two")
    port = process.wait_until_ready()
    follower = Subscriber(context, address_of(process))
    follower.until_listed()
    for key in ("sk-one", "sk-two"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
        body = json.dumps({"prompt": [9] * 70, "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
        assert connection.getresponse().status == 200
        connection.close()
    follower.until(lambda: len(follower.consumer.keys) == 4)
    salts = {key.salt for key in follower.consumer.prefixes()}
    assert len(salts) == 2
    assert all(salt is not None and salt.startswith("pyvelo-salt:") and "sk-" not in salt for salt in salts)


def test_errors_are_one_line_and_come_before_the_load() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        error = error_of("missing.gguf", "--port", "0", "--kv-events", address)
    assert f"{address} cannot be used: the port is in use" in error
    assert "missing.gguf" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-events", "5557"], "--kv-events '5557': give tcp://ADDRESS:PORT"),
        (
            ["--kv-events", "tcp://127.0.0.1:1", "--kv-events-replay", "x"],
            "--kv-events-replay 'x': give tcp:",
        ),
        (["--kv-events-replay", "tcp://127.0.0.1:1"], "need --kv-events"),
        (["--kv-events-topic", "kv"], "need --kv-events"),
        (["--kv-events", "tcp://127.0.0.1:1", "--kv-events-encoding", "json"], "give 'map' or 'array'"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert execute(["serve", "--port", "0", *options]) == 2
    assert words in capsys.readouterr().err
