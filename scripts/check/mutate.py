"""Change the block manager and the engine in small ways, and list the changes that no test notices.

    python scripts/check/mutate.py
    python scripts/check/mutate.py pyvelo/kv/pool.py --sample 50 --seed 3

Each mutant runs in a copy of the package, never in the checkout: the tests of tests/kv, tests/engine and some
of tests/e2e that reach its line, until one of them fails, with the same examples each time. It is killed
if a test fails or takes far too long. Survivors that no test can tell from the original are listed in
mutants_equivalent.json with the reason, and are not counted. The exit status is 1 if fewer than 95 % are
killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.check._mutant_runs import ARGUMENTS, Runs
from scripts.check._mutants import Mutant, mutants

GOAL = 0.95

MODULES = tuple(f"pyvelo/kv/{name}.py" for name in ("pool", "prefix", "partial", "plan", "manager", "states"))
ENGINE = ("scheduler", "step", "output", "queues", "loop", "async_loop", "request", "states")
MODULES += tuple(f"pyvelo/engine/{name}.py" for name in ENGINE)
EFFORT = "0.2"
"""Effort of the state machines."""

QUICK = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("kv", "engine")
    for path in (ROOT / "tests" / folder).glob("test_*.py")
)
"""Tests without a model."""

OF_ASYNC_LLM = ("abort", "async", "async_preparing", "async_sessions", "lifetimes")
OF_LLM = ("llm", "sessions", "beam_search", "endings", "prompt_logprobs")
TESTS = [*QUICK, *(f"tests/e2e/test_{name}.py" for name in OF_ASYNC_LLM + OF_LLM)]

EQUIVALENT = Path(__file__).resolve().parent / "mutants_equivalent.json"


@dataclass(frozen=True)
class Verdict:
    """Verdict on a mutant: "killed", "late" (tests took too long, counts as killed) or "survived"."""

    mutant: Mutant
    what: str
    seconds: float


# ---- in a process of its own, beside a copy of the package ----


def files_of(module: str) -> list[str]:
    """Return the files of quick tests, the module's own first."""
    own = f"/test_{Path(module).stem}"
    return sorted(QUICK, key=lambda test: own not in test)


def worker(home: Path, measured: Path, seconds: float | None) -> None:
    """Read mutants as lines of JSON and write a line for each."""
    import numpy  # noqa: F401
    from hypothesis import Phase, settings

    # any failure is enough, without shrinking
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)
    settings.load_profile("mutants")
    numbered = list(enumerate(Mutant(**json.loads(line)) for line in sys.stdin))
    n_told, out = 0, os.fdopen(os.dup(1), "w")

    def tell(number: int, what: str, seconds: float) -> None:
        nonlocal n_told
        n_told += 1
        print(json.dumps([number, what, seconds]), file=out, flush=True)

    os.dup2(2, 1)
    os.chdir(home)
    runs = Runs(home, numbered, tell, files_of, modules=MODULES, measured=measured, seconds=seconds)
    pytest.main(
        [*ARGUMENTS, *TESTS, "-k", "not forked"], plugins=[runs]
    )  # those need a process without this plugin
    if n_told < len(numbered):
        raise ScriptError("the tests fail on the unchanged code: mend that first")


# ---- copies, known survivors, output ----


def make_copy(home: Path) -> None:
    """Copy the package with its compiled libraries, the tests, and what these use."""
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("pyvelo", "tests", "scripts", "vendor"):
        shutil.copytree(ROOT / name, home / name, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", home)


def verdicts(
    chosen: list[Mutant], jobs: int, measured: Path | None, seconds: float | None
) -> Iterator[Verdict]:
    """Judge mutants in as many copies as there are jobs."""
    with tempfile.TemporaryDirectory(prefix="pyvelo-mutants-") as folder:
        shares = [share for share in (chosen[n::jobs] for n in range(jobs)) if share]
        running = []
        for number, share in enumerate(shares):
            home = Path(folder, str(number))
            make_copy(home)
            command = [sys.executable, __file__, "--worker", str(home)]
            command += ["--measured", str((measured or home / "measured.json").resolve())]
            command += ["--seconds", str(seconds)] if seconds else []
            environment = {**os.environ, "PYTHONPATH": str(home), "VELO_TEST_EFFORT": EFFORT}
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            assert process.stdin is not None
            process.stdin.write("".join(json.dumps(vars(mutant)) + "\n" for mutant in share))
            process.stdin.close()
            running.append(process)
        for process, share in zip(running, shares, strict=True):
            assert process.stdout is not None
            for line in process.stdout:
                index, what, seconds = json.loads(line)
                yield Verdict(share[index], what, seconds)
            if process.wait() != 0:
                raise ScriptError("the tests of the mutants ended early: see above")


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Return why mutants equal the original, by file, line, old and new text."""
    entries = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return {(e["file"], e["line"], e["was"], e["becomes"]): e["reason"] for e in entries}


def key(mutant: Mutant) -> tuple[str, str, str, str]:
    return mutant.file, mutant.line, mutant.was, mutant.becomes


def report(found: list[Verdict], known: dict[tuple[str, str, str, str], str]) -> float:
    """Print survivors and a table; return the share of mutants that were killed."""
    survived = [v.mutant for v in found if v.what == "survived"]
    for mutant in survived:
        print(f"{'equivalent' if key(mutant) in known else 'SURVIVED'}  {mutant}\n    {mutant.line}")
    print("\n| | mutants | killed | of those too late | equivalent | survived | |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    share = 1.0
    for name in (*dict.fromkeys(v.mutant.file for v in found), "all"):
        part = [v for v in found if name in (v.mutant.file, "all")]
        count = Counter(v.what for v in part)
        same = sum(v.what == "survived" and key(v.mutant) in known for v in part)
        killed = count["killed"] + count["late"]
        share = killed / max(1, len(part) - same)
        print(
            f"| {name} | {len(part)} | {killed} | {count['late']} | {same} "
            f"| {count['survived'] - same} | {share:.1%} |"
        )
    return share


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=list(MODULES), help="files, from the root")
    parser.add_argument("--sample", type=int, help="number of mutants, drawn with --seed; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--match", nargs="+", help="only mutants whose line of --list contains one of these texts"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    parser.add_argument(
        "--measured",
        type=Path,
        help="a file that keeps what tests reach for the next run: delete it after changes",
    )
    parser.add_argument(
        "--seconds", type=float, help="CPU seconds of tests for a mutant, the quickest first; default: all"
    )
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.measured, given.seconds)
        return 0
    chosen = [m for file in given.modules for m in mutants(file, (ROOT / file).read_bytes())]
    if given.match:
        chosen = [m for m in chosen if any(text in str(m) for text in given.match)]
    if given.sample is not None and given.sample < len(chosen):
        drawn = sorted(random.Random(given.seed).sample(range(len(chosen)), given.sample))
        chosen = [chosen[index] for index in drawn]
    if given.list:
        print(*chosen, sep="\n")
        return 0
    known = equivalents()
    found = []
    for verdict in verdicts(chosen, given.jobs, given.measured, given.seconds):
        found.append(verdict)
        if verdict.what != "killed" or sys.stderr.isatty():
            text = f"{len(found)} of {len(chosen)}: {verdict.what}, {verdict.seconds:.1f} s: {verdict.mutant}"
            print(text, file=sys.stderr, flush=True)
    return int(report(found, known) < GOAL)


if __name__ == "__main__":
    sys.exit(run_main(main))
