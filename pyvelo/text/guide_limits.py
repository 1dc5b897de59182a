"""Bounds on what llguidance compiles, so that no grammar takes seconds of a core or overflows a stack.

llguidance bounds most of its work itself. Neither bounded nor interruptible are: the depth of its recursion,
which follows the length of the source; alternatives and properties, quadratic in it; and `multipleOf`, whose
regular expression has a state for each remainder, which `anyOf` and `allOf` multiply.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache
from typing import Any

from pyvelo.errors import OutOfMemory

__all__ = ["check_lark", "check_schema", "check_size", "parser_limits", "start_deep"]

MAX_CHARACTERS = 1 << 17
"""Of a grammar, a schema or an expression. The slowest of this length compile for one to two seconds."""

MAX_PROPERTIES = 5_000
"""Names of properties in a schema, in whose number the time is quadratic."""

MAX_TERMINALS = 1_000
"""Of a Lark grammar: each may contain the one before, and each token recurses through all."""

MAX_REMAINDERS = 20_000
"""Of the least common multiple of all `multipleOf` of a schema, without its factors of ten."""

STACK_BYTES = 512 << 20
"""Address space, not memory, of a thread that compiles: twice what the deepest source of `MAX_CHARACTERS`
needs."""

_JSON_BLOCK = re.compile(r"%json\s*")
_TERMINAL = re.compile(r"(_?[A-Z][A-Z0-9_-]*)(?:\.[0-9]+|\[[^\]\n]*\])*\s*:")


@cache
def parser_limits() -> Any:
    """llguidance's own limits: what a step may take, and what a grammar may grow to."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=5_000,
        step_max_items=400_000,  # about 20,000 a millisecond
        step_lexer_fuel=200_000,  # about 14,000 a millisecond
        max_lexer_states=50_000,  # each 1 to 2 KB
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check_size(source: str) -> None:
    """Raise ValueError if the source is too long to be compiled."""
    if len(source) > MAX_CHARACTERS:
        raise ValueError(
            f"it has {len(source)} characters, the most are {MAX_CHARACTERS}: split or shorten it"
        )


def check_schema(schema: Any) -> None:
    """Raise ValueError if a JSON schema has too many properties or remainders."""
    n_properties = sum(len(part["properties"]) for part in _objects(schema)
                       if isinstance(part.get("properties"), dict))  # fmt: skip
    if n_properties > MAX_PROPERTIES:
        raise ValueError(f"{n_properties} properties, the most are {MAX_PROPERTIES}: leave some out")
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


def start_deep(run: Callable[[], None], name: str) -> None:
    """Run something in a thread of its own, with a stack for deep recursion.

    Raises:
        OutOfMemory: the system has no room for the thread.
    """
    thread = threading.Thread(target=run, name=name)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise OutOfMemory(f"no thread to compile a grammar: {error}") from error
        finally:
            threading.stack_size(before)
