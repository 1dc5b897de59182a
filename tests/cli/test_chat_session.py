"""`pyvelo chat --session NAME`: a conversation that goes on, with its KV from the store."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pyvelo.cli.chat_loop import session_file
from pyvelo.errors import ConfigError
from tests import forks

from .ptys import PYVELO, in_a_terminal


def chat(home: Path, typed: bytes, *options: str) -> tuple[int, str, str]:
    places = {"XDG_STATE_HOME": str(home / "state"), "XDG_CACHE_HOME": str(home / "cache")}
    command = [*PYVELO, "chat", "--temperature", "0", *options]
    done = forks.run(command, input=typed, env={**os.environ, **places})
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_conversation_goes_on(tmp_path: Path) -> None:
    said = b"This is Anna Berger 4821.\nWhat is 12 + 30?\nWhat is 23 + 6?\nWhat is 1 + 1?\n"
    assert chat(tmp_path, said, "--session", "anna")[0] == 0
    code, out, err = chat(tmp_path, b"Who is Anna?\n", "--session", "anna")
    assert (code, err) == (0, "This chat goes on after 4 turns.\n")
    assert "Anna Berger 4821" in out
    assert "Anna Berger" not in chat(tmp_path, b"Who is Anna?\n", "--session", "other")[1]
    (file,) = (tmp_path / "state").rglob("anna.json")
    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["user", "assistant"] * 5
    assert file.stat().st_mode & 0o077 == 0
    assert list((tmp_path / "cache" / "pyvelo" / "kv").glob("??/*.kv"))


def test_a_terminal_says_that_it_goes_on(tmp_path: Path) -> None:
    chat(tmp_path, b"one\ntwo\n", "--session", "x", "-n", "4")
    places = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TERM": "dumb",
    }
    code, shown = in_a_terminal([*PYVELO, "chat", "--session", "x"], env=places, typed=b"/exit\n")
    assert code == 0
    assert b"goes on after 2 turns" in shown


def test_a_damaged_conversation_is_kept(tmp_path: Path) -> None:
    chat(tmp_path, b"one\n", "--session", "x", "-n", "4")
    (file,) = (tmp_path / "state").rglob("x.json")
    file.write_text("{")
    code, _, err = chat(tmp_path, b"two\n", "--session", "x", "-n", "4")
    assert (code, err.count("\n")) == (1, 1)
    assert "not a chat of /save" in err
    assert file.read_text() == "{"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "x" * 101, "a\nb"])
def test_names_that_are_no_part_of_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match="--session"):
        session_file(name)
