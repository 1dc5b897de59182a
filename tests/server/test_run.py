"""`pyvelo serve` as a process: its URL, signals, drains, exit codes and errors."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pyvelo.cli.app import execute
from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ClosedError, ConfigError
from pyvelo.server import process, run
from pyvelo.server.app import App
from pyvelo.server.run import Serve, check_address
from pyvelo.server.settings import Settings
from tests import forks

from .servers import WAIT, Client, body_of, events_of

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [8] * 5, "max_tokens": 400, "ignore_eos": True, "stream": True}
SMALL = ("--ctx", "512", "--kv-cache-bytes", "4M", "--threads", "1")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


class Process:
    """`pyvelo serve` with an empty environment of keys."""

    def __init__(
        self, *options: str, heed: Callable[[], object] = forks.heed_signals, **environment: str
    ) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "pyvelo", "serve", "--port", "0", *options],
            env={**os.environ, "PYVELO_API_KEY": "", "COLUMNS": "200", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed,
        )

    def wait_until_ready(self) -> int:
        """Return the port of the URL that is printed."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        found = re.fullmatch(r"(\S+) is served at http://127\.0\.0\.1:([0-9]+)/v1 \(Ctrl-C ends\)\n", line)
        assert found, line + self.end()[2]
        return int(found[2])

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, the rest of the output, and the errors."""
        output, errors = self.child.communicate(timeout=WAIT)
        return self.child.returncode, output, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Return a function that starts a server; what still runs at the end of the test is killed."""
    with ExitStack() as stack:

        def begin(*options: str, **environment: str) -> Process:
            process = Process(*options, **environment)
            stack.enter_context(process.child)
            stack.callback(process.child.kill)
            return process

        yield begin


