"""Run tests against mutants, each in a fork of a process that has imported and collected all tests.

A mutant within a function replaces the function's code in its fork; any other is written to the file and
runs in a new process. Each runs only the tests that reach its line, the quickest first.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from scripts.check._mutants import Mutant

__all__ = ["ARGUMENTS", "LIMIT", "MEMORY", "STANDSTILL", "Runs"]

LIMIT = 2.0
"""CPU seconds for one test, added to four times its seconds with unchanged code."""

STANDSTILL = 6.0
"""Wall-clock seconds for one test, added to eight times its seconds with unchanged code."""

MEMORY = 8 << 30
"""Bytes of address space: a test that does not end may also grow."""

LONGEST = 4.0
"""CPU seconds: a test that takes more is left out."""

ARGUMENTS = ["-x", "-qq", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly"]
# the second: hypothesis is imported already
ARGUMENTS += ["-p", "no:faulthandler", "-W", "ignore::pytest.PytestAssertRewriteWarning"]

FAILED, NOT_REPLACED = 1, 2  # statuses of a fork

Tell = Callable[[int, str, float], None]
Cost = tuple[float, float]  # seconds of the processor, and of the clock
Measured = dict[str, tuple[Cost, dict[str, list[int]]]]
"""Cost of each test, and the lines of each file that it reaches."""


class Runs:
    """pytest plugin that runs the collected tests against each of `chosen` instead of once.

    `home` holds the copy of the package; `tell` receives each mutant's number, verdict and seconds;
    `files_of` names the files of tests for a mutant outside of functions. The lines that tests reach in
    `modules` are kept in the file `measured`. A mutant runs tests of up to `seconds` CPU seconds, all if that
    is None.
    """

    def __init__(
        self,
        home: Path,
        chosen: list[tuple[int, Mutant]],
        tell: Tell,
        files_of: Callable[[str], list[str]],
        *,
        modules: Sequence[str],
        measured: Path,
        seconds: float | None = None,
    ) -> None:
        self._home = home
        self._chosen = chosen
        self._tell = tell
        self._files_of = files_of
        self._sources = {file: (home / file).read_bytes() for file in modules}
        self._paths = {os.fspath(home / file): file for file in modules}
        self._lines: dict[str, set[int]] = {file: set() for file in modules}  # reached by the test that runs
        self._kept = measured
        self._measured: Measured = {}
        self._seconds = seconds
        self._in_setup: dict[tuple[str, str], set[int]] = {}  # by the tests' file, and ours
        self._measuring = False
        self._errors = os.dup(2)  # pytest replaces it with a file

    # ---- hooks ----

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return True
        if not self._kept.exists() and _in_fork(lambda: self._measure(session.items)) != 0:
            return True  # no verdict was reported
        self._measured = json.loads(self._kept.read_text(encoding="utf-8"))
        for number, mutant in self._chosen:
            start = time.monotonic()
            what = self._judge(mutant, session.items)
            self._tell(number, what, time.monotonic() - start)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            if self._measuring:
                os.write(self._errors, f"{report.nodeid}: {report.longreprtext}\n".encode())
            os._exit(FAILED)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._measuring:
            for lines in self._lines.values():
                lines.clear()
            threading.settrace(self._trace)
            sys.settrace(self._trace)
        else:
            processor, clock = self._cost(item)
            signal.setitimer(signal.ITIMER_PROF, LIMIT + 4 * processor)
            signal.setitimer(signal.ITIMER_REAL, STANDSTILL + 8 * clock)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Record the lines that a test reaches.

        A fixture's lines count for all tests of the file, which may share it.
        """
        if self._measuring:
            for file, lines in self._lines.items():
                self._in_setup.setdefault((item.nodeid.split("::")[0], file), set()).update(lines)

    # ---- unchanged code ----

    def _measure(self, items: list[pytest.Item]) -> None:
        """Record what each test costs and which lines it reaches."""
        self._measuring = True
        found: dict[str, tuple[Cost, dict[str, set[int]]]] = {}
        for item, following in _pairs(items):
            before = _seconds()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            processor, clock = (now - then for now, then in zip(_seconds(), before, strict=True))
            found[item.nodeid] = (processor, clock), {file: set(s) for file, s in self._lines.items()}
        for name, (_, reached) in found.items():
            for file, lines in reached.items():
                lines |= self._in_setup.get((name.split("::")[0], file), set())
        plain = {
            n: (cost, {f: sorted(s) for f, s in reached.items()}) for n, (cost, reached) in found.items()
        }
        self._kept.write_text(json.dumps(plain), encoding="utf-8")

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        file = self._paths.get(frame.f_code.co_filename)
        if file is None:
            return None
        add = self._lines[file].add

        def note(frame: FrameType, event: str, argument: object) -> Any:
            add(frame.f_lineno)
            return note

        return note(frame, event, argument)

    # ---- a mutant ----

    def _judge(self, mutant: Mutant, items: list[pytest.Item]) -> str:
        changed = mutant.apply(self._sources[mutant.file])
        if not _is_within_function(self._sources[mutant.file], mutant.start):
            return self._judge_file(mutant, changed)
        chosen = self._telling(mutant, items)

        def run() -> None:
            try:
                _replace(os.fspath(self._home / mutant.file), self._sources[mutant.file], changed)
            except ValueError:  # its closure differs now, or no function has the code
                os._exit(NOT_REPLACED)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            for item, following in _pairs(chosen):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

        status = _in_fork(run)
        if os.waitstatus_to_exitcode(status) == NOT_REPLACED:
            return self._judge_file(mutant, changed)
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
        return "late" if late else "killed" if status else "survived"

    def _telling(self, mutant: Mutant, items: list[pytest.Item]) -> list[pytest.Item]:
        """Return the tests that reach a mutant, the quickest first."""
        lines = set(range(mutant.number, mutant.number + mutant.was.count("\n") + 1))

        def rank(item: pytest.Item) -> int:
            return int(
                self._cost(item)[0] * 100
            ).bit_length()  # roughly, so that tests of a file stay together

        left, chosen = self._seconds or float("inf"), []
        for item in sorted(items, key=rank):
            cost = self._cost(item)[0]
            _, reached = self._measured.get(item.nodeid, (None, {mutant.file: lines}))
            if cost <= min(left, LONGEST) and lines.intersection(reached[mutant.file]):
                chosen.append(item)
                left -= cost
        return chosen

    def _cost(self, item: pytest.Item) -> Cost:
        """Return the cost of a test; an unmeasured one counts as quick, with a long limit."""
        return self._measured.get(item.nodeid, ((0.0, 5.0), {}))[0]

    def _judge_file(self, mutant: Mutant, changed: bytes) -> str:
        path = self._home / mutant.file
        command = [sys.executable, "-B", "-m", "pytest", *ARGUMENTS, *self._files_of(mutant.file)]
        try:
            path.write_bytes(changed)
            done = subprocess.run(command, cwd=self._home, capture_output=True, timeout=20 * STANDSTILL)
        except subprocess.TimeoutExpired:
            return "late"
        finally:
            path.write_bytes(self._sources[mutant.file])
        return "survived" if done.returncode == 0 else "killed"


