"""Threads with deep stacks in a forked process."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from pyvelo.grammar.limits import start_deep

WAIT = 60  # seconds until something hangs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_process_that_is_forked_during_a_start_starts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits neither the lock of the start nor the size of its stack."""
    before, start, children = threading.stack_size(), threading.Thread.start, list[int]()

    def run_in_child() -> None:
        signal.alarm(WAIT)
        same, ran = threading.stack_size() == before, threading.Event()
        start_deep(ran.set, "inner")
        os._exit(0 if same and ran.wait(WAIT) else 1)

    def fork_and_start(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        children.append(os.fork())
        if children == [0]:
            run_in_child()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fork_and_start)
    start_deep(lambda: None, "outer")
    assert os.waitpid(children[0], 0)[1] == 0
    assert threading.stack_size() == before
