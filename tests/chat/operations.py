"""Every operation that the sandbox allows, with hostile arguments, within limits of CPU time and memory.

    python -m tests.chat.operations EFFORT GROUP...

runs groups of operations, all combinations with an effort of 30. The process is killed in the middle of an
operation that takes too long; the last line of its output names the operation.
"""

from __future__ import annotations

import inspect
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from jinja2 import Template
from jinja2.runtime import Undefined

from pyvelo.chat.marked import theirs
from pyvelo.chat.meter import Limits, Meter
from pyvelo.chat.sandbox import METHODS as VALUE_METHODS
from pyvelo.chat.sandbox_costs import METHODS
from pyvelo.chat.sandbox_functions import FILTERS, TESTS, make_sandbox
from pyvelo.chat.sandbox_text import TEXT_METHODS

SECONDS = 4  # of CPU time, for one operation: one that is charged right takes less than a tenth
MEMORY = 1 << 30
LIMITS = Limits(max_output=1 << 20, max_work=1 << 19, seconds=2.0)
SANDBOX = make_sandbox(lambda: datetime(2026, 3, 4))


def nested() -> list[Any]:
    """A list that is small, and as text of 2**60 items."""
    made: list[Any] = [1]
    for _ in range(60):
        made = [made, made]
    return made


def nested_tuples() -> tuple[Any, ...]:
    """Return what `nested` does, of tuples, which have a hash."""
    made: tuple[Any, ...] = (1,)
    for _ in range(60):
        made = (made, made)
    return made


