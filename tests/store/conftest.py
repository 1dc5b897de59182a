"""Stores to test: a folder, and a Redis server that the tests start."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyvelo.store.base import BlockStore
from pyvelo.store.files import FileStore


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server that stores nothing on disk; yield its address and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield f"valkey://127.0.0.1:{port}/0", server
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with redis_server(tmp_path_factory.mktemp("redis")) as (address, _):
        yield address


@pytest.fixture(params=["files", "valkey"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], BlockStore]]:
    """Return what opens the same store each time."""
    opened: list[BlockStore] = []
    if request.param == "valkey":
        from pyvelo.store.valkey import ValkeyStore

        address: str = request.getfixturevalue("redis")
        ValkeyStore(address).purge(None)

    def make() -> BlockStore:
        store = FileStore(tmp_path / "kv") if request.param == "files" else ValkeyStore(address)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()
