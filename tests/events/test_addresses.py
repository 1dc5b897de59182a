"""Paths of ipc addresses: files stay, and the socket of a live engine is not taken over."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pyvelo.config import KVEvents
from pyvelo.errors import ConfigError
from pyvelo.events.addresses import check_path
from pyvelo.events.publisher import Publisher


@pytest.mark.parametrize("name", ["endpoint", "replay"])
def test_a_file_at_the_path_is_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    for file in ("notes", "link"):
        given = {"endpoint": "tcp://127.0.0.1:*", name: f"ipc://{tmp_path}/{file}"}
        with pytest.raises(ConfigError, match=r"exists and is no socket: choose another path"):
            Publisher(KVEvents(**given))
    assert (tmp_path / "link").read_text() == "dear"


def test_a_folder_at_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path} is a folder: give the path of a file in it"):
        Publisher(KVEvents(f"ipc://{tmp_path}"))


def test_a_path_in_use_is_not_taken_over(tmp_path: Path) -> None:
    settings = KVEvents(f"ipc://{tmp_path}/events")
    first = Publisher(settings)
    try:
        with pytest.raises(ConfigError, match=r"events is in use by another process or engine"):
            Publisher(settings)
        with pytest.raises(ConfigError, match="in use"):
            Publisher(KVEvents(f"ipc://{tmp_path}/other", f"ipc://{tmp_path}/../{tmp_path.name}/other"))
        assert (tmp_path / "events").is_socket()
    finally:
        first.close()
    Publisher(settings).close()


def test_a_socket_that_nothing_listens_at_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(os.fspath(path))
    assert path.is_socket()
    Publisher(KVEvents(f"ipc://{path}")).close()


def test_a_socket_with_too_many_connections_is_in_use(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "events")
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(path)
        busy.listen(0)
        waiting.connect(path)
        with pytest.raises(ConfigError, match="in use"):
            check_path(f"ipc://{path}")


def test_addresses_without_a_path_are_left_to_zmq() -> None:
    for address in ("tcp://127.0.0.1:5557", "ipc://*", "ipc://@name", "ipc:///nowhere/at/all"):
        check_path(address)
