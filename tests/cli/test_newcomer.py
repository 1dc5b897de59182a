"""The command line as a hostile newcomer uses it: one plain line for what is wrong, and no traceback."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, NoReturn

import platformdirs
import pytest

from pyvelo.cli.chat_session import ChatSession
from pyvelo.cli.doctor import findings
from pyvelo.cli.exits import BROKEN_PIPE, explain
from pyvelo.cli.terminal import make_console
from pyvelo.errors import ConfigError, ModelError
from pyvelo.models.hub import scan_cache
from pyvelo.store.opening import default_folder
from tests import forks

from .ptys import PYVELO, in_a_terminal
from .test_report import trace

__all__ = ["trace"]  # a fixture

ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
BENCH = ("--prompt-tokens", "8", "--answer-tokens", "4", "--repeats", "1")


def pyvelo(*arguments: str | Path, typed: bytes = b"", **environment: str) -> tuple[int, str, str]:
    done = forks.run([*PYVELO, *map(str, arguments)], input=typed, env={**os.environ, **environment})
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def anew(*arguments: str | Path, typed: bytes = b"", **environment: str) -> tuple[int, str, str]:
    """Return what `pyvelo` does, from a Python that starts anew and reads all its variables."""
    done = subprocess.run(
        [os.fsencode(word) for word in [*PYVELO, *map(str, arguments)]],
        input=typed,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def refused(*arguments: str | Path, typed: bytes = b"", **environment: str) -> str:
    """The one line that a command ends with."""
    code, out, err = pyvelo(*arguments, typed=typed, **environment)
    assert code in (1, 2)
    assert (out, err[:8], err.count("\n")) == ("", "pyvelo: ", 1)
    assert len(err) < 600
    return err


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "pyvelo", "--version"]
    assert subprocess.check_output(command, text=True) == pyvelo("--version")[1]


def test_nothing_asked_shows_the_help_as_it_is() -> None:
    code, out, err = pyvelo()
    assert (code, out, err) == pyvelo("--help")
    assert (code, err) == (0, "")
    assert "\n  run " in out
    assert len(out.splitlines()) > 10


@pytest.mark.parametrize(
    "command",
    [
        *("--help", "info", "models", "doctor", "list", "simulate --requests 3", "report TRACE"),
        *("run -p été -n 8 --verbose", "run -p x -n 8 --chat --reasoning show", "embed -p 猫 --pooling mean"),
        f"bench {' '.join(BENCH)}",
        "chat -n 8",
    ],
)
def test_a_terminal_without_letters_and_moves(command: str, trace: Path) -> None:
    """LC_ALL=C and TERM=dumb: ASCII alone, no escape sequence, and the same exit code in a pipe."""
    filled = [str(trace) if word == "TRACE" else word for word in command.split()]
    dumb = {**ASCII, "TERM": "dumb"}
    code, shown = in_a_terminal(
        [*PYVELO, *filled], env=dumb, typed=b"hello\n/exit\n" if command[:4] == "chat" else b""
    )
    assert code == 0, shown
    assert shown.isascii()
    assert b"\x1b" not in shown
    assert len(shown.split()) > 2
    code, out, err = pyvelo(*filled, typed=b"hello\n", **dumb)
    assert (code, (out + err).isascii()) == (0, True), err


LATIN = os.fsdecode(b"caf\xe9")


def test_numbers_of_any_length_are_one_line(tiny_model: Path) -> None:
    digits = "9" * 5000
    assert "is no size" in refused("run", tiny_model, "-p", "x", "--kv-cache-bytes", f"{digits}T")
    assert "is no size" in refused("run", tiny_model, "-p", "x", "--kv-cache-bytes", "٣")
    assert "give a number" in refused("run", tiny_model, "-p", "x", "--n-gpu-layers", digits)
    assert "give whole numbers" in refused("bench", tiny_model, "--depth", digits)


@pytest.mark.parametrize("rate", ["1e-320", "1e-300", "1e-9"])
def test_requests_that_hardly_ever_come_are_refused(rate: str) -> None:
    assert f"rate {rate.replace('e-9', 'e-09')}" in refused("simulate", "--rate", rate, "--requests", "3")


def test_folders_and_missing_files_are_sentences(tiny_model: Path, tmp_path: Path) -> None:
    for arguments in (
        ["report"],
        ["simulate", "--trace"],
        ["simulate", "--workload"],
        ["run", tiny_model, "-f"],
        ["embed", tiny_model, "-f"],
    ):
        missing = tmp_path / "no such thing"
        assert refused(*arguments, missing) == f"pyvelo: there is no file or folder {missing}\n"
        assert refused(*arguments, tmp_path) == f"pyvelo: {tmp_path} is a folder, not a file\n"
    assert "there is no model at ''" in refused("info", "")


def test_errors_of_the_system_are_sentences() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", "/srv/x")
    assert explain(denied).startswith("/srv/x may not be opened by this user")
    assert explain(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    assert explain(OSError(errno.EROFS, "Read-only file system", b"/x")) == "/x: Read-only file system"
    assert explain(OSError("odd")) == "odd"


@pytest.mark.parametrize(
    "arguments", [["run", "-p", LATIN], ["embed", "-p", LATIN], ["chat", "-s", LATIN]], ids=" ".join
)
def test_text_that_is_no_text_is_refused(tiny_model: Path, arguments: list[str]) -> None:
    command, *rest = arguments
    assert "is not UTF-8 text" in refused(command, tiny_model, *rest, typed=b"hi\n")


def test_a_locale_without_letters_still_reads_utf8(tiny_model: Path) -> None:
    bare = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    asked = ("run", tiny_model, "-p", "été", "-n", "3", "--echo", "--json")
    code, out, err = anew(*asked, **bare)
    assert (code, err) == (0, "")
    assert out.isascii()
    there = json.loads(pyvelo(*asked)[1])
    assert json.loads(out)["text"] == there["text"]
    assert there["text"].startswith("été")
    code, out, err = anew("chat", tiny_model, "-n", "3", typed="été\n".encode(), **bare)
    assert (code, len(out.split()) > 0, "UTF-8" in err) == (0, True, False)


@pytest.mark.parametrize(
    ("typed", "note"),
    [
        (b"/save ~nobody-of-that-name/x", "there is no such home folder"),
        (b"/load ~nobody-of-that-name/x", "there is no such home folder"),
        (b"/save a\0b", "is not a valid file name"),
        (b"/load a\0b", "is not a valid file name"),
        (b"/system caf\xe9", "this is not UTF-8 text"),
        (b"caf\xe9", "this is not UTF-8 text"),
        (b"/save /proc/no/such", "there is no folder /proc/no"),
        (b"/load halves.json", "the file is not a chat of /save"),
    ],
)
def test_a_chat_goes_on_after_what_is_typed(tmp_path: Path, typed: bytes, note: str) -> None:
    halves = {"format": "pyvelo chat 1", "messages": [{"role": "user", "content": "\ud800"}]}
    (tmp_path / "halves.json").write_text(json.dumps(halves))
    typed = typed.replace(b"halves", bytes(tmp_path / "halves"))
    code, out, err = pyvelo("chat", "-n", "64", "--temperature", "0", typed=typed + b"\nWhat is 12 + 30?\n")
    assert (code, err.count("\n")) == (1, 1)
    assert note in err
    assert out.endswith("42.\n")


def words(command: str, model: Path) -> list[str]:
    return [*PYVELO, *(str(model) if word == "MODEL" else word for word in command.split())]


def shell_line(command: str, model: Path, rest: str) -> tuple[int, bytes, bytes]:
    """Run a line of bash, with a Python that starts anew."""
    line = f"{shlex.join(words(command, model))} {rest}"
    done = subprocess.run(["bash", "-c", line], input=b"", capture_output=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def with_stdout(command: str, model: Path, stdout: IO[bytes] | int, **environment: str) -> tuple[int, bytes]:
    """Return exit code and standard error of a command that writes to a file or a pipe."""
    with open(os.devnull, "rb") as stdin, tempfile.TemporaryFile() as stderr:
        environment = {**os.environ, **environment}
        code = forks.start(words(command, model), (stdin, stdout, stderr), env=environment).wait()
        stderr.seek(0)
        return code, stderr.read()


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("command", ["info MODEL", "run MODEL -p x -n 2", "chat MODEL -n 2"])
def test_closed_streams_are_no_crash(tiny_model: Path, closed: str, command: str) -> None:
    with open(os.devnull, "r+b") as nowhere, tempfile.TemporaryFile() as stderr:
        marks = ("<&-", ">&-", "2>&-")
        given = (nowhere, nowhere, stderr)
        streams = [None if mark in closed.split() else file for mark, file in zip(marks, given, strict=True)]
        code = forks.start(words(command, tiny_model), streams).wait()
        stderr.seek(0)
        said = stderr.read()
    assert code == 0, said
    assert b"Traceback" not in said
    assert b"Error" not in said


@pytest.mark.parametrize(
    ("command", "closed"), [*(("--help", closed) for closed in CLOSED), ("run MODEL -p x -n 2", CLOSED[-1])]
)
def test_python_starts_with_closed_streams(tiny_model: Path, closed: str, command: str) -> None:
    code, _, err = shell_line(command, tiny_model, closed)
    assert code == 0, err
    assert b"Traceback" not in err
    assert b"Error" not in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["info MODEL --json", "run MODEL -p x -n 2", "simulate --requests 2"])
def test_a_full_disk_is_one_line(tiny_model: Path, command: str, unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        code, err = with_stdout(command, tiny_model, full, PYTHONUNBUFFERED=unbuffered)
    assert (code, err) == (1, b"pyvelo: No space left on device\n")


def test_python_ends_with_a_full_disk(tiny_model: Path) -> None:
    done = shell_line("info MODEL --json", tiny_model, ">/dev/full")
    assert done == (1, b"", b"pyvelo: No space left on device\n")


@pytest.mark.parametrize(
    "command", ["info MODEL", "simulate --requests 2", "--help", "run MODEL -p x -n 2 --json"]
)
def test_a_reader_that_has_gone_is_silent(tiny_model: Path, command: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        code, err = with_stdout(command, tiny_model, theirs)
    finally:
        os.close(theirs)
    assert code == BROKEN_PIPE
    assert err == b""


def test_a_reader_that_goes_is_silent(tiny_model: Path) -> None:
    assert shell_line("info MODEL", tiny_model, "| true") == (0, b"", b"")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pyvelo inf", ["info"]),
        ("pyvelo mod", ["models"]),
        ("pyvelo info --n-g", ["--n-gpu-layers"]),
        ("pyvelo run --kv-type q5", ["q5_1", "q5_0"]),
        ("pyvelo chat --kv-type q8_0,q4", ["q8_0,q4_1", "q8_0,q4_0"]),
        ("pyvelo models --quant Q4", ["Q4_K_M"]),
        ("pyvelo run --reasoning h", ["hide"]),
        ("pyvelo chat --reasoning o", ["off"]),
        ("pyvelo embed --pooling m", ["mean"]),
        ("pyvelo run --attention-precision f", ["fast"]),
        ("pyvelo run --block-size 6", ["64"]),
        ("pyvelo simulate --block-size 1", ["128"]),
        ("pyvelo info a", ["a model.gguf", "a folder" + os.sep]),
        ("pyvelo run nothing", []),
    ],
)
def test_a_shell_completes(tmp_path: Path, line: str, offered: list[str]) -> None:
    for name in ("a model.gguf", "a text.txt"):
        (tmp_path / name).touch()
    (tmp_path / "a folder").mkdir()
    asked = {"_PYVELO_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    hub = {"HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        PYVELO, cwd=tmp_path, env={**os.environ, **asked, **hub}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:-1] == (offered or [""])


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["run", "a", ":", ""], ["a:b.gguf", "a:c.gguf", "d:e:f.gguf"]),
        (["run", "a", ":"], ["b.gguf", "c.gguf"]),
        (["run", "a", ":", "b"], ["b.gguf"]),
        (["run", "a", ":", "b", "x"], []),
        (["run", "'a:b"], ["a:b.gguf"]),
        (["run", "d", ":", "e", ":"], ["f.gguf"]),
        (["run", "--kv-type", "=", "q5"], ["q5_1", "q5_0"]),
        (["run", "--kv-type", "="], ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]),
        (["run", "--kv-type", "=", "q8_0,q4"], ["q8_0,q4_1", "q8_0,q4_0"]),
    ],
)
def test_words_that_bash_splits(tmp_path: Path, words: list[str], offered: list[str]) -> None:
    for name in ("a:b.gguf", "a:c.gguf", "d:e:f.gguf"):
        (tmp_path / name).touch()
    asked = {
        **{"_PYVELO_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(["pyvelo", *words])},
        **{"COMP_CWORD": str(len(words)), "HF_HOME": str(tmp_path / "hub")},
    }
    done = forks.run(PYVELO, cwd=tmp_path, env={**os.environ, **asked}, text=True)
    assert done.returncode == 0
    assert done.stdout.split("\n")[:-1] == (offered or [""])


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_itself(tmp_path: Path) -> None:
    """It replaces what follows the last colon by what is offered."""
    (tmp_path / "a:b.gguf").touch()
    command = tmp_path / "pyvelo"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(PYVELO)} "$@"\n')
    command.chmod(0o700)
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    install = f'eval "$(_PYVELO_COMPLETE=source_bash {command})"'
    script = f"""{install}
        COMP_WORDS=({command} run a : b) COMP_CWORD=4
        _pyvelo_completion {command}
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "b.gguf\n", done.stderr


