"""`pyvelo chat --session NAME`: a conversation that goes on, with its KV from the store."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pyvelo.cli.app import execute
from pyvelo.cli.chat import Chat
from pyvelo.cli.chat_loop import run_lines
from pyvelo.cli.chat_session import ChatSession
from pyvelo.cli.conversation import Conversation
from pyvelo.errors import ConfigError
from tests import cli_schema, forks

from .ptys import PYVELO, in_a_terminal
from .test_chat import FakeScreen, FakeTalker

Captured = pytest.CaptureFixture[str]


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


@pytest.mark.parametrize(
    "damage", [b"{", b"\xff\xfe", b"", b"[]", b'{"format": "pyvelo chat 1", "messages": [1]}']
)
def test_a_damaged_conversation_is_kept(tmp_path: Path, damage: bytes) -> None:
    chat(tmp_path, b"one\n", "--session", "x", "-n", "4")
    (file,) = (tmp_path / "state").rglob("x.json")
    file.write_bytes(damage)
    code, _, err = chat(tmp_path, b"two\n", "--session", "x", "-n", "4")
    assert (code, err.count("\n")) == (2, 1)
    assert f"--session x: {file} is damaged (" in err
    assert "move it away or take another name" in err
    assert file.read_bytes() == damage


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no such signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, getattr(signal, "SIGHUP", None), signal.SIGKILL], ids=str)
def test_a_chat_that_is_killed_has_kept_its_turns(tmp_path: Path, number: int) -> None:
    places = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [*PYVELO, "chat", "--session", "x", "-n", "4"]

    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **places},
        preexec_fn=forks.heed_signals,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        for _ in range(600):
            files = list((tmp_path / "state").rglob("x.json"))
            if files and "two" in files[0].read_text():
                break
            time.sleep(0.05)
        code, _, err = chat(tmp_path, b"three\n", "--session", "x", "-n", "4")
        assert code == 2
        assert "another chat has it open" in err
        process.send_signal(number)
        process.wait(30)
    assert chat(tmp_path, b"three\n", "--session", "x", "-n", "4")[2] == "This chat goes on after 2 turns.\n"


def test_a_signal_in_an_answer_keeps_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    session, talker = ChatSession("x"), FakeTalker()
    talker.fail = SystemExit(143)
    with pytest.raises(SystemExit):
        run_lines(Chat(talker, FakeScreen(["one"]), Conversation(), "show"), session)
    assert [turn.answer for turn in session.load(None).turns] == ["answer "]
    session.close()


def test_a_state_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    code, out, err = chat(tmp_path, b"one\n", "--session", "x", "-n", "4")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pyvelo: --session x: ")


def test_a_note_tells_that_a_turn_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    session = ChatSession("x")
    session.file.mkdir()
    screen = FakeScreen(["one"])
    run_lines(Chat(FakeTalker(), screen, Conversation(), "show"), session)
    assert "the session was not written to" in screen.notes[-1]
    assert "/save FILE" in screen.notes[-1]
    assert not list(tmp_path.rglob("*.part"))
    session.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "x" * 101, "a\nb", "\u65e5" * 40])
def test_names_that_are_no_part_of_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match="--session"):
        ChatSession(name)


def test_a_chat_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("one", "two", "three"):
        session = ChatSession(name)
        session.keep(Conversation())
        session.close()
    assert execute(["rm", "--session", "one", "--yes"]) == 0
    assert capsys.readouterr().out == "removed the chat one and 0 records of its KV\n"
    assert execute(["rm", "--session", "two", "-y", "--json"]) == 0
    answer = capsys.readouterr().out
    cli_schema.check("rm", answer)
    assert json.loads(answer)["session"] == "two"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["three.json", "three.lock"]

    assert execute(["rm", "--session", "one", "--yes"]) == 2
    assert "--session one: there is no such chat; there are: three" in capsys.readouterr().err
    session = ChatSession("three")
    assert execute(["rm", "--session", "three", "--yes"]) == 2
    assert "another chat has it open" in capsys.readouterr().err
    session.close()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert execute(["rm", "--session", "three"]) == 2
    assert "give --yes" in capsys.readouterr().err
    for wrong in ([], ["org/repo:Q4_K_M", "--session", "three"]):
        assert execute(["rm", *wrong]) == 2
        assert "give a model as ORG/REPO:QUANT, or a chat as --session NAME" in capsys.readouterr().err
    assert session.file.exists()
    assert execute(["rm", "--session", "none", "-y", "--kv-store", str(tmp_path / "none")]) == 2
    assert {path.name for path in session.file.parent.iterdir()} == {"three.json", "three.lock"}


def test_a_chat_is_removed_if_the_user_agrees(tmp_path: Path) -> None:
    chat(tmp_path, b"one\n", "--session", "x", "-n", "4")
    places = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for typed, code, said in ((b"\n", 1, b"nothing is removed"), (b"y\n", 0, b"removed the chat x")):
        found, shown = in_a_terminal([*PYVELO, "rm", "--session", "x"], env=places, typed=typed)
        assert (found, said in shown) == (code, True)
    assert not list((tmp_path / "state").rglob("x.*"))


@pytest.mark.parametrize("own_store", [False, True])
def test_a_chat_leaves_no_blocks_behind(tmp_path: Path, own_store: bool) -> None:
    where = ["--kv-store", str(tmp_path / "own")] if own_store else []
    said = b"This is Anna Berger 4821.\n" * 8
    for name in ("one", "two"):
        assert chat(tmp_path, said, "--session", name, *where)[0] == 0

    def n_records() -> int:
        return len(list(tmp_path.rglob("*.kv")))

    n_before = n_records()
    places = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {**os.environ, **places}
    wrong = [*PYVELO, "rm", "--session", "one", "--yes", "--kv-store", str(tmp_path / "typo")]
    assert forks.run(wrong, env=environment).returncode == 2
    assert not (tmp_path / "typo").exists()
    command = [*PYVELO, "rm", "--session", "one", "--yes", "--json", *where]
    report = json.loads(forks.run(command, env=environment).stdout)
    assert report["kv_records"] == n_before // 2 > 0
    assert n_records() == n_before // 2
    if own_store:  # forgotten at first: it is found although the conversation has gone
        assert forks.run([*PYVELO, "rm", "--session", "two", "--yes"], env=environment).returncode == 0
        assert n_records() == n_before // 2
        assert (
            forks.run([*PYVELO, "rm", "--session", "two", "--yes", *where], env=environment).returncode == 0
        )
        assert n_records() == 0


def test_a_fork_says_which_conversation_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    session = ChatSession("x")
    screen = FakeScreen(["one", "/fork", "two", "/fork", "/fork 1"])
    run_lines(Chat(FakeTalker(), screen, Conversation(), "show"), session)
    assert sum("keeps the conversation that you are in" in note for note in screen.notes) == 1
    assert [turn.user for turn in session.load(None).turns] == ["one"]
    session.close()


def test_a_chat_without_a_store_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    opened: list[object] = []
    monkeypatch.setattr("pyvelo.cli.chat_session.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("pyvelo.cli.chat_loop.open_chat", lambda *given: opened.append(given) or 0)
    assert execute(["chat", "--session", "x"]) == 0
    assert 'pip install "pyvelo[store]"' in capsys.readouterr().err
    assert execute(["chat", "--session", "x", "--kv-store", str(tmp_path)]) == 0
    assert execute(["chat"]) == 0
    assert not capsys.readouterr().err
    assert len(opened) == 3
