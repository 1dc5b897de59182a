"""One thread for the engines of commands in this process."""

from __future__ import annotations

import pytest

from pyvelo.memory.cores import Cores


@pytest.fixture(autouse=True)
def _one_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside each other: threads that share a core spin for most of their time."""
    monkeypatch.setattr("pyvelo.engine.engine.find_cores", lambda: Cores(1, 1, 1, None))
