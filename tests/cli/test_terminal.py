"""Control characters of models, files, hubs and errors do not reach a terminal; pipes get exact bytes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyvelo.cli.terminal import visible
from tests import forks
from tests.models.conftest import Shell, hub, shell
from tests.models.server import Hub

from .ptys import PYVELO, in_a_terminal
from .test_report import trace

__all__ = ["hub", "shell", "trace"]  # fixtures

# a title, a clear, C1 of the same, a bell, a carriage return, a backspace and a delete
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b2J\x9d0;owned\x9c\r\b\x7f"
TAME = r"\x1b]0;owned\x07\x1b[2J\x9b2J\x9d0;owned\x9c\x0d\x08\x7f"
# what rich, prompt-toolkit and progress bars write: styles, moves, modes
OWN = re.compile(r"\x1b\[[0-9;]*[mABCDKGPJ]|\x1b\[\?[0-9;]*[hl]\r?|\x1b[=>]|\r\r?\n")


def is_tame(shown: bytes) -> bool:
    """Return whether the output has nothing of EVIL, but line ends and the program's own styles."""
    text = shown.decode("utf-8")  # C1 in UTF-8, and no bytes that are none
    assert "\x1b[2J" not in text
    rest = OWN.sub("\n", text)
    return re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", rest) is None


def shows(shown: bytes) -> bool:
    """Whether EVIL can be read, whatever lines it was cut into."""
    return TAME in re.sub(r"\s", "", OWN.sub("", shown.decode("utf-8")))


@given(st.text())
@example("\r\n")
def test_visible_text_has_no_controls_and_loses_nothing(text: str) -> None:
    shown = visible(text)
    lines = shown.replace("\r\n", "\n")
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lines) is None
    assert visible(shown) == shown
    if "\\" not in text:
        back = re.sub(r"\\x(..)|\\u(....)", lambda m: chr(int(m[1] or m[2], 16)), shown)
        assert back == text


@pytest.fixture
def evil_model(tiny_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / f"tiny{EVIL}.gguf"
    path.symlink_to(tiny_model)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "{missing}", "-p", "x"],
        ["run", "{model}", "-p", EVIL, "--echo", "-n", "2"],
        ["run", "{model}", "-f", "{missing}"],
        ["run", "{model}", "-p", "x", "--kv-type", EVIL],
        ["chat", "{missing}"],
        ["embed", "{missing}", "-p", "x"],
        ["embed", "{model}", "-f", "{missing}"],
        ["bench", "{missing}"],
        ["bench", "{model}", "--plot", "{missing}"],
        ["info", "{model}"],
        ["info", "{missing}"],
        ["simulate", "--trace", "{missing}"],
        ["simulate", "--workload", "{missing}"],
        ["simulate", "--requests", "3", "--record", "{missing}/x"],
        ["report", "{missing}"],
        ["report", "{trace}", "-o", "{picture}"],
        ["pull", EVIL],
        [EVIL],
        ["info", f"--{EVIL}"],
    ],
    ids=lambda arguments: " ".join(a for a in arguments[:4] if EVIL not in a),
)
def test_no_command_passes_controls_on(
    arguments: list[str], evil_model: Path, trace: Path, tmp_path: Path
) -> None:
    evil_trace = trace.rename(tmp_path / f"run{EVIL}.trace")
    paths = {
        "missing": tmp_path / f"missing{EVIL}",
        "model": evil_model,
        "trace": evil_trace,
        "picture": tmp_path / f"{EVIL}.svg",
    }
    filled = [argument.format(**paths) if argument[0] == "{" else argument for argument in arguments]
    code, shown = in_a_terminal([*PYVELO, *filled], env={"HF_HUB_OFFLINE": "1"})
    assert code in (0, 1, 2)
    assert is_tame(shown), shown
    # click and repr have their own ways to spell them
    assert shows(shown) or "owned" in shown.decode()


