"""Limits of grammars, so that none takes seconds of a core to compile or overflows a stack.

llguidance bounds most of its work itself. These parts of it have no bound and cannot be interrupted: its
recursion, as deep as the source is long; alternatives and properties, whose time is quadratic; and
`multipleOf`, whose regular expression has a state for each remainder, which `anyOf` and `allOf` multiply.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache
from typing import Any

from pyvelo.errors import OutOfMemory

__all__ = ["check_lark", "check_schema", "parser_limits", "start_deep"]

MAX_PROPERTIES = 2_000
"""Names of properties in a schema: 2,000 optional ones take 1 to 2 seconds, and the time is quadratic."""

MAX_CROSSED = 12
"""Patterns and formats that may apply to one string of a schema; their states multiply."""

MAX_PATTERN_NAMES = 150
"""Names in `patternProperties` of a schema; each is compared with each."""

MAX_NESTED = 120
MAX_VISITS = 500_000
"""Depth and number of visited parts of a schema in the search for patterns of one string."""

MAX_TERMINALS = 1_000
"""Terminals of a Lark grammar: each may contain the one before, and each token recurses through all."""

MAX_REMAINDERS = 20_000
"""Largest least common multiple of all `multipleOf` of a schema, without its factors of ten."""

STACK_BYTES = 512 << 20
"""Address space of the stack of a compiling thread: twice the need of the deepest source."""

_JSON_BLOCK = re.compile(r"%json\s*")
_TERMINAL = re.compile(r"(?<![A-Za-z0-9_-])(_?[A-Z][A-Z0-9_-]*)(?:\.[0-9]+|\[[^\]\[\n]*\])*\s*:")


@cache
def parser_limits() -> Any:
    """Return llguidance's own limits: of the work of a step, and of the size of a grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=5 * MAX_PROPERTIES,  # an optional property takes 4 items
        step_max_items=400_000,  # about 20,000 a millisecond
        step_lexer_fuel=200_000,  # about 14,000 a millisecond
        max_lexer_states=50_000,  # each 1 to 2 KB
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check_schema(schema: Any) -> None:
    """Raise ValueError if a JSON schema has too many properties, remainders or crossed patterns."""
    n_crossed = _Crossings(schema).most()
    if n_crossed > MAX_CROSSED:
        raise ValueError(
            f"more than {MAX_CROSSED} patterns and formats may meet in one string, through allOf, anyOf and "
            f"$ref: join them or leave some out"
        )
    for key, most in {"properties": MAX_PROPERTIES, "patternProperties": MAX_PATTERN_NAMES}.items():
        n = sum(len(part[key]) for part in _objects(schema) if isinstance(part.get(key), dict))
        if n > most:
            raise ValueError(f"{n} names in {key}, the most are {most}: leave some out")
    multiple = 1
    for given in _multiples(schema):
        digits = "".join(map(str, Decimal(repr(given)).normalize().as_tuple().digits))
        multiple = math.lcm(multiple, max(1, int(digits)))
        if multiple > MAX_REMAINDERS:
            raise ValueError(
                f"multipleOf={given}: the least common multiple of all multipleOf of a schema, without "
                f"trailing zeros, is {multiple} or more, the most is {MAX_REMAINDERS}: take smaller or "
                f"rounder numbers"
            )


def check_lark(lark: str) -> None:
    """Raise ValueError if a Lark grammar has too many terminals, or a schema that `check_schema` refuses."""
    n_terminals = len(set(_TERMINAL.findall(lark)))
    if n_terminals > MAX_TERMINALS:
        raise ValueError(f"{n_terminals} terminals, the most are {MAX_TERMINALS}: write some as rules")
    decoder = json.JSONDecoder()
    for block in _JSON_BLOCK.finditer(lark):
        try:
            schema, _ = decoder.raw_decode(lark, block.end())
        except (ValueError, RecursionError):
            continue  # in a comment or a string, or no JSON, which llguidance says
        check_schema(schema)


class _Crossings:
    """Upper bound of the number of patterns that apply to one string of a schema."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._n_visits = 0
        self._found: dict[str, int] = {}  # number by reference; grows until nothing changes
        self._used: set[str] = set()

    def most(self) -> int:
        users: dict[str, set[str]] = {}
        todo = ["#"]
        while todo:
            reference = todo.pop()
            self._used = set()
            found = min(MAX_CROSSED + 1, self._of(_target(self._schema, reference), 0))
            for used in self._used:
                users.setdefault(used, set()).add(reference)
                if used not in self._found:
                    self._found[used] = 0
                    todo.append(used)
            if found != self._found.get(reference):
                self._found[reference] = found
                todo += users.get(reference, ())
        return self._found["#"]

    def _of(self, schema: Any, depth: int) -> int:
        self._n_visits += 1
        if depth > MAX_NESTED or self._n_visits > MAX_VISITS:
            raise ValueError(f"it is nested more than {MAX_NESTED} deep, or refers too often to itself")
        if isinstance(schema, list):
            return max((self._of(each, depth + 1) for each in schema), default=0)
        if not isinstance(schema, dict):
            return 0
        n, inside = 0, ("pattern" in schema) + ("format" in schema)
        for key, value in schema.items():
            if key == "allOf" and isinstance(value, list):
                n += sum(self._of(each, depth + 1) for each in value)
            elif key in ("anyOf", "oneOf"):
                n += self._of(value, depth + 1)
            elif key == "$ref" and isinstance(value, str):
                self._used.add(value)
                n += self._found.get(value, 0)
            elif key in ("properties", "patternProperties") and isinstance(value, dict):
                inside = max(inside, self._of(list(value.values()), depth))
            elif key not in ("$defs", "definitions"):
                inside = max(inside, self._of(value, depth + 1))
        return n + inside


def _target(root: Any, reference: str) -> Any:
    """Return the target of a reference within the schema."""
    value = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _multiples(schema: Any) -> Iterator[int | float]:
    for part in _objects(schema):
        given = part.get("multipleOf")
        if isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given):
            yield given


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)


_starting = threading.Lock()
_usual_stack: int | None = None  # size of other threads' stacks while one starts here


def start_deep(run: Callable[[], None], name: str) -> None:
    """Run a function in its own thread, with a stack for deep recursion.

    Raises:
        OutOfMemory: the system has no memory for the thread.
    """
    global _usual_stack
    thread = threading.Thread(target=run, name=name)
    with _starting:
        before = threading.stack_size()
        try:
            _usual_stack = before
            threading.stack_size(STACK_BYTES)
            thread.start()
        except RuntimeError as error:
            raise OutOfMemory(f"no thread to compile a grammar: {error}") from error
        finally:
            threading.stack_size(before)
            _usual_stack = None


def _forget_start() -> None:
    """Restore the lock and the size of stacks in a forked child: another thread may have started one."""
    global _starting, _usual_stack
    if _usual_stack is not None:
        threading.stack_size(_usual_stack)
    _starting, _usual_stack = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_start)
