"""Errors of the library as errors of commands."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pyvelo.cli.exits import (
    ERROR,
    USAGE,
    UsageError,
    as_options,
    code_of,
    exits_for_signals,
    explain,
    interrupted,
    without_prefix,
)
from pyvelo.errors import ConfigError, OutOfMemory, RequestError, VeloError


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("max_tokens=0: give an integer; None: no limit", "--max-tokens 0: give an integer; -1: no limit"),
        ("n_threads=0: give an integer or None", "--threads 0: give an integer"),
        ("seed=-4: give an integer", "--seed -4: give an integer"),
        ("max_num_seqs=0: give an integer", "--max-num-seqs 0: give an integer"),
        ("kv_type 'q9' does not exist", "--kv-type 'q9' does not exist"),
        ("a seed is no number", "a seed is no number"),
        ("stop the server", "stop the server"),
        ("answer and prompt get n_ctx=64: raise n_ctx", "answer and prompt get --ctx 64: raise --ctx"),
        (
            "memory_utilization=0.9 of it; a larger memory_utilization",
            "0.9 of it; a larger memory_utilization",
        ),
        ("there is no file /tmp/n_ctx.gguf", "there is no file /tmp/n_ctx.gguf"),
        ("there is no file n_ctx.gguf", "there is no file n_ctx.gguf"),
    ],
)
def test_arguments_become_options(message: str, expected: str) -> None:
    assert as_options(message) == expected


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--ctx 0"), USAGE),
        (RequestError("--max-tokens 0"), USAGE),
        (UsageError("give -p or -f"), USAGE),
        (ConfigError("the free memory is unknown"), ERROR),
        (OutOfMemory("--kv-cache-bytes 5"), ERROR),
    ],
)
def test_wrong_options_have_their_own_code(error: VeloError, code: int) -> None:
    assert code_of(error, str(error)) == code


def test_a_parser_names_an_option_once() -> None:
    assert without_prefix("Invalid value for '--a': Value error, --a 'x': give 1") == "--a 'x': give 1"
    assert without_prefix("Invalid value for '--a' / '-b': Value error, 'x' is none") == "--a 'x' is none"
    for kind, meant in (("integer", "an integer"), ("number", "a number")):
        told = f"Invalid value for '--a': Input should be a valid {kind}, unable to parse string as {meant}"
        assert without_prefix(told) == f"Invalid value for '--a': give {meant}"
    for theirs, ours in (("greater than or equal to 0", "at least 0"), ("less than 2", "less than 2")):
        told = f"Invalid value for '--a': Input should be {theirs}"
        assert without_prefix(told) == f"Invalid value for '--a': give {ours}"
    assert without_prefix("No such option: --bad") == "No such option: --bad"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for file, says in (
        (tmp_path / "a", f"there is no file or folder {tmp_path}/a"),
        (tmp_path / "a" / "b", f"there is no folder {tmp_path}/a"),
        (Path("missing file"), "there is no file or folder missing file"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            file.read_bytes()
        assert explain(caught.value) == says


@pytest.mark.parametrize(("ended_by", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_signals_while_a_class_is_made_are_exit_codes(ended_by: BaseException, code: int) -> None:
    class Field:
        def __set_name__(self, *_: object) -> None:
            raise ended_by

    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)) as caught:
        type("Class", (), {"field": Field()})
    assert interrupted(caught.value) == code
    assert interrupted(ValueError()) is None


def test_signals_that_are_ignored_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with exits_for_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with exits_for_signals():
            with pytest.raises(SystemExit) as ended:
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # does not end the closing
            monkeypatch.setattr("pyvelo.cli.exits.CLOSING", 0.0)
            with pytest.raises(SystemExit):  # the first one was lost
                os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
