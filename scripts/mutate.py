#!/usr/bin/env python3
"""Changes the block manager and the engine in small ways, and tells which changes no test notices.

    python scripts/mutate.py
    python scripts/mutate.py pyvelo/kv/pool.py --sample 50 --seed 3

Each mutant runs in a copy of the package, never in the checkout: the quick tests of tests/kv and tests/engine
until one of them fails, in a process of its own, with examples that are the same each time; those of the
asyncio face for the engine's own thread. It is killed when
a test fails, or takes far too long. Survivors that cannot be told from the original by any test are
listed, with the reason, in scripts/mutants_equivalent.json, and are not counted. Ends with status 1 if
fewer than 95 % are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _mutants import Mutant, mutants
from _upstream import ROOT, UpstreamError, run_main

GOAL = 0.95
LIMIT = 8.0
"""Seconds of the processor for one test: the longest takes three."""

STANDSTILL = 100.0
"""Seconds for one test, which may wait for what never comes."""

MEMORY = 8 << 30
"""Bytes of addresses: what never ends may also grow."""

MODULES = tuple(f"pyvelo/kv/{name}.py" for name in ("pool", "prefix", "draft", "check", "manager", "swap"))
MODULES += tuple(
    f"pyvelo/engine/{name}.py" for name in ("scheduler", "batch", "core", "driver", "pump", "branch")
)
TESTED = [
    "core",
    "sharing",
    "preemption",
    "samples",
    "branches",
    "pace",
    "batch",
    "driver",
    "prompt_logprobs",
]
ENGINE_TESTS = tuple(f"tests/engine/test_{name}.py" for name in TESTED)
OWN = {
    "pyvelo/engine/branch.py": ["tests/engine/test_branches.py"],
    "pyvelo/engine/pump.py": ["tests/e2e/test_async.py", "tests/e2e/test_async_sessions.py"],
}
"""Tests that are run first, if their names do not follow from the module's."""

EQUIVALENT = Path(__file__).resolve().parent / "mutants_equivalent.json"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "killed", "late" (the tests took too long: killed too) or "survived"."""

    mutant: Mutant
    what: str
    seconds: float


# ---- in a process of its own, beside a copy of the package ----


class Limit:
    """A plugin of pytest that ends the process when a test takes too long.

    Args: seconds of the processor, and of the clock.
    """

    def __init__(self, seconds: float, standstill: float) -> None:
        self._seconds = seconds
        self._standstill = standstill

    def pytest_runtest_setup(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        signal.setitimer(signal.ITIMER_REAL, self._standstill)


class Tests:
    """Runs tests in forks of a process that has imported what they all need, but nothing of the package.

    `stages` are files; a stage is begun when the one before has passed.
    """

    def __init__(self, home: Path, stages: list[list[str]]) -> None:
        import numpy  # noqa: F401
        import pytest
        from hypothesis import Phase, settings

        # a failure is enough: it need not be the smallest one
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)
        settings.load_profile("mutants")
        self._home = home
        self._main = pytest.main
        self._stages = stages
        plugins = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:faulthandler"]
        # that hypothesis is here already
        warnings = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        self._arguments = ["-x", "-q", "--tb=no", "--no-header", *warnings, *plugins]

    def passed(self) -> bool | None:
        """Whether all passed; None where one took too long."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = self._run()
            finally:
                os._exit(status)
        _, how = os.waitpid(child, 0)
        late = os.WIFSIGNALED(how) and os.WTERMSIG(how) in (signal.SIGPROF, signal.SIGALRM)
        return None if late else how == 0

    def _run(self) -> int:
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        os.chdir(self._home)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        for stage in self._stages:
            if status := int(self._main([*self._arguments, *stage], plugins=[Limit(LIMIT, STANDSTILL)])):
                return status
        return 0


def judge(home: Path, mutant: Mutant, number: int, tests: Tests) -> Verdict:
    """Puts the mutant in the place of its module, for as long as the tests run."""
    path = home / mutant.file
    original = path.read_bytes()
    start = time.monotonic()
    try:
        path.write_bytes(mutant.apply(original))
        # Python tells a stale cache by the time, in seconds: no two versions have the same
        os.utime(path, (number, number))
        outcome = tests.passed()
    finally:
        path.write_bytes(original)
    what = {True: "survived", False: "killed", None: "late"}[outcome]
    return Verdict(mutant, what, time.monotonic() - start)


def stages_of(module: str) -> list[list[str]]:
    """Tests of the module alone, then all others."""
    name, here = Path(module).stem, ROOT / "tests"
    named = [f"{folder}/test_{name}.py" for folder in ("kv", "engine")]
    own = OWN.get(module, [f"tests/{path}" for path in named if (here / path).exists()])
    kv = sorted(path.relative_to(ROOT).as_posix() for path in (here / "kv").glob("test_*.py"))
    rest = [*ENGINE_TESTS, *kv] if module.startswith("pyvelo/engine") else [*kv, *ENGINE_TESTS]
    rest = [test for test in rest if test not in own]
    return [own, rest] if own else [rest]


def worker(home: Path) -> None:
    """Reads mutants as lines of JSON, groups them by module, and writes a line for each."""
    numbered = list(enumerate((Mutant(**json.loads(line)) for line in sys.stdin), start=1))
    for module in dict.fromkeys(mutant.file for _, mutant in numbered):
        tests = Tests(home, stages_of(module))
        if tests.passed() is not True:
            raise UpstreamError(f"the tests of {module} fail without any change: mend that first")
        for number, mutant in numbered:
            if mutant.file == module:
                verdict = judge(home, mutant, number, tests)
                print(json.dumps([number - 1, verdict.what, verdict.seconds]), flush=True)


# ---- around it ----


def make_copy(home: Path) -> None:
    """The package with its compiled libraries, and the tests."""
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("pyvelo", "tests", "scripts"):
        shutil.copytree(ROOT / name, home / name, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", home)


def verdicts(chosen: list[Mutant], jobs: int) -> Iterator[Verdict]:
    """Judges mutants, in as many copies as there are jobs."""
    with tempfile.TemporaryDirectory(prefix="pyvelo-mutants-") as folder:
        shares = [share for share in (chosen[n::jobs] for n in range(jobs)) if share]
        running = []
        for number, share in enumerate(shares):
            home = Path(folder, str(number))
            make_copy(home)
            command = [sys.executable, __file__, "--worker", str(home)]
            environment = {**os.environ, "PYTHONPATH": str(home)}
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
                raise UpstreamError("the tests of the mutants broke off: see above")


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Why mutants cannot be told from the original, by file, line, and what becomes what."""
    entries = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return {(e["file"], e["line"], e["was"], e["becomes"]): e["reason"] for e in entries}


def key(mutant: Mutant) -> tuple[str, str, str, str]:
    return mutant.file, mutant.line, mutant.was, mutant.becomes


def report(found: list[Verdict], known: dict[tuple[str, str, str, str], str]) -> float:
    """Prints survivors and a table; returns the share of mutants that were killed."""
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
    parser.add_argument("--sample", type=int, help="so many mutants, drawn with --seed; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--match", nargs="+", help="those alone whose line of --list holds one of these texts"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--list", action="store_true", help="only name the mutants")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker)
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
    for verdict in verdicts(chosen, given.jobs):
        found.append(verdict)
        if verdict.what != "killed" or sys.stderr.isatty():
            text = f"{len(found)} of {len(chosen)}: {verdict.what}, {verdict.seconds:.1f} s: {verdict.mutant}"
            print(text, file=sys.stderr, flush=True)
    return int(report(found, known) < GOAL)


if __name__ == "__main__":
    sys.exit(run_main(main))