def test_a_shell_that_is_unknown_is_no_reader_that_has_gone() -> None:
    code, out, err = pyvelo(_PYVELO_COMPLETE="complete_nothing")
    assert (code, out) == (1, "")
    assert "not supported" in err


@pytest.mark.parametrize("home", [None, "/nowhere", "/dev/null"])
def test_no_home_is_needed(tiny_model: Path, home: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "HOME" and key[:3] != "HF_"}
    environment |= {} if home is None else {"HOME": home, "HF_HOME": home}
    for arguments in (["list", "--json"], ["info", str(tiny_model), "--json"]):
        done = forks.run([*PYVELO, *arguments], env=environment)
        assert (done.returncode, done.stderr) == (0, b"")
        json.loads(done.stdout)


def test_a_machine_that_knows_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        default_folder()
    monkeypatch.setattr(platformdirs, "user_state_path", refuse)
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME"):
        ChatSession("a")
    assert [each.state for each in findings() if each.part == "history"] == ["note"]
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "scan_cache_dir", refuse)
    with pytest.raises(ModelError, match="cannot read the cache"):
        scan_cache()


def test_text_between_colons_stays(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("my:cat:x.gguf", markup=False)
    make_console().print("dict[:100:] :smile:")
    assert capsys.readouterr().out == "my:cat:x.gguf\ndict[:100:] :smile:\n"


def test_settings_of_the_hub_that_lead_nowhere() -> None:
    pytest.importorskip("huggingface_hub")
    for endpoint in ("nonsense", "http://[", "ftp://x"):
        refused("pull", "org/one", HF_ENDPOINT=endpoint)
    assert "Not a directory" in refused(
        "pull", "org/one", HF_HOME="/dev/null/x", HF_ENDPOINT="http://127.0.0.1:9"
    )


def test_a_name_that_looks_like_a_model_is_a_message_with_a_note() -> None:
    code, out, err = pyvelo("run", "mymodel-7b", "-n", "4")
    assert code == 0
    assert out
    assert "mymodel-7b is taken as a message to the demo model" in err
    for message in ("hello", "12+30", "42", "What is 12 + 30?", "Qwen3 is what?"):
        assert pyvelo("run", message, "-n", "4")[2] == ""
    assert "org/repo" in refused("run", "llama3.2", "hi")


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:3b", "qwen3", "Qwen3-4B"])
def test_a_name_of_ollama_is_no_message(name: str) -> None:
    error = refused("run", name)
    assert f"there is no model {name}; did you mean bartowski/" in error
    assert f"(-p {name} asks the demo model)" in error


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for arguments in ([""], ["   "], ["-p", ""], ["-p", " \t"], ["-f", empty], ["-p", "-"]):
        assert "the prompt is empty" in refused("run", *arguments, typed=b"\n")
    assert "what is the prompt? Give it after MODEL" in refused("run", typed=b"\n")
    code, _, err = shell_line("run -p -", empty, "<&-")
    assert (code, err.count(b"\n"), b"standard input has no text" in err) == (2, 1, True)


def test_options_are_named_and_not_arguments() -> None:
    for arguments, said in (
        (("run", "hi", "--stop", ""), "--stop '': give a text"),
        (("embed", "-p", "hi"), "give --pooling mean, cls or last\n"),
        (("embed", "-p", "hi", "--pooling", "x"), "--pooling 'x': give mean, cls or last\n"),
        (("simulate", "--kv-type", "q9"), "--kv-type 'q9' does not exist; choose from f32"),
        (("simulate", "--kv-type", "q8_0,q9"), "--kv-type 'q9' does not exist"),
    ):
        assert said in refused(*arguments)


def test_a_context_longer_than_trained_is_named_by_its_option() -> None:
    code, _, err = pyvelo("run", "hi", "-n", "1", "--ctx", "10000")
    assert (code, err) == (0, "pyvelo: --ctx 10000 is longer than the 4096 tokens the model was trained on\n")
    code, _, err = pyvelo("bench", "--depth", "4090", *BENCH)
    assert code == 0
    assert err.startswith("pyvelo: a test of 4100 tokens (see --depth) is longer than the 4096 tokens")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("help", "help is pyvelo --help here"),
        ("show a.gguf", "show is pyvelo info here"),
        ("remove a.gguf", "remove is pyvelo rm here"),
        ("ps", "there is no pyvelo ps: a server lists its models at GET /v1/models"),
        ("stop x", "there is no pyvelo stop: Ctrl-C"),
        ("run --model a.gguf -p hi", "--model is no option: give the model first, as in pyvelo run MODEL"),
        ("serve -m a.gguf", "-m is no option: give the model first, as in pyvelo serve MODEL"),
        ("serve --kv-store foo://x", "--kv-store 'foo://x': give a folder, or valkey://HOST"),
        ("run hi --temp 0.5", "--temp is --temperature here"),
        ("chat --temp=0.5", "--temp is --temperature here"),
        ("run hi --n-ctx 64", "--n-ctx is --ctx here"),
        ("chat --ctx-size 64", "--ctx-size is --ctx here"),
        ("chat --num-ctx 64", "--num-ctx is --ctx here"),
        ("serve --max-model-len 64", "--max-model-len is --ctx here"),
        ("run hi -c 64", "-c is --ctx here"),
        ("run hi --num-gpu 0", "--num-gpu is --n-gpu-layers here"),
        ("bench --gpu-layers 0", "--gpu-layers is --n-gpu-layers here"),
        ("run hi -ngl 0", "-ngl is --n-gpu-layers here"),
        ("embed -p hi -ngl 0", "-ngl is --n-gpu-layers here"),
        ("run hi -ctk q8_0", "-ctk is --kv-type here"),
        ("run hi -t 2", "-t is --threads here"),
        ("run hi --n-predict 3", "--n-predict is --max-tokens here"),
        ("chat --num-predict 3", "--num-predict is --max-tokens here"),
        ("run hi --max-new-tokens 3", "--max-new-tokens is --max-tokens here"),
        ("embed -p hi --temp 0.5", "No such option: --temp"),
        ("run hi --nonsense 3", "No such option: --nonsense"),
        ("run hi -n x", "--max-tokens"),
    ],
)
def test_flags_of_other_programs(line: str, hint: str) -> None:
    said = refused(*line.split())
    assert hint in said
    assert ("here" in said) == ("here" in hint)
