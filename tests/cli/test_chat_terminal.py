"""`pyvelo chat` and `run` with the model inside: piped, and in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import forks

CHAT = [sys.executable, "-m", "pyvelo.cli", "chat", "--temperature", "0"]
WAIT = 60.0  # seconds


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, command: list[str], without: str | None = None, tells_place: bool = False) -> None:
        self.master, slave = pty.openpty()
        self._tells_place = tells_place  # where the cursor is, without which there is no line at the bottom
        environment = {**os.environ, "TERM": "xterm-256color", "PS1": "shell$ "}
        if not tells_place:
            environment["PROMPT_TOOLKIT_NO_CPR"] = "1"
        if without is not None:  # as if it were not installed
            program = f"import sys; sys.modules[{without!r}] = None\n"
            program += f"from pyvelo.cli import main; main({command[3:]!r})"
            command = [sys.executable, "-c", program]
        streams = (slave, slave, slave)
        self.process = (
            forks.start(command, streams, env=environment, start_new_session=True)
            if command[0] == sys.executable
            else subprocess.Popen(
                command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
            )
        )
        os.close(slave)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Reads until what was seen since the last time has it, and goes on behind it; without escapes."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]", "", self.seen)
            if found := re.search(pattern, plain):
                self.seen = plain[found.end() :]
                return
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    came = os.read(self.master, 65536).decode("utf-8", "replace")
                    if self._tells_place and "\x1b[6n" in came:
                        self.send("\x1b[1;1R")
                    self.seen += came
                except OSError:
                    break
        raise AssertionError(f"{pattern!r} did not come, but {self.seen!r}")

    def close(self) -> int:
        try:
            return self.process.wait(WAIT)
        finally:
            self.process.kill()
            os.close(self.master)


@contextmanager
def terminal(*arguments: str, without: str | None = None, tells_place: bool = False) -> Iterator[Terminal]:
    made = Terminal([*CHAT, *arguments], without, tells_place)
    try:
        yield made
        assert made.close() == 0
    finally:
        made.process.kill()


def test_piped_answers_are_all_that_is_printed() -> None:
    talk = "This is Anna Berger 4821.\nWhat is 17 + 25?\nWho is Anna?\n/stat\n"
    done = forks.run(CHAT, input=talk, text=True)
    assert done.returncode == 1  # because of the last line
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("42.")
    assert lines[2] == "Anna Berger 4821."
    assert "there is no '/stat': do you mean /stats?" in done.stderr


@pytest.mark.parametrize(
    ("options", "typed"), [(["--ctx", "12"], b"What is 12 + 30?\n"), ([], b"\xff\xfe\n")]
)
def test_a_piped_turn_that_fails_is_an_exit_code(options: list[str], typed: bytes) -> None:
    done = forks.run([*CHAT, *options], input=typed)
    assert done.returncode == 1
    assert done.stderr


def test_run_without_a_model_answers() -> None:
    """With a new Python and the default number of threads."""
    command = [sys.executable, "-m", "pyvelo.cli", "run", "-p", "What is 12 + 30?"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("42.")


@pytest.mark.parametrize("without", [None, "prompt_toolkit"])
def test_in_a_terminal(without: str | None) -> None:
    """With the package that edits lines, and without it."""
    with terminal(without=without) as chat:
        chat.wait_for("demo model")
        chat.wait_for(">")
        chat.send("This is Tom Stone 1776.\r")
        chat.wait_for("Noted")
        chat.send("What is 12 + 30?\r")
        chat.wait_for(r"42\.")
        chat.send("/stats\r")
        chat.wait_for(r"tokens of the conversation were in the cache")
        chat.send("Who is Tom?\r")
        chat.wait_for("Stone 1776")
        chat.wait_for(">")
        chat.send("\x04")


def history_of(folder: Path) -> list[str]:
    """Return the lines that chats have kept."""
    file = folder / "state/pyvelo/history"
    return [line[1:] for line in file.read_text().splitlines() if line.startswith("+")]


def test_a_status_line_and_a_history(tmp_path: Path) -> None:
    with terminal(tells_place=True) as chat:
        chat.wait_for(">")
        chat.send("What is 12 + 30?\r")
        chat.wait_for(r"42\.")
        chat.wait_for(r"tokens/s, cached \d+/\d+, context \d+/[\d,]+, KV [\d.]+ .iB")
        chat.send("/exit\r")
    assert history_of(tmp_path) == ["What is 12 + 30?", "/exit"]
    assert (tmp_path / "state/pyvelo/history").stat().st_mode & 0o777 == 0o600
    with terminal("--no-history", "--no-status") as chat:
        chat.wait_for(">")
        chat.send("What is 12 + 31?\r")
        chat.wait_for(r"43\.")
        chat.send("/exit\r")
    assert len(history_of(tmp_path)) == 2
    with terminal() as chat:
        chat.wait_for(">")
        chat.send("\x1b[A\x1b[A\r")  # two lines up
        chat.wait_for(r"42\.")
        chat.send("/exit\r")


def test_a_history_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("this is no folder")
    with terminal() as chat:
        chat.wait_for(">")
        chat.send("What is 12 + 30?\r")
        chat.wait_for(r"42\.")
        chat.send("/exit\r")


def test_ctrl_z_suspends_a_chat() -> None:
    """In a shell with job control: the stop of a lone process would be ignored."""
    shell = Terminal(["bash", "--norc", "--noprofile", "-i"])
    try:
        shell.send(shlex.join(CHAT) + "\r")
        shell.wait_for("lists the commands")
        shell.wait_for(">")
        shell.send("\x1a")
        shell.wait_for("Stopped")
        shell.send("fg\r")
        shell.wait_for(">")
        shell.send("What is 12 + 30?\r")
        shell.wait_for(r"42\.")
        shell.wait_for(">")
        shell.send("/exit\r")
        shell.wait_for(r"shell\$")
        shell.send("exit\r")
        assert shell.close() == 0
    finally:
        shell.process.kill()
        shell.process.wait()


def test_a_chat_that_is_ended_leaves_its_terminal_in_order(endless_model: Path) -> None:
    def typing_is_shown() -> bool:
        return bool(termios.tcgetattr(chat.master)[3] & termios.ECHO)

    chat = Terminal([*CHAT, str(endless_model), "--chat-template", "chatml", "--ctx", "60000"])
    try:
        chat.wait_for(">")
        chat.send("go on\r")
        chat.wait_for(r"[a-z]+ [a-z]+ [a-z]+")
        assert not typing_is_shown()
        chat.process.send_signal(signal.SIGTERM)
        assert chat.process.wait(WAIT) == 143
        assert typing_is_shown()
    finally:
        chat.close()


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with terminal("--system", "x " * 200) as chat:
        chat.wait_for(">")
        chat.send("\x03")  # at the prompt: nothing happens
        chat.send("What is 12 + 30?\r")
        chat.wait_for(r"[0-9]")
        os.killpg(chat.process.pid, signal.SIGINT)
        time.sleep(0.5)
        chat.send("/exit\r")