RECEIVERS: dict[str, Any] = {
    "text": "a" * 200_000,
    "marked": theirs("aé☃\t \n" * 10_000),
    "braces": "{0:>9999}{} %s%5d" * 2_700,
    "digits": "9" * 50_000,
    "number": 7,
    "float": -1e308,
    "list": [*range(14_000)],
    "texts": ["ab" * 500] * 250,
    "nested": nested(),
    "pairs": [(f"k{index}", index) for index in range(2_500)],
    "dictionary": {theirs(f"k{index}"): "v" * 20 for index in range(3_300)},
    "none": None,
}
ARGUMENTS: list[Any] = [
    *(-(10**18), -1, 0, 1, 3, 10**18, 1 << 63, True, False, 1e308, -1.5, float("nan"), None),
    *("", " ", "a", "\t", "ab" + "a" * 100_000, "ab" * 50_000, theirs("☃" * 70_000), "a." * 33_000),
    *(
        nested_tuples(),
        [],
        nested(),
        ["a"] * 7_000,
        ("a", "b"),
        ("x" * 1000,) * 330,
        {},
        {"a": "a" * 70_000},
    ),
]
SYNTAX = (
    *(f"r {o} x" for o in ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and")),
    *(f"x {o} r" for o in ("+", "*", "%", "**", "in")),
    *("r[x]", "r[x:y]", "r[::x]", "{r: x}", "{x: r}", "[r, x]", "(r, x)", "-r", "not r", "r.a.b", "r[x].a"),
    *("r if x else y", "dict(r)", "dict(x)", "dict(r, **y)", "namespace(r)", "namespace(**x).a"),
    *("r()", "x()", "r(x)", "r | tojson(separators=(x, y))", "r | sort(attribute='a' + ',a' * 50000)"),
    *("range(x)", "range(x, y)", "range(x, y, z)", "cycler(*r).next()", "cycler(r, x).current"),
    *("joiner(r)()", "strftime_now(r)", "strftime_now(format=x)", "raise_exception(r)"),
    *("raise_exception(message=x)", "r | map(x)", "r | map('upper') | list", "r | map(attribute=x) | list"),
    *("r | map('replace', 'a', x) | list", "r | map('center', x) | list", "r | select(x) | list"),
    *("r | selectattr(x)", "r | selectattr(0, 'in', x) | list", "r | groupby(x)", "r | sort(attribute=x)"),
    *("r | map(' slice', 1, x)", "r | map(' each') | first", "r | sum(start=x)", "r | sum(attribute=x)"),
)


def calls(call: str, parameters: list[str]) -> list[tuple[str, int]]:
    """Return calls by position and by name, each with the number of arguments that vary."""
    by_name = [f"({name}=x)" for name in parameters] + [f"(x, {name}=y)" for name in parameters[1:]]
    shapes = ["(x)", "(x, y)", "(x, y, z)", "(*x)", "(**x)", *by_name]
    return [(call, 0), (call + "()", 0), *((call + shape, 2 if "y" in shape else 1) for shape in shapes)]


def parameters(function: Any) -> list[str]:
    """Return the names of the parameters behind the receiver."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    named = [item.name for item in found if item.kind not in kinds]
    return named[1 + ("sandbox" in named or "context" in named) :] or ["attribute", "default"]


def groups() -> dict[str, list[tuple[str, int]]]:
    """Return the expressions of each group, with the number of arguments that vary."""
    loop = "{% for i in r %}{{ EXPRESSION if loop.first }}{% endfor %}"
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in ("text", "values", "filters", "tests")}
    for name in sorted(TEXT_METHODS):
        known = parameters(METHODS[name].cost) if name in METHODS else []
        found["text"] += calls(f"r.{name}", known)
    for name in sorted({name for table in VALUE_METHODS.values() for name in table}):
        found["values"] += calls(f"r.{name}", ["index"])
    for name, function in sorted(FILTERS.items()):
        if not name.startswith(" "):
            found["filters"] += calls(f"r | {name}", parameters(function))
    for name in sorted(filter(str.isalpha, TESTS)):
        found["tests"] += calls(f"r is {name}", [])
    found["syntax"] = [(source, 2 if "y" in source else int("x" in source)) for source in SYNTAX]
    found["syntax"] += [
        (loop.replace("EXPRESSION", f"loop.{name}"), 0) for name in ("length", "revindex", "last")
    ]
    found["syntax"] += [(loop.replace("EXPRESSION", f"loop.{name}(x)"), 1) for name in ("cycle", "changed")]
    return found


def arguments(n: int, turn: int, stride: int) -> Iterator[dict[str, Any]]:
    """Yield values for x, y and z: every `stride`-th for x, from `turn` on, and others beside it."""
    size = len(ARGUMENTS)
    for index in range(turn % stride, size, stride) if n else (0,):
        beside = (turn * 5 + index * 3) % size
        yield {"x": ARGUMENTS[index], "y": ARGUMENTS[beside], "z": ARGUMENTS[(beside + turn) % size]}


def run(code: Any, values: dict[str, Any]) -> None:
    """Render once; any Exception is a TemplateError to a caller, but a lack of memory is a defect here."""
    twin = SANDBOX.metered_by(Meter(LIMITS, 0, (Undefined,)))
    template = Template.from_code(twin, code, twin.globals)
    try:
        for piece in template.root_render_func(template.new_context(values)):
            twin.meter.write(piece)
    except MemoryError:
        raise SystemExit("more memory than the limit") from None
    except Exception:
        pass


def allow_seconds(seconds: float) -> None:
    """Let the kernel end this process after so many more seconds of CPU time, whatever it is doing then."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def allow_memory(size: int) -> None:
    """Limit the address space to so many bytes more than are mapped now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + size, resource.RLIM_INFINITY))


def main(names: list[str], effort: float) -> None:
    """Run the groups; each receiver of an operation meets some of the arguments, with enough effort all."""
    if sys.platform == "linux":
        allow_memory(MEMORY)
    turn = 0
    for name in names:
        stride = max(1, min(len(ARGUMENTS), int((5 if name == "text" else 30) / effort)))
        receivers = [key for key in RECEIVERS if name != "text" or isinstance(RECEIVERS[key], str)]
        step = 1 if name == "text" or effort >= 10 else 4 if effort >= 1 else 8
        for number, (source, n) in enumerate(groups()[name]):
            tree = SANDBOX.parse(source if "{%" in source else "{{ " + source + " }}")
            code = SANDBOX.code(tree, "operation")
            for receiver in receivers[number % step :: step]:
                turn += 1
                print(source, "of", receiver, turn, flush=True)
                allow_seconds(SECONDS)
                for given in arguments(n, turn, stride):
                    run(code, {"r": RECEIVERS[receiver], **given})
    print("done")


if __name__ == "__main__":
    main(sys.argv[2:], float(sys.argv[1]))