def _in_fork(work: Callable[[], None]) -> int:
    """Run the work in a child; return its status, 0 if it finished."""
    child = os.fork()
    if child == 0:
        status = FAILED
        try:
            silent = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(silent, stream)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def _pairs(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Return each test with the next one."""
    return zip(items, [*items[1:], None], strict=False)  # one too many if there are no items


def _seconds() -> Cost:
    return time.process_time() + sum(os.times()[2:4]), time.monotonic()


def _is_within_function(source: bytes, at: int) -> bool:
    """Return whether a byte belongs to the body of a function, which runs when it is called."""
    line = source.count(b"\n", 0, at) + 1
    functions = (
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return any(f.body[0].lineno <= line <= (f.end_lineno or 0) for f in functions)


def _functions(
    code: CodeType, path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], CodeType]]:
    """Yield the code of every function below.

    The path is its names from the outside in, each with an index among equal names.
    """
    count: dict[str, int] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            count[inner.co_name] = count.get(inner.co_name, 0) + 1
            here = (*path, inner.co_name, count[inner.co_name])
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield here, inner
            yield from _functions(inner, here)


def _replace(file: str, source: bytes, changed: bytes) -> None:
    """Give the functions of a file the code that they have in its changed source.

    Raises:
        ValueError: a function's closure would differ, or no function changed.
    """
    before, after = (dict(_functions(compile(s, file, "exec"))) for s in (source, changed))
    places = {(code.co_name, code.co_firstlineno): path for path, code in before.items()}
    n_changed = 0
    gc.unfreeze()  # frozen objects are not listed
    for function in [o for o in gc.get_objects() if isinstance(o, FunctionType)]:
        code = function.__code__
        path = places.get((code.co_name, code.co_firstlineno))
        if code.co_filename == file and path in after and after[path] != code:
            function.__code__ = after[path]
            n_changed += 1
    if not n_changed:
        raise ValueError("no function has the code")
