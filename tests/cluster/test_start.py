"""Checks before Ray starts the replicas: the port, and the CPUs and GPUs of the cluster."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from pyvelo.cluster import start
from pyvelo.cluster.options import Options, parse
from pyvelo.cluster.start import check_port, check_resources, lacking, only_command_at, prefer_fast_calls
from pyvelo.errors import ConfigError


def parsed(*arguments: str) -> Options:
    found = parse([*arguments, "--threads", "1"])
    assert isinstance(found, Options)
    return found


class Proxy(BaseHTTPRequestHandler):
    """Proxy of Ray Serve, as far as its health goes."""

    body = b"success"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body if self.path == "/-/healthz" else b"")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Other(Proxy):
    body = b"another server"


@pytest.mark.parametrize("kind", [Proxy, Other])
def test_a_port_in_use_is_refused_unless_ray_serve_has_it(kind: type[Proxy]) -> None:
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            if kind is Proxy:
                check_port("127.0.0.1", server.server_port)
            else:
                with pytest.raises(ConfigError, match=r"cannot be used: .* give another --port"):
                    check_port("127.0.0.1", server.server_port)
        finally:
            server.shutdown()
            thread.join()


def test_a_free_port_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cpus", "2"), ""),
        (("--cpus", "2.1"), "replicas and ingresses need 2.1 CPUs, and Ray has 2: give less --cpus, or"),
        (
            ("--cpus", "1", "--replicas", "3", "--ingress-cpus", "0.1"),
            "replicas and ingresses need 3.1 CPUs, and Ray has 2: give less --cpus or fewer --replicas",
        ),
        (("--cpus", "1", "--autoscale", "1:9"), ""),
        (("--cpus", "1.1", "--autoscale", "2:9"), "replicas and ingresses need 2.2 CPUs"),
        (("--cpus", "0.5", "--gpus", "1"), "replicas and ingresses need 1 GPUs, and Ray has 0"),
    ],
)
def test_what_a_cluster_lacks(arguments: tuple[str, ...], words: str) -> None:
    options, there = parsed(*arguments), {"CPU": 2.0, "memory": 1e9}
    assert lacking(options, there).startswith(words)
    assert bool(lacking(options, there)) == bool(words)
    if words:
        with pytest.raises(ConfigError):
            check_resources(options, there, is_fixed=True)
        assert check_resources(options, there, is_fixed=False).endswith("; waiting for the cluster to grow")
    else:
        assert check_resources(options, there, is_fixed=True) == ""


def test_one_cluster_has_a_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with only_command_at(8000):
        with (
            pytest.raises(ConfigError, match="another cluster of yours has port 8000"),
            only_command_at(8000),
        ):
            pass
        with only_command_at(8001):
            pass
    with only_command_at(8000):
        pass


@pytest.mark.parametrize(
    ("address", "chosen", "expected"),
    [("", None, "1"), ("local", None, "1"), ("", "0", "0"), ("10.0.0.1:6379", None, None)],
)
def test_calls_are_fast_unless_the_user_chose_otherwise(
    monkeypatch: pytest.MonkeyPatch, address: str, chosen: str | None, expected: str | None
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    for name in start._FAST:
        monkeypatch.setenv(name, chosen or "")
        if chosen is None:
            monkeypatch.delenv(name)
    prefer_fast_calls()
    assert os.environ.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == expected
