"""Run llama-server's own tests, from the pinned source, against `pyvelo serve`.

    pip install pytest requests filelock wget openai
    python scripts/check/llama_server_suite.py
    python scripts/check/llama_server_suite.py test_completion test_compat_anthropic
    python scripts/check/llama_server_suite.py --docs

A plugin of pytest starts our server with the options of each case. The suite's models cannot be had here: a
model with random weights answers, so the words of answers and the numbers of tokens of prompts are not
compared; texts that a grammar forces are. Cases that need a larger model ("slow") are left out. A case
passes, or is skipped with a reason of scripts/check/_llama_server_skips.py. Prints a row for each
file; the exit status is 0 if no case fails. --docs writes the table of all cases into
docs/LLAMA_SERVER_TESTS.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, run_main
from scripts.check._suite import OUTCOMES, Case, run_suite, totals
from scripts.models._shapes import Shape
from scripts.models.make import write_model
from scripts.upstream._pin import read_pin
from scripts.upstream.fetch import locate

PAGE = ROOT / "docs" / "LLAMA_SERVER_TESTS.md"
MODEL = Shape(ctx=8192)
ENCODER = Shape("bert", kv_heads=4, ctx=512, vocab="bert-bge", pooling="mean")


def run(tests: Path, files: Sequence[str], folder: Path) -> list[Case]:
    """Run files of the suite; print what pytest prints.

    Raises: ScriptError if it could not run.
    """
    model, encoder, report = folder / "tiny.gguf", folder / "encoder.gguf", folder / "report.xml"
    write_model(MODEL, model, type_name="q8_0")
    write_model(ENCODER, encoder, type_name="f16")
    models = {"model": model, "encoder": encoder}
    unit = tests / "unit"
    found = [str(unit / f"{name.removesuffix('.py')}.py") for name in files] or [str(unit)]
    options = ["-m", "not slow", "-c", str(tests / "pytest.ini")]
    return run_suite("scripts.check._llama_server_plugin", models, tests, report, [*options, *found])


def table(cases: Sequence[Case]) -> str:
    """Return the page: a row for each test of the suite, by file."""
    counts = Counter(case.outcome for case in cases)
    lines = [
        "# llama-server's own tests",
        "",
        f"`python scripts/check/llama_server_suite.py --docs` wrote this page. {counts['passed']} of "
        f"{len(cases)} cases pass, {counts['skipped']} are skipped for the reasons below, and "
        f"{counts['failed']} fail. Words of answers and numbers of tokens of prompts are not compared: the "
        "suite's models are not here. The server runs with `--deterministic`.",
        "",
    ]
    for file in sorted({case.file for case in cases}):
        lines += [f"## {file}", "", "| test | cases | |", "|---|---:|---|"]
        lines += [f"| {name} | {n} | {text} |" for name, n, text in _rows(cases, file)] + [""]
    return "\n".join(lines)


def _rows(cases: Sequence[Case], file: str) -> list[tuple[str, int, str]]:
    """Return the tests of a file with the number of their cases and how they ended."""
    found = Counter(
        (case.name.split("[")[0], "passes" if case.outcome == "passed" else case.reason.splitlines()[0])
        for case in cases
        if case.file == file
    )
    return [(name, n, text) for (name, text), n in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", help="files of the suite, such as test_completion; default: all")
    parser.add_argument("--docs", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    tests = locate(read_pin()).path / "tools" / "server" / "tests"
    with tempfile.TemporaryDirectory() as folder:
        cases = run(tests, arguments.files, Path(folder))
    for file in sorted({case.file for case in cases}):
        counts = Counter(case.outcome for case in cases if case.file == file)
        print(f"{file:32}" + "".join(f"{counts[each]:4} {each}" for each in OUTCOMES))
    counts = totals(cases)
    if arguments.docs:
        PAGE.write_text(table(cases), encoding="utf-8")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
