"""The bar of a loading model: when it is shown, on which stream, and after Ctrl-C."""

from __future__ import annotations

import os
import pty
import tempfile
from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.cli.conversation import Message
from pyvelo.cli.progress import SHOW_AFTER, LoadingBar
from pyvelo.cli.talker import LlmTalker
from tests import forks

from .ptys import drain
from .test_info import run_cli


class Recorded:
    """A bar that records its calls."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.closed = False

    def show(self, share: float) -> None:
        assert not self.closed
        self.shares.append(share)

    def close(self) -> None:
        self.closed = True


class Load:
    """A load in a time of its own."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.bars: list[Recorded] = []
        self.bar = LoadingBar(self._open, lambda: self.time)

    def _open(self) -> Recorded:
        self.bars.append(Recorded())
        return self.bars[-1]

    def reach(self, share: float, seconds: float) -> None:
        self.time = 1000.0 + seconds
        self.bar(share)


def test_a_quick_load_shows_nothing() -> None:
    load = Load()
    for step in range(10):
        load.reach(step / 10, SHOW_AFTER * step / 10)
    load.reach(1.0, SHOW_AFTER * 3)  # there is nothing left to wait for
    load.bar.close()
    assert load.bars == []


def test_a_slow_load_shows_a_bar_from_then_on() -> None:
    load = Load()
    load.reach(0.2, SHOW_AFTER * 0.9)
    assert load.bars == []
    load.reach(0.3, SHOW_AFTER)
    load.reach(0.7, SHOW_AFTER * 2)
    load.reach(1.0, SHOW_AFTER * 3)
    assert [bar.shares for bar in load.bars] == [[0.3, 0.7, 1.0]]
    assert load.bars[0].closed
    load.bar.close()


def test_every_wait_has_its_time() -> None:
    load = Load()
    load.reach(0.0, 0.0)
    load.reach(0.9, SHOW_AFTER * 2)
    load.reach(1.0, SHOW_AFTER * 3)
    load.reach(0.0, SHOW_AFTER * 30)  # the user took a while to ask something
    load.reach(0.9, SHOW_AFTER * 30.9)
    assert [bar.shares for bar in load.bars] == [[0.9, 1.0]]
    load.reach(0.95, SHOW_AFTER * 31)
    assert [bar.shares for bar in load.bars] == [[0.9, 1.0], [0.95]]
    load.bar.close()  # it was stopped
    assert load.bars[1].closed
    load.reach(0.97, SHOW_AFTER * 40)  # and goes on
    load.reach(1.0, SHOW_AFTER * 41)
    assert [bar.shares for bar in load.bars] == [[0.9, 1.0], [0.95], [0.97, 1.0]]
    assert all(bar.closed for bar in load.bars)


def test_an_answer_that_is_stopped_leaves_no_bar(packed_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyvelo.cli.progress.SHOW_AFTER", 0.0)
    bars: list[Recorded] = []

    class Stopped(Recorded):
        def show(self, share: float) -> None:
            super().show(share)
            if len(bars) == 2 and share > 0.3:
                raise KeyboardInterrupt

    def open_bar() -> Recorded:
        bars.append(Stopped())
        return bars[-1]

    bar = LoadingBar(open_bar)
    asked: list[Message] = [{"role": "user", "content": "Once"}]
    with LLM(packed_model, n_threads=2, progress=bar) as llm:
        talker = LlmTalker(llm, "", SamplingParams(max_tokens=2), {}, bar)
        with pytest.raises(KeyboardInterrupt):
            list(talker.stream(asked))
        assert [bar.closed for bar in bars] == [True, True]
        list(talker.stream(asked))
    assert [bar.closed for bar in bars] == [True, True, True]
    assert bars[2].shares[0] == bars[1].shares[-1]
    assert bars[2].shares[-1] == 1.0


PROGRAM = """
import os, signal, sys
from pyvelo.cli import main, progress
progress.SHOW_AFTER = 0.0  # as if every load were a slow one
call = progress.LoadingBar.__call__
shares = []
def stopped(self, share):
    call(self, share)
    shares.append(share)
    if sys.argv[1] == "stop" or (1.0 in shares and 0.3 < share < 1.0):
        os.kill(os.getpid(), signal.SIGINT)
if sys.argv[1] != "run":
    progress.LoadingBar.__call__ = stopped
main(sys.argv[2:])
"""


def in_a_terminal(*arguments: str) -> tuple[int, str, str]:
    """Return exit code, standard output (no terminal) and what the terminal at standard error showed."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as out:
        command = [forks.PYTHON, "-c", PROGRAM, *arguments]
        process = forks.start(command, (nothing, out, slave), env=environment)
        os.close(slave)
        shown = drain(master)
        os.close(master)
        code = process.wait(60)
        out.seek(0)
        return code, out.read().decode(), shown.decode()


def test_a_terminal_sees_the_bar_and_the_pipe_does_not(tiny_model: Path) -> None:
    asked = ["run", str(tiny_model), "-p", "Once", "-n", "3"]
    code, out, shown = in_a_terminal("run", *asked)
    piped = forks.run([forks.PYTHON, "-m", "pyvelo.cli", *asked], text=True, check=True)
    assert (code, out) == (0, piped.stdout)
    assert f"loading {tiny_model.name}" in shown
    assert "\x1b[2K" in shown[shown.rindex("loading") :]  # it is gone again, and the cursor is back
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") > 0


def test_a_terminal_sees_the_first_step_pack(packed_model: Path) -> None:
    code, out, shown = in_a_terminal(
        "run", "run", str(packed_model), "-p", "Once", "-n", "3", "--threads", "2"
    )
    assert (code, out != "") == (0, True)
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 2  # a bar for the load, and one for that


def test_ctrl_c_while_loading_ends_it_cleanly(tiny_model: Path) -> None:
    code, out, shown = in_a_terminal("stop", "run", str(tiny_model), "-p", "Once", "-n", "3")
    assert (code, out) == (130, "")
    assert "loading" in shown
    assert "Traceback" not in shown
    assert shown.count("\x1b[?25h") == 1


def test_ctrl_c_while_the_first_step_packs_ends_it_cleanly(packed_model: Path) -> None:
    code, out, shown = in_a_terminal(
        "stop-packing", "run", str(packed_model), "-p", "Once", "-n", "3", "--threads", "2"
    )
    assert (code, out) == (130, "")
    assert "Traceback" not in shown
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 2


def test_nothing_is_shown_without_a_terminal(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyvelo.cli.progress.SHOW_AFTER", 0.0)
    code, _, err = run_cli(capsys, "run", tiny_model, "-p", "Once", "-n", "3")
    assert (code, err) == (0, "")