def test_json_to_a_terminal_is_the_same_json(evil_model: Path) -> None:
    code, shown = in_a_terminal([*PYVELO, "info", str(evil_model), "--json"])
    assert code == 0
    assert is_tame(shown)
    assert json.loads(shown)["model"]["path"] == str(evil_model)


def test_what_comes_from_the_cache(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    cache = {**shell.environment, "HF_HOME": str(tmp_path / f"home{EVIL}")}
    code, shown = in_a_terminal([*PYVELO, "pull", "org/one"], env=cache)
    assert (code, is_tame(re.sub(rb"\r[^\n]*?(?=\r)", b"", shown)), shows(shown)) == (0, True, True)
    for arguments in (["list"], ["info", "org/one"]):
        code, shown = in_a_terminal([*PYVELO, *arguments], env=cache)
        assert (code, is_tame(shown), shows(shown)) == (0, True, True)


SCREEN = f"""
import sys
if sys.argv[1] == "plain":
    sys.modules["prompt_toolkit"] = None
from pyvelo.cli.screen import best_screen
screen = best_screen()
assert type(screen).__name__.lower().startswith(sys.argv[1])
evil = {EVIL!r}
for text in ("a ", evil[:1], evil[1:], " b\\n\\n", f"```{{evil}}\\n{{evil}}\\n```\\n", "> ", evil):
    screen.show(text)
screen.finish()
screen.note(evil)
"""


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_a_chat_shows_them(kind: str) -> None:
    code, shown = in_a_terminal([sys.executable, "-c", SCREEN, kind])
    assert (code, is_tame(shown)) == (0, True), shown
    assert shows(shown)


INSIDE = f"""
import logging, sys, warnings
from pyvelo.cli import app, main
def command(**_):
    if sys.argv[1] == "warning":
        warnings.warn({EVIL!r})
    elif sys.argv[1] == "log":
        logging.getLogger("library").warning("%s", {EVIL!r})
    elif sys.argv[1] == "own log":
        logging.getLogger("pyvelo").warning("%s", {EVIL!r})
    else:
        raise RuntimeError({EVIL!r})
app.app = command
main([])
"""


@pytest.mark.parametrize("what", ["warning", "log", "own log", "crash"])
def test_what_is_said_beside_the_commands(what: str) -> None:
    code, shown = in_a_terminal([sys.executable, "-c", INSIDE, what])
    assert (code, is_tame(shown), shows(shown)) == (what == "crash", True, True), shown


# ---- into pipes ----


def piped(*arguments: str | Path, **environment: str) -> tuple[int, bytes, bytes]:
    done = forks.run([*PYVELO, *map(str, arguments)], env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


def test_pipes_get_exact_bytes(evil_model: Path, tmp_path: Path) -> None:
    code, out, err = piped("run", evil_model, "-p", EVIL, "--echo", "-n", "2")
    assert (code, err) == (0, b"")
    assert out.startswith(EVIL.encode())
    missing = tmp_path / f"missing{EVIL}"
    code, out, err = piped("info", missing)
    assert (code, out) == (1, b"")
    assert "\x1b]0;owned\x07\x1b[2J\x9b2J\x9d0;owned\x9c".encode() in err


LATIN = os.fsdecode(b"caf\xe9")


def test_names_that_are_no_text_are_printed_as_they_are(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / LATIN
    environment = {**shell.environment, "HF_HOME": str(home)}
    for arguments in (["pull", "org/one"], ["list"]):
        code, out, err = piped(*arguments, **environment)
        assert code == 0, err
        assert os.fsencode(home) in out
    code, out, err = piped("info", next(home.rglob("tiny-Q8_0.gguf")))
    assert (code, err) == (0, b"")
    code, out, err = piped("list", "--json", **environment)
    assert (code, err) == (0, b"")
    (model,) = json.loads(out)["models"]
    assert model["path"].startswith(str(home))
    code, shown = in_a_terminal([*PYVELO, "list"], env=environment)
    assert (code, is_tame(shown)) == (0, True)
    assert r"caf\udce9" in shown.decode()
