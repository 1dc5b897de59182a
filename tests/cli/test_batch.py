"""`pyvelo batch`: what it prints, its exit codes, and runs that are ended in any way."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pyvelo.batch.counts import Counts
from pyvelo.cli.batch import split_words, summary
from pyvelo.cli.completion import models_and_rows
from pyvelo.cli.exits import UsageError
from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ClosedError
from tests import forks
from tests.batch.batches import keys_of, results_of, row, written

from .ptys import PYVELO, in_a_terminal
from .test_info import run_cli
from .test_newcomer import ASCII, pyvelo

SMALL = ("--ctx", "512", "--kv-cache-bytes", "4M", "--threads", "1")
LONG: dict[str, Any] = {"prompt": "The KV cache", "max_tokens": 100, "ignore_eos": True}
WAIT = 60.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "rows.jsonl", [row("a"), row("b")])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def test_a_run_and_a_second_one(capsys: pytest.CaptureFixture[str], source: Path, results: Path) -> None:
    code, out, err = run_cli(capsys, "batch", source, "-o", results, *SMALL)
    assert (code, err) == (0, "")
    assert out.startswith("2 rows in ")
    assert out.endswith(" tokens per second\n")
    assert sorted(keys_of(results_of(results))) == ["a", "b"]
    before = results.read_bytes()
    code, out, err = run_cli(capsys, "batch", DEMO_MODEL, source, "-o", results, *SMALL)
    assert (code, err) == (0, "")
    assert out == "0 rows in 0.0 s, 2 had a result before, 0 prompt tokens, 0 new tokens\n"
    assert results.read_bytes() == before


def test_nothing_to_do_loads_no_model(
    capsys: pytest.CaptureFixture[str], source: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cli(capsys, "batch", source, "-o", results, *SMALL)

    async def load(config: EngineConfig, closed: threading.Event) -> Any:
        raise AssertionError("there is nothing to do")

    monkeypatch.setattr("pyvelo.server.process.open_engine_loop", load)
    assert run_cli(capsys, "batch", source, "-o", results, *SMALL)[0] == 0


def test_failed_rows_are_shown_and_end_with_1(
    capsys: pytest.CaptureFixture[str], source: Path, results: Path
) -> None:
    written(source, [row("a"), *(row(str(i), {"prompt": {}}) for i in range(5)), b"?"])
    command = ("batch", source, "-o", results, "--ordered", *SMALL)
    code, out, err = run_cli(capsys, *command)
    assert (code, out.count(", 6 failed, ")) == (1, 1)
    shown = err.splitlines()
    assert len(shown) == 5
    assert sum("prompt must be a string" in line for line in shown) in (2, 3)
    hint = f"pyvelo: to run failed rows again, delete their lines in {results}"
    assert shown[-2:] == ["pyvelo: and 3 other rows failed", hint]
    code, out, err = run_cli(capsys, *command)
    assert (code, err) == (1, f"{hint}\n")
    assert "7 had a result before, 6 failed, " in out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(row("a")), "it is packed: gzip -dc "),
        (row("a").decode().encode("utf-16"), "it is UTF-16 text: save it as UTF-8"),
        (b" [\n" + row("a") + b"]", "it is a JSON list, and rows are lines: jq -c '.[]' "),
        (DEMO_MODEL.read_bytes()[:100], "it is a model: give MODEL and then"),
    ],
)
def test_files_that_have_no_rows(
    capsys: pytest.CaptureFixture[str], source: Path, results: Path, content: bytes, says: str
) -> None:
    source.write_bytes(content)
    code, _, err = run_cli(capsys, "batch", source, "-o", results, *SMALL)
    assert (code, err.count("\n")) == (1, 1)
    assert f"{source} is no file of rows: {says}" in err
    assert not results.exists()


def test_results_go_to_a_file(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    code, _, err = run_cli(capsys, "batch", source, "-o", "-", *SMALL)
    assert code == 2
    assert "results go to a file" in err


def test_json(capsys: pytest.CaptureFixture[str], source: Path, results: Path) -> None:
    code, out, _ = run_cli(capsys, "batch", source, "-o", results, *SMALL, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["seconds"] > 0
    assert found["tokens_per_second"] == found["completion_tokens"] / found["seconds"]
    counts = {"rows": 2, "answered": 2, "failed": 0, "skipped": 0, "failed_before": 0, "prompt_tokens": 6}
    assert {name: found[name] for name in counts} == counts
    assert (found["output"], found["interrupted"]) == (str(results), False)


@pytest.mark.parametrize("words", [("-",), ()])
def test_standard_input_and_order(results: Path, words: tuple[str, ...]) -> None:
    rows = b"".join(row(str(i)) + b"\n" for i in range(300))
    code, out, err = pyvelo("batch", *words, "-o", results, "--ordered", *SMALL, typed=rows)
    assert (code, err) == (0, "")
    assert out.startswith("300 rows in ")
    assert keys_of(results_of(results)) == [str(i) for i in range(300)]


def test_names_of_the_model(capsys: pytest.CaptureFixture[str], source: Path, results: Path) -> None:
    written(source, [row("a", {"prompt": "x", "model": "gpt-4"})])
    command = ("batch", source, *SMALL, "-o")
    code, _, err = run_cli(capsys, *command, results)
    assert code == 1
    assert "pyvelo: --model-name '*' takes every name of a model\n" in err
    assert run_cli(capsys, *command, f"{results}.2", "--model-name", "*")[0] == 0
    assert run_cli(capsys, *command, f"{results}.3", "--model-name", " ")[0] == 2


def test_a_chat_template(
    capsys: pytest.CaptureFixture[str], source: Path, results: Path, tmp_path: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    written(source, [row("a", body, "/v1/chat/completions")])
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content * 99 }}{% endfor %}")
    run_cli(capsys, "batch", source, "-o", results, *SMALL, "--chat-template", tmp_path / "template")
    [found] = results_of(results)
    assert found["response"]["body"]["usage"]["prompt_tokens"] > 60


def test_what_cannot_be_done_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    source: Path,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    other = written(tmp_path / "other", [b"my diary"])
    for code, says, arguments in (
        (2, "which rows? Give a file of JSON lines", ["-o", results]),
        (2, "which rows? Give a file of JSON lines", ["model.gguf", "-o", results]),
        (2, "give MODEL and one file of rows", ["a", "b", "c", "-o", results]),
        (2, "Missing option '-o' / '--output'", [source]),
        (1, "is the file of the rows", [source, "-o", source]),
        (1, "there is no file or folder", [tmp_path / "none", "-o", results]),
        (1, "is a folder, not a file", [tmp_path, "-o", results]),
        (1, "there is no folder", [source, "-o", tmp_path / "none" / "out"]),
        (1, "is a folder, not a file", [source, "-o", tmp_path]),
        (1, "its line 1 is no result of a batch", [source, "-o", other]),
        (2, "--ctx 0", [source, "-o", results, "--ctx", "0"]),
        (1, "there is no model at", ["none.gguf", source, "-o", results]),
    ):
        found = run_cli(capsys, "batch", *arguments)
        assert (found[0], found[1]) == (code, ""), arguments
        assert says in found[2], arguments
        assert found[2].count("\n") == 1
        assert not results.exists(), "it is left as it was"
    assert other.read_bytes() == b"my diary\n"


def test_words() -> None:
    assert split_words(["rows"]) == (str(DEMO_MODEL), "rows")
    assert split_words(["org/repo", "-"]) == ("org/repo", "-")
    assert split_words([]) == (str(DEMO_MODEL), "-")
    assert split_words(["x.GGUF"]) == ("x.GGUF", "-")
    with pytest.raises(UsageError):
        split_words(["a", "b", "c"])


def test_a_shell_offers_rows_and_models(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.gguf", "c.txt"):
        (tmp_path / name).touch()
    assert models_and_rows(f"{tmp_path}/") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.gguf"]


def test_the_line_of_the_end() -> None:
    counts = Counts(1_200, 1_000, 3, 200, 1, 5_000, 16_000, seconds=10.0)
    assert summary(counts) == (
        "1,000 rows in 10.0 s, 200 had a result before, 4 failed, 5,000 prompt tokens, 16,000 new tokens, "
        "1,600.0 tokens per second"
    )


def test_a_terminal_shows_a_bar(source: Path, results: Path) -> None:
    written(source, [row(str(i), LONG) for i in range(300)])
    code, shown = in_a_terminal([*PYVELO, "batch", str(source), "-o", str(results), *SMALL])
    assert code == 0
    assert b" rows" in shown
    assert b"%" in shown
    assert b"300 rows in " in shown


def test_a_terminal_without_letters_and_moves(source: Path, results: Path) -> None:
    written(source, [*(row(str(i), LONG) for i in range(100)), row("é", {"model": "猫", "prompt": "x"})])
    command = [*PYVELO, "batch", str(source), "-o", str(results), *SMALL]
    code, shown = in_a_terminal(command, env={**ASCII, "TERM": "dumb"})
    assert (code, shown.isascii(), b"\x1b" in shown) == (1, True, False)
    assert b"the model" in shown


# ---- runs that end early ----


def start(source: Path, results: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PYVELO, "batch", str(source), "-o", str(results), *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=forks.heed_signals,
    )


def until_written(process: subprocess.Popen[str], results: Path, n_bytes: int) -> None:
    """Wait until a run has written more than so many bytes, or has ended."""
    deadline = time.monotonic() + WAIT
    while process.poll() is None and not (results.exists() and results.stat().st_size > n_bytes):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("options", [(), ("--ordered",)])
def test_ctrl_c_writes_what_is_done(
    source: Path, results: Path, number: int, options: tuple[str, ...]
) -> None:
    written(source, [row(str(i), LONG) for i in range(2_000)])
    process = start(source, results, *options)
    with process:
        until_written(process, results, 0)
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert err == f"pyvelo: interrupted; the same command goes on with the rows that {results} lacks\n"
    found = keys_of(results_of(results))
    assert 0 < len(found) < 2_000
    assert out.startswith(f"{len(found):,} row")
    if options:
        assert found == [str(i) for i in range(len(found))]


def test_ctrl_c_during_the_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: Path, results: Path
) -> None:
    async def load(config: EngineConfig, closed: threading.Event) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.to_thread(closed.wait, WAIT)
        raise ClosedError("closed while it was loaded")

    monkeypatch.setattr("pyvelo.server.process.open_engine_loop", load)
    code, out, err = run_cli(capsys, "batch", source, "-o", results)
    assert (code, out) == (130, "0 rows in 0.0 s, 0 prompt tokens, 0 new tokens\n")
    assert err.startswith("pyvelo: interrupted; the same command goes on")
    assert not results.exists()


@pytest.mark.parametrize("given", [b"", row("a") + b"\n"], ids=["nothing", "a row"])
def test_ctrl_c_while_the_input_is_silent(results: Path, given: bytes) -> None:
    process = subprocess.Popen(
        [*PYVELO, "batch", "-", "-o", str(results), *SMALL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=forks.heed_signals,
    )
    with process:
        assert process.stdin is not None
        process.stdin.write(given)
        process.stdin.flush()
        deadline = time.monotonic() + WAIT
        while not (results.exists() and (results.stat().st_size or not given)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0 if given else 0.5)  # the file is made just before the input is read
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 130
        assert process.stderr is not None
        assert process.stderr.read().startswith(b"pyvelo: interrupted" if given else b"")
    assert (keys_of(results_of(results)) == ["a"]) if given else not results.exists()


def test_kill_9_loses_no_result_that_was_written(source: Path, results: Path) -> None:
    """The run is killed again and again, until all rows have a result; no row has two."""
    rows = [str(i) for i in range(400)]
    written(source, [row(name, {**LONG, "max_tokens": 40}) for name in rows])
    n_kills, size = 0, 0
    while True:
        process = start(source, results)
        with process:
            until_written(process, results, size + 60_000)
            process.kill()
            process.communicate(timeout=WAIT)
        if process.returncode == 0:
            break
        before, size = results.read_bytes(), results.stat().st_size
        results.write_bytes(before + b'{"id":"batch_req_0')  # a kill within a write
        n_kills += 1
        assert n_kills < 50
    assert n_kills >= 2
    assert results.read_bytes().startswith(before)
    assert sorted(keys_of(results_of(results))) == sorted(rows)


def test_a_closed_input_has_no_rows(results: Path) -> None:
    command = [*PYVELO, "batch", "-", "-o", str(results), *SMALL]
    done = subprocess.run(command, preexec_fn=lambda: os.close(0), capture_output=True, check=False)
    assert (done.returncode, done.stdout[:10], done.stderr) == (0, b"0 rows in ", b"")
