"""`pyvelo run`: its output, on which stream, and its exit codes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from pyvelo import LLM, Delta, SamplingParams, StreamPiece
from pyvelo.cli.exits import UsageError
from pyvelo.cli.run import read_message
from pyvelo.cli.values import parse_kv_type_option, parse_size
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError
from tests import forks

from .ptys import PYVELO, in_a_terminal
from .test_info import run_cli

COMMAND = [sys.executable, "-m", "pyvelo.cli"]
PROMPT = "Once upon a time"


@pytest.fixture
def expected(tiny_model: Path) -> str:
    """What the model says to PROMPT in 24 tokens, by the Python interface."""
    with LLM(tiny_model) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=24, temperature=0))[0].text


def test_prints_the_answer_and_nothing_else(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, expected: str
) -> None:
    code, out, err = run_cli(capsys, "run", tiny_model, "-p", PROMPT, "-n", "24")
    assert (code, out, err) == (0, expected + "\n", "")
    assert len(set(expected.split())) > 6


def test_echo_prints_the_prompt_first(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, expected: str
) -> None:
    arguments = ("run", tiny_model, "-p", PROMPT, "-n", "24", "--echo")
    assert run_cli(capsys, *arguments) == (0, PROMPT + expected + "\n", "")
    code, out, _ = run_cli(capsys, *arguments, "--json")
    answer = json.loads(out)
    assert (code, answer["text"], len(answer["token_ids"])) == (0, PROMPT + expected, 24)


def test_the_prompt_from_a_file_and_from_standard_input(
    tiny_model: Path, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    for arguments in (["-f", str(file)], ["-p", "-"]):
        command = [*COMMAND, "run", str(tiny_model), *arguments, "-n", "24"]
        done = forks.run(command, input=PROMPT, check=True)
        assert done.stdout.decode() == expected + "\n"


def test_json(capsys: pytest.CaptureFixture[str], tiny_model: Path, expected: str) -> None:
    code, out, err = run_cli(capsys, "run", tiny_model, "-p", PROMPT, "-n", "24", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["text"] == expected
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == 24
    assert answer["stop_reason"] is None
    assert answer["usage"] == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 24}
    assert answer["seconds"]["total"] >= answer["seconds"]["first_token"] > 0
    stats = answer["stats"]
    assert stats["blocks_total"] == stats["blocks_used"] + stats["blocks_cached"] + stats["blocks_free"]


def test_json_names_the_stop_string(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, expected: str
) -> None:
    stop = expected[8:12]
    code, out, _ = run_cli(capsys, "run", tiny_model, "-p", PROMPT, "-n", "24", "--json", "--stop", stop)
    answer = json.loads(out)
    assert (code, answer["finish_reason"], answer["stop_reason"]) == (0, "stop", stop)
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])


def test_options_reach_the_engine(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    options = ["--kv-type", "q8_0,q4_0", "--ctx", "512", "--block-size", "64", "--kv-cache-bytes", "1M"]
    code, out, _ = run_cli(capsys, "run", tiny_model, "-p", PROMPT, "-n", "4", "--json", *options)
    assert code == 0
    stats = json.loads(out)["stats"]
    assert (stats["n_ctx"], stats["block_size"]) == (512, 64)
    # two layers, two KV heads of 64: 34 and 18 bytes for each group of 32 values
    assert stats["block_bytes"] == 2 * 64 * (2 * 64 // 32) * (34 + 18)
    assert stats["pool_bytes"] <= 1 << 20


def test_options_reach_the_sampler(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, expected: str
) -> None:
    drawn = ["run", tiny_model, "-p", PROMPT, "-n", "24", "--temperature", "1.5", "--seed"]
    texts = [run_cli(capsys, *drawn, seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    word = expected.split()[3]
    stopped = run_cli(capsys, "run", tiny_model, "-p", PROMPT, "-n", "24", "--stop", "qqq", "--stop", word)[1]
    assert stopped == expected[: expected.index(word)] + "\n"


def test_minus_one_goes_on_until_the_context_is_full(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    arguments = ["run", tiny_model, "-p", PROMPT, "-n", "-1", "--ignore-eos", "--ctx", "64", "--json"]
    answer = json.loads(run_cli(capsys, *arguments)[1])
    assert answer["finish_reason"] == "length"
    assert 64 - 5 <= len(answer["token_ids"]) <= 64 - 4


def test_verbose_tells_on_standard_error(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    code, out, err = run_cli(capsys, "run", tiny_model, "-p", PROMPT, "-n", "3", "-v")
    assert code == 0
    assert all(
        fact in err
        for fact in ("5 prompt tokens | first token after ", " tokens per second, 3 tokens in ", "KV cache")
    )
    assert "prompt tokens" not in out


USAGE = {
    "can be read once": ["-p", "-", "-f", "-"],
    "No such option": ["-p", "x", "--nope"],
    "Invalid value for": ["-p", "x", "-n", "many"],
    "--max-tokens 0": ["-p", "x", "-n", "0"],
    "--temperature -1": ["-p", "x", "--temperature", "-1"],
    "--top-p 2": ["-p", "x", "--top-p", "2"],
    "pyvelo: --kv-cache-bytes '12Q' is no size": ["-p", "x", "--kv-cache-bytes", "12Q"],
    "--kv-type 'q9_9' does not exist": ["-p", "x", "--kv-type", "q9_9"],
    "pyvelo: --kv-type 'f16,f16,f16': give one type, or two": [
        "-p",
        "x",
        "--kv-type",
        "f16,f16,f16",
    ],
    "--block-size 48": ["-p", "x", "--block-size", "48"],
    "there is no folder /does/not": ["-f", "/does/not/exist"],
}


@pytest.mark.parametrize("shown", [False, True])
def test_reasoning_is_a_text_of_its_own_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    def thinks(*_: object, **__: object) -> Generator[StreamPiece, None, None]:
        yield StreamPiece("<think>hm", (1,), deltas=(Delta(reasoning="hm"),))
        yield StreamPiece("</think>42", (2,), "stop", deltas=(Delta(content="42"),))

    monkeypatch.setattr("pyvelo.LLM.chat_stream", thinks)
    asked = run_cli(capsys, "run", "why?", *(["--reasoning", "show"] if shown else []))
    assert asked == (0, "42\n", "hm\n\n" * shown)
    report = json.loads(run_cli(capsys, "run", "why?", "--json")[1])
    assert (report["text"], report["reasoning"]) == ("42", "hm")


def test_words_are_the_model_and_the_prompt(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    asked = run_cli(capsys, "run", "What is 12 + 30?")
    assert asked[0] == 0
    assert asked[1].endswith("42.\n")
    assert asked == run_cli(capsys, "run", "-p", "What is 12 + 30?")
    named = run_cli(capsys, "run", tiny_model, PROMPT, "-n", "3")
    assert named == run_cli(capsys, "run", tiny_model, "-p", PROMPT, "-n", "3")
    for words, complaint in (
        ((tiny_model, "a", "b"), "one PROMPT"),
        ((tiny_model, "a", "-p", "b"), "given twice"),
    ):
        code, _, err = run_cli(capsys, "run", *words)
        assert (code, complaint in err) == (2, True), err


@pytest.mark.parametrize("words", [(), ("no.gguf",), ("org/repo:Q4_0",), ("hf.co/org/repo",)])
def test_a_terminal_is_asked_for_no_prompt(words: tuple[str, ...]) -> None:
    code, shown = in_a_terminal([*PYVELO, "run", *words])
    assert (code, shown.startswith(b"pyvelo: what is the prompt? Give it after MODEL")) == (2, True), shown


def test_a_file_follows_the_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (file := tmp_path / "sum.txt").write_text("12 + 30?")
    asked = run_cli(capsys, "run", "What is\n\n12 + 30?")
    for words in (
        ("What is", "-f", file),
        ("-p", "What is", "-f", file),
        (DEMO_MODEL, "What is", "-f", file),
    ):
        assert run_cli(capsys, "run", *words) == asked
    assert run_cli(capsys, "run", "What", "-f", file)[0] == 1  # a word alone is a model
    assert run_cli(capsys, "run", "Say:", "-f", file) == run_cli(capsys, "run", "Say:\n\n12 + 30?")
    file.write_text(" \n")
    assert f"the file {file} has no text" in run_cli(capsys, "run", "What is", "-f", file)[2]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes on Windows")
def test_a_note_tells_of_a_silent_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, encoding="utf-8") as pipe, os.fdopen(writes, "w", encoding="utf-8") as end:
        monkeypatch.setattr(sys, "stdin", pipe)
        monkeypatch.setattr("pyvelo.cli.run.PATIENCE", 0.1)
        threading.Timer(0.5, end.close).start()
        with pytest.raises(UsageError, match="what is the prompt"):
            read_message(None, None)
    assert "the prompt is read from standard input, which says nothing so far" in capsys.readouterr().err


def test_a_pipe_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyvelo.cli.run.MAX_BYTES", 1 << 20)
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        with pytest.raises(ConfigError, match=r"standard input has more than 1\.0 MiB"):
            read_message("-", None)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes on Windows")
def test_standard_input_is_read_or_said_to_be_ignored() -> None:
    for words, note in (
        (
            ["What is 12 +"],
            "pyvelo: standard input has a text that is not read: -f - would add it to the prompt\n",
        ),
        (["What is 12 +", "-f", "-"], ""),
        ([], ""),
        ([str(DEMO_MODEL)], ""),
        (["-p", "-"], ""),
        (["-"], ""),
    ):
        done = forks.run([*PYVELO, "run", *words, "-n", "4"], input=b"30?\n")
        assert (done.returncode, done.stderr.decode()) == (0, note)
    assert forks.run([*PYVELO, "run", "What is 12 + 30?", "-n", "4"], input=b"").stderr == b""


@pytest.mark.parametrize(("complaint", "arguments"), USAGE.items(), ids=list(USAGE))
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, complaint: str, arguments: list[str]
) -> None:
    code, out, err = run_cli(capsys, "run", tiny_model, *arguments)
    assert code == (1 if "there is no" in complaint else 2)
    assert out == ""
    assert complaint in err
    assert (err[:8], err.count("\n")) == ("pyvelo: ", 1)


def test_bad_models_and_prompts_are_one_line(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model.read_bytes()[:-1000])
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    for complaint, arguments in {
        "there is no model": ["run", tmp_path / "absent.gguf", "-p", "x"],
        "is not a GGUF file": ["run", latin, "-p", "x"],
        "is damaged": ["run", cut, "-p", "x"],
        "is not UTF-8 text": ["run", tiny_model, "-f", latin],
        "prompt": ["run", tiny_model, "-p", "fox " * 4000, "--ctx", "128"],
    }.items():
        code, out, err = run_cli(capsys, *arguments)
        assert (code, out) == (1, "")
        assert complaint in err
        assert (err[:8], err.count("\n")) == ("pyvelo: ", 1)


def test_the_answer_streams_and_ctrl_c_ends_it(endless_model: Path) -> None:
    arguments = ["run", str(endless_model), "-p", PROMPT, "-n", "-1", "--ignore-eos", "--ctx", "60000"]
    process = start(*arguments)
    first = first_byte(process)
    # words arrive while the process still runs
    assert (first, process.poll()) == (b" ", None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (shell_code(process), err) == (130, b"")
    assert (first + out).endswith(b"\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_end_an_answer_as_ctrl_c_does(endless_model: Path, number: int, code: int) -> None:
    words = ["run", str(endless_model), "-p", PROMPT, "-n", "-1", "--ignore-eos", "--ctx", "60000"]
    process = start(*words)
    first_byte(process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err, out[-1:]) == (code, b"", b"\n")


def test_a_signal_with_json_still_gives_an_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    def ends(*_: object) -> Generator[StreamPiece, None, None]:
        yield StreamPiece("one", (1,))
        raise SystemExit(143)

    monkeypatch.setattr("pyvelo.LLM.stream", ends)
    code, out, err = run_cli(capsys, "run", tiny_model, "-p", PROMPT, "--json")
    report = json.loads(out)
    assert (code, err, report["text"], report["finish_reason"]) == (143, "", "one", "abort")


def test_ctrl_c_with_json_still_gives_an_object(endless_model: Path) -> None:
    arguments = [
        "run",
        str(endless_model),
        "-p",
        PROMPT,
        "-n",
        "-1",
        "--ignore-eos",
        "--json",
        "--ctx",
        "60000",
    ]
    process = start(*arguments)
    while not _has_started(process.pid):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert err == b""
    if process.returncode == 0:
        assert json.loads(out)["finish_reason"] == "length"  # it was faster than we
    else:
        assert shell_code(process) == 130
        assert not out or json.loads(out)["finish_reason"] == "abort"


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the command in a process that handles signals, even if the caller of the tests ignores them."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=forks.heed_signals,
    )


def shell_code(process: subprocess.Popen[bytes]) -> int:
    """The exit code that a shell sees: Python ends itself by the signal where it came during an import."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def first_byte(process: subprocess.Popen[bytes]) -> bytes:
    """Return the first byte of a process's output; fail if there is none."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    if not ready:
        process.kill()
        pytest.fail("no output in a minute")
    return os.read(process.stdout.fileno(), 1)


def _has_started(pid: int) -> bool:
    """Whether the process has mapped the library, and so has a handler for Ctrl-C."""
    maps = Path(f"/proc/{pid}/maps")
    return not maps.exists() or "libvelo-llama" in maps.read_text()


def test_a_reader_that_goes_away_is_no_error(tiny_model: Path) -> None:
    arguments = ["run", str(tiny_model), "-p", PROMPT, "-n", "-1", "--ignore-eos"]
    process = start(*arguments)
    assert first_byte(process) == b" "
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), err) == (141, b"")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1048576", 1 << 20), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("2 kb", 2048)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "M", "-1", "1e9", "5 P", "1,5G"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_kv_types() -> None:
    assert parse_kv_type_option("q8_0") == "q8_0"
    assert parse_kv_type_option("q8_0, f16") == ("q8_0", "f16")
    for text in ("", "a,", ",b", "a,b,c"):
        with pytest.raises(ConfigError):
            parse_kv_type_option(text)


def test_what_the_library_says_is_a_line_of_the_command(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "pyvelo: --ctx 8192 is longer than the 4096 tokens the model was trained on\n"
    for _ in range(2):  # the second run says it once, too
        code, _, err = run_cli(capsys, "run", tiny_model, "-p", PROMPT, "-n", "1", "--ctx", "8192")
        assert (code, err) == (0, line)


@pytest.mark.parametrize(("options", "hints"), [((), 1), (("--chat",), 0), (("--json",), 0)])
def test_a_terminal_shows_how_to_ask_a_model_that_can_chat(
    options: tuple[str, ...], hints: int, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(DEMO_MODEL)
    command = [*PYVELO, "run", str(model), "The KV cache", "--max-tokens", "2", *options]
    code, shown = in_a_terminal(command)
    assert (code, shown.count(b"with --chat it is a message")) == (0, hints)
