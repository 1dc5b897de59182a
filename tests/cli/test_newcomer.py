"""The command line as a hostile newcomer uses it: one plain line for what is wrong, and no traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .ptys import PYVELO, in_a_terminal

ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
BENCH = ("--prompt-tokens", "8", "--answer-tokens", "4", "--repeats", "1")


def pyvelo(*arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*PYVELO, *map(str, arguments)],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_nothing_asked_shows_the_help_as_it_is() -> None:
    code, out, err = pyvelo()
    assert (code, err) == (2, "")
    assert out == pyvelo("--help")[1]
    assert "\n  run " in out
    assert len(out.splitlines()) > 10


def test_bench_on_an_ascii_terminal_shows_what_it_measured(tiny_model: Path) -> None:
    code, out, err = pyvelo("bench", tiny_model, *BENCH, **ASCII)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 3
    code, shown = in_a_terminal([*PYVELO, "bench", str(tiny_model), *BENCH], env=ASCII)
    assert code == 0
    assert shown.isascii()
