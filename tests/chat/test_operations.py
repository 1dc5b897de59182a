"""Every call of a template with any arguments ends soon, and takes little memory.

    VELO_TEST_EFFORT=30 python -m pytest tests/chat/test_operations.py -m "slow or not slow"

combines all operations, receivers and arguments, and renders 3,600 random templates.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

from pyvelo.chat.marked import Marked, theirs
from pyvelo.chat.sandbox_costs import METHODS
from pyvelo.chat.sandbox_text import TEXT_METHODS
from tests.upstream_models import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limits of CPU time")
EFFORT = max(1, int(float(os.environ.get("VELO_TEST_EFFORT", "1"))))


def last_line(*command: str) -> str:
    """Run a module of tests; return its last line, which says what it was doing."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600 * EFFORT,
    )
    lines = [*done.stdout.splitlines()[-1:], *done.stderr.splitlines()[-5:]]
    return f"{done.returncode}: " + "\n".join(lines)


@pytest.mark.parametrize("share", [0.1, pytest.param(1, marks=pytest.mark.slow)])
def test_every_operation_ends_soon(share: float) -> None:
    groups = ("text", "values", "filters", "tests", "syntax")
    assert last_line("tests.chat.operations", str(share * EFFORT), *groups) == "0: done"


@pytest.mark.parametrize(("count", "first"), [(15, 0), pytest.param(105, 15, marks=pytest.mark.slow)])
def test_random_templates_end_soon(count: int, first: int) -> None:
    numbers = str(count * EFFORT), str(first * EFFORT)
    assert last_line("tests.chat.random_templates", *numbers).startswith("0: done")


ARGUMENTS = {
    "width": 7,
    "tabsize": 3,
    "maxsplit": 2,
    "count": 2,
    "fillchar": "*",
    "start": 1,
    "end": 9,
    "keepends": True,
}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_signatures_equal_the_methods_of_strings(name: str) -> None:
    """Arguments by name are bound as the method of a plain string binds them."""
    text = "a b-A\tb  c"
    method = METHODS[name]
    parameters = [*method.signature.parameters.values()][1:]
    needed = [item for item in parameters if item.default is inspect.Parameter.empty]
    for chosen in (needed, parameters):
        given = {item.name: ARGUMENTS.get(item.name, "b") for item in chosen}
        bound = method.bind(text, (), given)
        assert getattr(Marked(text, bytes(len(text))), name)(*bound) == getattr(text, name)(*given.values())
        for receiver in (text, theirs(text)):
            assert all(units >= 0 for units in method.cost(receiver, *bound))
    with pytest.raises(TypeError):
        method.bind(text, [None] * (len(parameters) + 1), {})
    assert name in TEXT_METHODS
