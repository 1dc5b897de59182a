"""The mutation check: which changes there are, and that it sees what tests notice."""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.check import mutate
from scripts.check._mutants import Mutant, mutants

SOURCE = '''\
"""A text with 1 number."""

__all__ = ["f"]

if TYPE_CHECKING:
    import g


def f(a: int | None, b: bytes) -> int:
    """Another."""
    if not a or len(b) < 2:
        raise ValueError(f"{a + 1}")
    for x in reversed(b[1:]):
        if x == a:
            break
        note(x)
    return min(a, -3)
'''

SMALL = """\
FIRST = 0


def count(n):
    seen = 0
    while n > 0:
        n -= 1
        seen += 1
    return seen


def dead(unseen):
    return unseen
"""


def changes() -> set[tuple[str, str]]:
    return {(mutant.was, mutant.becomes) for mutant in mutants("f.py", SOURCE.encode())}


def test_the_changes() -> None:
    assert changes() == {
        ("not a or len(b) < 2", "not (not a or len(b) < 2)"),
        ("not a or len(b) < 2", "(not a and len(b) < 2)"),
        ("not a", "a"),
        ("len(b) < 2", "len(b) <= 2"),
        ("len(b) < 2", "len(b) >= 2"),
        ("2", "3"),
        ("2", "(1)"),
        ('raise ValueError(f"{a + 1}")', "pass"),
        ("reversed(b[1:])", "(b[1:])"),
        ("b[1:]", "b[:]"),
        ("1", "2"),
        ("1", "(0)"),
        ("x == a", "x != a"),
        ("x == a", "not (x == a)"),
        ("break", "continue"),
        ("note(x)", "pass"),
        ("return min(a, -3)", "return None"),
        ("min", "max"),
        ("-3", "3"),
        ("3", "4"),
        ("3", "(2)"),
    }


def functions(source: bytes) -> list[tuple[int, int]]:
    """Return the first byte and the end of every function of a module and of its classes."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found: list[tuple[int, int]] = []
    for outer in ast.parse(source).body:
        for node in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((starts[node.lineno - 1], starts[node.end_lineno or node.lineno]))
    return found


@pytest.fixture(scope="module")
def found_in() -> dict[str, list[Mutant]]:
    """Return the mutants of each module."""
    return {file: mutants(file, (mutate.ROOT / file).read_bytes()) for file in mutate.MODULES}


def test_every_change_of_the_modules_is_python(found_in: dict[str, list[Mutant]]) -> None:
    """Only the function with the change is compiled: a whole file takes much longer."""
    for module, found in found_in.items():
        source = (mutate.ROOT / module).read_bytes()
        parts = functions(source)
        assert len(found) > 10
        for mutant in found:
            around = ((a, b) for a, b in parts if a <= mutant.start < mutant.end <= b)
            start, end = next(around, (0, len(source)))
            part = source[start:end]
            changed = replace(mutant, start=mutant.start - start, end=mutant.end - start).apply(part)
            assert changed != part
            compile(b"if True:\n" + changed if part.startswith(b" ") else changed, module, "exec")


def test_equivalent_mutants_exist(found_in: dict[str, list[Mutant]]) -> None:
    """The table names mutants of the modules as they are, so that it does not outlive them."""
    found = {mutate.key(m) for mutants in found_in.values() for m in mutants}
    assert set(mutate.equivalents()) <= found
    assert all(reason for reason in mutate.equivalents().values())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A package of two functions and their tests."""
    (tmp_path / "pyvelo" / "kv").mkdir(parents=True)
    (tmp_path / "tests" / "kv").mkdir(parents=True)
    for folder in ("pyvelo", "pyvelo/kv"):  # so that an installed pyvelo does not come before it
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n')
    (tmp_path / "pyvelo/kv/small.py").write_text(SMALL)
    (tmp_path / "tests/kv/test_small.py").write_text(
        "from pyvelo.kv.small import FIRST, count\n\n"
        "def test_count():\n    assert count(3) == 3\n\n"
        "def test_first():\n    assert FIRST == 0\n"
    )
    (tmp_path / "conftest.py").write_text(  # as tests/conftest.py does: frozen objects are not listed
        "import gc\n\ndef pytest_collection_finish():\n    gc.freeze()\n"
    )
    return tmp_path


def run_mutants(home: Path, name: str = "pyvelo/kv/small.py") -> dict[str, str]:
    """Verdicts of all mutants of a file, in a process of its own: the tests are run in its forks."""
    program = (
        "import sys, json, pytest; from pathlib import Path\n"
        "from scripts.check import _mutant_runs as runs; from scripts.check._mutants import mutants\n"
        "runs.LIMIT = 0.5; runs.STANDSTILL = 60.0\n"
        "home, name, verdicts = Path(sys.argv[1]), sys.argv[2], {}\n"
        "found = mutants(name, (home / name).read_bytes())\n"
        "def tell(number, what, seconds): verdicts[f'{found[number].was}, {found[number].becomes}'] = what\n"
        "plugin = runs.Runs(home, list(enumerate(found)), tell, lambda module: ['tests'],\n"
        "    modules=[name], measured=home / 'measured.json')\n"
        "pytest.main([*runs.ARGUMENTS, 'tests'], plugins=[plugin])\n"
        "print(); print(json.dumps(verdicts))\n"
    )
    command = [sys.executable, "-c", program, str(home), name]
    path = os.pathsep.join([str(home), str(mutate.ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, check=True, env=environment, cwd=home, timeout=300)
    verdicts: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return verdicts


def test_killed_late_and_survived(small: Path) -> None:
    assert run_mutants(small) == {
        "0, 1": "killed",  # a constant of the module, and the same change within `count`
        "0, (-1)": "killed",
        "n > 0, not (n > 0)": "killed",
        "n > 0, n >= 0": "killed",
        "n > 0, n <= 0": "killed",
        "n -= 1, pass": "late",
        "n -= 1, n += 1": "late",
        "1, 2": "killed",
        "1, (0)": "killed",
        "seen += 1, pass": "killed",
        "seen += 1, seen -= 1": "killed",
        "return seen, return None": "killed",
        "return unseen, return None": "survived",  # no test calls it
    }
    assert (small / "pyvelo/kv/small.py").read_text() == SMALL


def test_tests_that_fail_without_a_change(small: Path) -> None:
    """Then no mutant is judged."""
    (small / "tests/kv/test_other.py").write_text("def test_other():\n    assert False\n")
    assert run_mutants(small) == {}


def test_the_modules_own_tests_come_first() -> None:
    files = mutate.files_of("pyvelo/engine/async_loop.py")
    assert files[0] == "tests/engine/test_async_loop.py"
    assert sorted(files) == mutate.QUICK
    assert all((mutate.ROOT / file).exists() for file in mutate.TESTS)


def test_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    def verdict(was: str, what: str) -> mutate.Verdict:
        return mutate.Verdict(Mutant("f.py", 1, "line", was, "other", 0, 1), what, 0.1)

    found = [verdict("a", "killed"), verdict("b", "late"), verdict("c", "survived"), verdict("d", "survived")]
    share = mutate.report(found, {("f.py", "line", "d", "other"): "it is the same"})
    assert share == pytest.approx(2 / 3)
    text = capsys.readouterr().out
    assert "SURVIVED  f.py:1: c" in text
    assert "equivalent  f.py:1: d" in text
    assert "| all | 4 | 2 | 1 | 1 | 1 | 66.7% |" in text
