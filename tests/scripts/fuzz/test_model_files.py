"""The fuzzer: the same seed gives the same files, and what it makes never ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("resource", reason="limits and forks of POSIX")

from scripts.fuzz import model_files
from scripts.fuzz._damage import mutant
from scripts.fuzz._document import read_document, write_document
from scripts.fuzz.model_files import main, make_bases
from tests import forks


def test_documents_are_written_as_they_were_read(tiny_model: Path) -> None:
    assert write_document(read_document(tiny_model)) == tiny_model.read_bytes()


def test_the_same_seed_gives_the_same_mutants(tmp_path: Path) -> None:
    bases = make_bases(tmp_path, ["llama", "lfm2"])
    for index in range(40):
        assert mutant(bases, 3, index) == mutant(bases, 3, index)
    assert len({mutant(bases, 3, index)[1] for index in range(40)}) > 30


def test_mutants_are_refused_or_run() -> None:
    arguments = ["--arch", "llama", "--arch", "gemma3", "--arch", "lfm2", "--count", "120", "--seed", "11"]
    done = forks.run([forks.PYTHON, model_files.__file__, *arguments], text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "120 mutants of seed 11" in done.stdout
    assert "ran" in done.stdout


def test_a_worker_that_dies_is_a_finding(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "from scripts.fuzz import model_files\n"
        "def attempt(path, index):\n"
        "    if index == 2: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    if index == 4: time.sleep(60)\n"
        "    return 'ran', ''\n"
        "model_files.attempt = attempt\n"
        "sys.exit(model_files.main(sys.argv[1:]))\n"
    )
    arguments = ["--arch", "llama", "--count", "6", "--limit", "2", "--save", str(tmp_path / "found")]
    done = forks.run([forks.PYTHON, "-c", code, *arguments], text=True)
    assert done.returncode == 1, done.stderr
    assert "2: died" in done.stdout
    assert "SIGSEGV" in done.stdout
    assert "4: hung" in done.stdout
    assert "4 ran" in done.stdout
    found = sorted(path.name for path in (tmp_path / "found").iterdir())
    assert found == ["died-0-2.gguf", "hung-0-4.gguf"]


def test_one_mutant_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--arch", "llama", "--seed", "1", "--replay", "0"]) == 0
    assert capsys.readouterr().out.count(": ") >= 1
