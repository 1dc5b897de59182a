"""One thread for the engines of commands in this process, and a state folder for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyvelo.memory.cores import Cores


@pytest.fixture(autouse=True)
def _one_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside each other: threads that share a core spin for most of their time."""
    monkeypatch.setattr("pyvelo.memory.cores.find_cores", lambda: Cores(64, 1, 1, None))


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats keep their history here, and not in the home folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
