"""Routers in front of two servers: affinity, streams, clients that leave, and a server that drains."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from scripts.bench._http import free_port
from tests.server.servers import WAIT, Client
from tests.server.test_run import Process

ROOT = Path(__file__).parents[2]
CONFIGS = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
SMALL = ("--ctx", "1024", "--kv-cache-bytes", "8M", "--threads", "1", "--quiet")
CHECKS = {"nginx": ["-t", "-c"], "haproxy": ["-c", "-f"]}
RUNS = {"nginx": ["-c"], "haproxy": ["-f"]}
KEYS = ("sk-alice", "sk-bob", "sk-carol", "sk-dave")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def program(name: str) -> str:
    """Return the path of a program; skip without it."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_program_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    config = ROOT / "examples/routers" / CONFIGS[name]
    prefix = ["-p", str(tmp_path)] if name == "nginx" else []
    command = [program(name), *prefix, *CHECKS[name], str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr


class Pair:
    """Two servers with keys, and a router in front of them."""

    def __init__(self, stack: ExitStack, *options: str) -> None:
        self._stack = stack
        self.servers = [Process(*SMALL, *options, PYVELO_API_KEY=",".join(KEYS)) for _ in range(2)]
        for server in self.servers:
            stack.enter_context(server.child)
            stack.callback(server.child.kill)
        self.ports = [server.wait_until_ready() for server in self.servers]
        self.port = free_port()

    def start(self, command: list[str]) -> None:
        """Start the router and wait until it reaches a server."""
        router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack.enter_context(router)
        self._stack.callback(router.terminate)
        self.until(lambda: self.get(self.port, "/health") == 200)

    def start_with(self, name: str, folder: Path) -> None:
        """Start a router with its example, whose ports are replaced."""
        text = (ROOT / "examples/routers" / CONFIGS[name]).read_text(encoding="utf-8")
        for old, new in {"8001": self.ports[0], "8002": self.ports[1], "8080": self.port}.items():
            assert text.count(f":{old}") == 1
            text = text.replace(f":{old}", f":{new}")
        config = folder / CONFIGS[name]
        config.write_text(text, encoding="utf-8")
        prefix = ["-p", str(folder)] if name == "nginx" else []
        self.start([program(name), *prefix, *RUNS[name], str(config)])

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT
        while not ready():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def get(self, port: int, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def ask(
        self, prompt: str, key: str = KEYS[0], session: str | None = None, port: int | None = None
    ) -> tuple[int, int]:
        """Return the prompt's tokens and how many of them were cached."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=WAIT)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        headers |= {"X-Session-Id": session} if session else {}
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
            assert response.status == 200, data
            usage = json.loads(data)["usage"]
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        finally:
            connection.close()

    def metric(self, number: int, name: str) -> float:
        """Return a number of /metrics of a server, over all labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[number], timeout=WAIT)
        try:
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"})
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = re.findall(rf"^pyvelo:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, text
        return sum(map(float, found))

    def stream(self, session: str) -> Client:
        """Begin a stream; return its client after the first event."""
        client = Client(self.port)
        headers = {"Authorization": f"Bearer {KEYS[0]}", "X-Session-Id": session}
        headers |= {"Content-Type": "application/json"}
        body = {"prompt": [8] * 5, "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 20}
        client.send("/v1/completions", body, headers)
        client.until(b"data:")
        return client

    def running(self) -> list[int]:
        """Return the numbers of the servers with a request."""
        return [number for number in (0, 1) if self.metric(number, "num_requests_running") > 0]


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    name: str = request.param
    program(name)
    with ExitStack() as stack:
        found = Pair(stack)
        found.start_with(name, tmp_path)
        yield found


def text(number: int) -> str:
    return f"Story {number}: " + "once upon a time there was a dog. " * 6


def test_affinity(pair: Pair) -> None:
    """A session meets its blocks again, and so does a key; both servers have sessions."""
    for number in range(16):
        total, cached = pair.ask(text(number), session=f"session-{number}")
        assert cached < total / 2
    for number in range(16):
        total, cached = pair.ask(text(number), session=f"session-{number}")
        assert cached > total / 2
    loads = [pair.metric(number, "prompt_tokens_total") for number in (0, 1)]
    assert min(loads) > 0, loads
    for number, key in enumerate(KEYS):
        pair.ask(text(20 + number), key)
    for number, key in enumerate(KEYS):
        total, cached = pair.ask(text(20 + number), key)
        assert cached > total / 2


def test_streams_are_not_held_back_and_clients_may_leave(pair: Pair) -> None:
    client = pair.stream("a")
    [number] = pair.running()
    client.close()
    pair.until(lambda: pair.metric(number, "num_requests_running") == 0)
    assert pair.metric(number, "generation_tokens_total") < 900


def test_a_server_that_drains_gets_nothing_new_and_ends_its_streams(pair: Pair) -> None:
    client = pair.stream("a")
    [number] = pair.running()
    pair.servers[number].signal(signal.SIGTERM)
    pair.until(lambda: pair.get(pair.ports[number], "/health") == 503)
    for session in ("a", "b", "c", "d"):
        pair.ask(text(1), session=session)
    rest = client.rest_of_stream()
    client.close()
    assert rest.count(b"data: {") > 100
    status, _, errors = pair.servers[number].end()
    assert (status, "Traceback" in errors) == (0, False)
    for session in ("a", "b", "c", "d"):
        pair.ask(text(2), session=session)


def test_errors_of_the_servers_arrive_unchanged(pair: Pair) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=WAIT)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a"}), {"Authorization": "Bearer no"})
    response = connection.getresponse()
    error: Any = json.loads(response.read())
    assert response.status == 401
    assert error["error"]["message"]
    connection.close()


# ---- vllm-router ----


def events_address(server: Process) -> str:
    assert server.child.stdout is not None
    return server.child.stdout.readline().split()[-1]


@pytest.fixture(params=["kv_aware", "cache_aware", "consistent_hash"])
def routed(request: pytest.FixtureRequest) -> Iterator[tuple[str, Pair]]:
    """Two servers that know ten prompts each, and then a router in front of them."""
    policy: str = request.param
    command = [program("vllm-router"), "--host", "127.0.0.1", "--policy", policy, "--prometheus-port"]
    with ExitStack() as stack:
        pair = Pair(stack, "--kv-events", "tcp://127.0.0.1:*")
        for number in range(20):
            pair.ask(text(number), port=pair.ports[number % 2])
        urls = [f"http://127.0.0.1:{port}" for port in pair.ports]
        command += [str(free_port()), "--port", str(pair.port), "--worker-urls", *urls]
        command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
        command += ["--health-failure-threshold", "1"]
        if policy == "kv_aware":
            command += ["--kv-event-block-size", "32", "--kv-event-model", "demo"]
            for url, server in zip(urls, pair.servers, strict=True):
                command += ["--kv-event-source", f"{url}={events_address(server)}"]
        pair.start(command)
        yield policy, pair


def test_vllm_router(routed: tuple[str, Pair]) -> None:
    policy, pair = routed
    time.sleep(2)  # for the listing of the blocks
    if policy == "kv_aware":
        for number in range(20):
            total, cached = pair.ask(text(number))
            assert cached > total / 2, "it knows what was cached before it started"
    for number in range(30, 40):
        pair.ask(text(number), session=f"session-{number}")
    if policy == "kv_aware":
        time.sleep(1)
    for number in range(30, 40):
        total, cached = pair.ask(text(number), session=f"session-{number}")
        assert cached > total / 2
    body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 2}
    connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=WAIT)
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    assert connection.getresponse().status == 200
    connection.close()
    client = pair.stream("session-30")
    [number] = pair.running()
    pair.servers[number].signal(signal.SIGTERM)
    pair.until(lambda: pair.get(pair.ports[number], "/health") != 200)
    time.sleep(2.5)  # its next look at /health
    for session in range(30, 40):
        pair.ask(text(session), session=f"session-{session}")
    assert client.rest_of_stream().count(b"data: {") > 100
    client.close()