def status_of(port: int, method: str, path: str, body: Any = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def wait_for_drain(port: int) -> None:
    """Ask until the signal has arrived."""
    while (status := status_of(port, "GET", "/health")) != 503:
        assert status == 200


Start = Callable[..., Process]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_drains(start: Start, number: int) -> None:
    """The stream in progress ends whole, new requests get 503, and the exit code is 0."""
    quiet = ("--quiet", "--model-name", "mine") if number == signal.SIGINT else ()
    process = start(*SMALL, *quiet)
    port = process.wait_until_ready()
    client = Client(port)
    client.send(COMPLETIONS, {**LONG, "logprobs": 20})
    begun = client.until(b"data:")
    process.signal(number)
    wait_for_drain(port)
    assert status_of(port, "POST", COMPLETIONS, {"prompt": "a"}) == 503
    events = events_of(body_of(begun + client.rest_of_stream()))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    client.close()
    code, output, errors = process.end()
    assert (code, output) == (0, "")
    if quiet:
        assert errors == ""
        assert events[0]["model"] == "mine"
    else:
        assert f"POST {COMPLETIONS} 200" in errors
        assert f"POST {COMPLETIONS} 503" in errors
        assert "Traceback" not in errors


def test_nohup_serves_on(start: Start) -> None:
    process = start(*SMALL, heed=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    port = process.wait_until_ready()
    process.signal(signal.SIGHUP)
    time.sleep(0.3)
    assert status_of(port, "GET", "/health") == 200
    process.signal(signal.SIGTERM)
    assert process.end()[0] == 0


def test_the_second_signal_ends_at_once(start: Start) -> None:
    process = start(*SMALL, "--drain", "1000")
    port = process.wait_until_ready()
    client = Client(port)
    client.send(COMPLETIONS, {**LONG, "prompt": [[8] * 5] * 16, "n": 16, "temperature": 1.0})
    client.until(b"data:")
    process.signal(signal.SIGTERM)
    wait_for_drain(port)
    process.signal(signal.SIGTERM)
    assert b'"code":"draining"' in client.rest()
    client.close()
    code, _, errors = process.end()
    assert code == 0
    assert "Traceback" not in errors
    assert [line for line in errors.splitlines() if not re.match(r"2[0-9-]+ [0-9:,]+ ", line)] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_load(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    async def load(config: EngineConfig, closed: threading.Event) -> Any:
        os.kill(os.getpid(), number)
        assert await asyncio.to_thread(closed.wait, WAIT)
        raise ClosedError("closed while it was loaded")

    monkeypatch.setattr(process, "open_engine_loop", load)
    served().run()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_error_of_the_load_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(config: EngineConfig, closed: threading.Event) -> Any:
        raise ConfigError("no such model")

    monkeypatch.setattr(process, "open_engine_loop", load)
    with pytest.raises(ConfigError, match="no such model"):
        served().run()


def test_a_signal_drains_for_the_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[float] = []
    drain = App.drain

    async def watched(app: App, seconds: float) -> None:
        drained.append(seconds)
        await drain(app, seconds)

    monkeypatch.setattr(App, "drain", watched)
    server = served()
    server.config = EngineConfig(model=DEMO_MODEL, n_ctx=64, n_threads=1, kv_cache_bytes=1 << 20)
    server.drain = 7.5
    server.ready = lambda url, serving: os.kill(os.getpid(), signal.SIGTERM)
    server.run()
    assert drained == [7.5]


def served() -> Serve:
    """Return a server that must not become ready."""

    def ready(url: str, serving: Any) -> None:
        raise AssertionError(url)

    config = EngineConfig(model=DEMO_MODEL)
    return Serve(config, Settings(), host="127.0.0.1", port=0, drain=0.0, ready=ready)


def error_of(*options: str) -> str:
    """Return the line of error of a server that does not start."""
    command = [forks.PYTHON, "-m", "pyvelo.cli", "serve", *options]
    environment = {**os.environ, "PYVELO_API_KEY": "", "COLUMNS": "200"}
    done = forks.run(command, env=environment, text=True)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    line: str = done.stderr
    return line


def test_a_port_in_use_is_an_error_of_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = error_of("--port", str(port))
    assert f"127.0.0.1, port {port}, cannot be used: Address already in use; give another --port" in error


def test_a_foreign_address_without_a_key_is_refused() -> None:
    error = error_of("--host", "0.0.0.0")
    assert error.startswith("pyvelo: --host 0.0.0.0: other machines could use")
    assert "--api-key-file" in error
    assert "--insecure" in error


def test_a_missing_model_and_a_missing_file_of_keys_are_errors() -> None:
    assert "missing.gguf" in error_of("missing.gguf", "--port", "0")
    assert "--api-key-file missing cannot be read (No such file" in error_of("--api-key-file", "missing")
    assert "--host 'no such host': give an address" in error_of("--host", "no such host", "--insecure")
    assert "--host no.invalid: " in error_of("--host", "no.invalid", "--insecure")
    assert "give another --host" in error_of("--host", "203.0.113.7", "--insecure")


@pytest.mark.parametrize(
    ("option", "values", "says"),
    [
        ("--model-name", ["", " ", "a\nb"], "give a name of printable characters"),
        ("--cors-origin", ["", "foo", "http://a.org/", "HTTP://A.org"], "give an origin as browsers send it"),
        ("--allow-host", ["", "a.org:80", "http://a.org", "[::1]"], "give a name without scheme"),
        ("--chat-template", ["", "missing"], "cannot be read ("),
    ],
)
def test_a_name_that_no_client_can_send_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, values: list[str], says: str
) -> None:
    for value in values:
        assert execute(["serve", "--port", "0", option, value]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"pyvelo: {option}")
        assert says in error


def test_a_wrong_template_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    assert "a built-in one: chatml" in error_of("--chat-template", str(file))
    for source, text in {"": "no Jinja", "{% for m in messages %}": "template.jinja, line 1: "}.items():
        file.write_text(source)
        assert text in error_of("--chat-template", str(file))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_address(host, False, False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.evil.example"])
def test_other_addresses_need_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        check_address(host, False, False)
    check_address(host, True, False)
    check_address(host, False, True)


@pytest.mark.parametrize("host", ["", "a b", "127.0.0.1:8000", "http://127.0.0.1", "[::1]", "*"])
def test_what_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="give an address or a name of this machine without port"):
        check_address(host, True, True)


def test_small_answers_do_not_wait_for_acknowledgements() -> None:
    """Without TCP_NODELAY each answer after the first of a connection waits 40 ms for the client's kernel."""

    async def main() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted_socket = writer.get_extra_info("socket")
            found.set_result(accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.transport.abort()

        with run.listen("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(accepted, sock=listener):
                with socket.create_connection(listener.getsockname()):
                    return await found

    assert asyncio.run(main())
