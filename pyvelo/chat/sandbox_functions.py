"""Filters, tests and globals of templates: the ones of Jinja that published templates use, and a few more."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

from jinja2 import pass_context
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.runtime import Context, Macro, Undefined
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import Cycler, Joiner

from pyvelo.chat.marked import is_marked, ours, theirs
from pyvelo.chat.meter import NODE, Refused
from pyvelo.chat.plain import plain
from pyvelo.chat.sandbox import Guarded, Notes, Sandbox, bounded
from pyvelo.chat.sandbox_lists import LIST_FILTERS, in_context, slice_of
from pyvelo.chat.sandbox_syntax import COMPARE, CONCAT, DICT, EACH, MADE, NAMED, SLICE, STEP
from pyvelo.chat.sandbox_text import percent, text_method

__all__ = ["TemplateSays", "make_sandbox"]

MAX_RANGE = 100_000
MAX_DIGITS = 20
MAX_INDENT = 16
MAX_FORMAT = 256

Function = Callable[..., Any]


class TemplateSays(Exception):
    """Error that a template raises with raise_exception."""


def make_sandbox(now: Callable[[], datetime]) -> Sandbox:
    """Return a sandbox; `now` returns the time for strftime_now."""
    names = {
        "range": lambda sandbox: Guarded(_range),
        "dict": lambda sandbox: Guarded(lambda *args, **named: _new_dict(sandbox, args, named)),
        "namespace": lambda sandbox: Guarded(lambda *args, **named: _namespace(sandbox, args, named)),
        "cycler": lambda sandbox: Guarded(Cycler),
        "joiner": lambda sandbox: Guarded(Joiner),
        "raise_exception": lambda sandbox: Guarded(lambda message="": _raise(sandbox, message)),
        "strftime_now": lambda sandbox: Guarded(lambda format: _strftime(sandbox, now(), format)),
    }
    return Sandbox(
        {name: _metered(function, named=not name.startswith(" ")) for name, function in FILTERS.items()},
        {name: _metered(function) for name, function in TESTS.items()},
        names,
    )


def _metered(function: Function, *, named: bool = False) -> Function:
    """Return a filter or test with the sandbox in front of its arguments.

    Args:
        named: the filter can be written in a template; its arguments of text are charged.
    """

    in_context = getattr(function, "wants_context", False)

    @pass_context  # so that Jinja never tries it on constants when it compiles
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        sandbox = cast(Sandbox, context.environment)
        given = (*args, *kwargs.values())
        sandbox.meter.charge(1 + sum(len(arg) for arg in given if named and isinstance(arg, str)))
        return function(context if in_context else sandbox, value, *args, **kwargs)

    return run


# ---- globals ----


def _range(*bounds: int) -> range:
    numbers = range(*map(bounded, bounds))
    if len(numbers) > MAX_RANGE:
        raise Refused(f"a range of {len(numbers)} numbers is beyond {MAX_RANGE}")
    return numbers


def _new_dict(sandbox: Sandbox, args: tuple[Any, ...], named: dict[str, Any]) -> dict[Any, Any]:
    if len(args) > 1:
        raise TypeError(f"dict takes one list of pairs or one dictionary, not {len(args)}")
    pairs: Any = args[0] if args else {}
    pairs = pairs.items() if isinstance(pairs, dict) else pairs
    sandbox.meter.charge(NODE * len(named))
    found: dict[Any, Any] = {}
    for key, value in sandbox.each(pairs):
        sandbox.meter.charge(NODE)
        found[sandbox.key(key)] = value
    return found | named


def _namespace(sandbox: Sandbox, args: tuple[Any, ...], named: dict[str, Any]) -> Notes:
    sandbox.meter.charge(8 * NODE)
    return Notes(_new_dict(sandbox, args, named))


def _raise(sandbox: Sandbox, message: Any) -> None:
    raise TemplateSays(str.__str__(sandbox.text(message))[:1000])


def _strftime(sandbox: Sandbox, now: datetime, format: Any) -> str:
    sandbox.meter.charge(16 * MAX_FORMAT)
    if not isinstance(format, str) or len(format) > MAX_FORMAT or re.search(r"%[^%A-Za-z-]", format):
        raise Refused(f"strftime_now takes a format of up to {MAX_FORMAT} characters without widths")
    return now.strftime(str.__str__(format))


# ---- functions that replace syntax ----


def _concat(sandbox: Sandbox, *values: Any) -> str:
    return sandbox.concat([sandbox.text(value) for value in values])


def _compare(sandbox: Sandbox, left: Any, *operands: Any) -> bool:
    for op, right in zip(operands[::2], operands[1::2], strict=True):
        if not sandbox.compare(op, left, right):
            return False
        left = right
    return True


def _made(sandbox: Sandbox, value: Any) -> Any:
    sandbox.meter.charge(NODE * (1 + len(value)))
    return value


def _dict(sandbox: Sandbox, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    sandbox.meter.charge(NODE * (1 + len(pairs)))
    return {sandbox.key(key): value for key, value in pairs}


def _named(sandbox: Sandbox, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"** takes a dictionary, not a {type(value).__name__}")
    sandbox.meter.charge(NODE * (1 + len(value)))
    return value


def _step(sandbox: Sandbox, value: Any, nodes: int) -> Any:
    sandbox.meter.tick(nodes)
    return value


# ---- text ----


def _text(name: str) -> Function:
    """Return a filter that calls a method of strings."""

    def run(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
        return text_method(sandbox, sandbox.text(value), name)(*args, **kwargs)

    return run


def _center(sandbox: Sandbox, value: Any, width: int = 80) -> Any:
    return text_method(sandbox, sandbox.text(value), "center")(width)


def _title(sandbox: Sandbox, value: Any) -> str:
    text = ours(sandbox.text(value))
    sandbox.meter.charge(NODE * len(text))
    return text.like(JINJA_FILTERS["title"](str.__str__(text)))


def _replace(sandbox: Sandbox, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    texts = sandbox.text(old), sandbox.text(new)
    return text_method(sandbox, sandbox.text(value), "replace")(*texts, -1 if count is None else count)


def _join(sandbox: Context, value: Any, d: Any = "", attribute: Any = None) -> Any:
    context, box = sandbox, cast(Sandbox, sandbox.environment)
    if attribute is not None:
        value = JINJA_FILTERS["map"](context, value, attribute=attribute)
    return text_method(box, box.text(d), "join")([box.text(item) for item in box.each(value)])


def _indent(sandbox: Sandbox, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text = ours(sandbox.text(s) + "\n")  # so that a last, empty line counts
    space = width if isinstance(width, str) else " " * min(operator.index(width), 1000)
    lines = text_method(sandbox, text, "splitlines")()
    sandbox.meter.charge(len(text) + len(lines) * len(space))
    shown = [line if index == 0 or not (line or blank) else space + line for index, line in enumerate(lines)]
    joined = ours("\n").join(shown)
    return space + joined if first else joined


def _escape(sandbox: Sandbox, value: Any) -> Any:
    text: Any = sandbox.text(value)
    for char, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;")):
        text = text_method(sandbox, text, "replace")(char, name)
    return text


def _format(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> str:
    return percent(sandbox, sandbox.text(value), kwargs or args)


def _tojson(
    sandbox: Sandbox,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON in the form of the training data: without escapes for HTML and for non-ASCII characters."""
    marked = sandbox.meter.charge_value([value, indent, separators])
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > MAX_INDENT:
        raise Refused(f"tojson indents by {MAX_INDENT} at most")
    if separators is not None:
        item, key = separators
        separators = str(item)[:MAX_INDENT], str(key)[:MAX_INDENT]
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    parts = []
    for part in encoder.iterencode(value):
        sandbox.meter.charge(len(part))
        parts.append(part)
    return theirs("".join(parts)) if marked else "".join(parts)


def _from_json(sandbox: Sandbox, value: Any) -> Any:
    text = sandbox.text(value)
    sandbox.meter.charge(NODE * len(text))
    found = json.loads(text, parse_int=lambda digits: bounded(int(digits)))
    return plain(found, "from_json", theirs if is_marked(text) else str)


# ---- numbers ----


def _number(function: Function) -> Function:
    def run(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str):
            sandbox.meter.charge(len(value))
        return bounded(function(value, *args, **kwargs))

    return run


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > MAX_DIGITS:
        raise Refused(f"round to {precision} digits is beyond {MAX_DIGITS}")
    if not isinstance(method, str):  # a tuple's hash is deep
        raise TypeError(f"round takes no {type(method).__name__} as method")
    return JINJA_FILTERS["round"](value, precision, method)


def _default(sandbox: Sandbox, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    return default_value if isinstance(value, Undefined) or (boolean and not value) else value


# ---- tests ----


def _shallow(name: str) -> Function:
    def run(sandbox: Sandbox, value: Any, *args: Any) -> Any:
        test: Any = JINJA_TESTS[name]
        return test(value, *args)

    return run


def _comparing(op: str) -> Function:
    return lambda sandbox, value, other: sandbox.compare(op, value, other)


def _remainder(wanted: int | None, by: int | None = None) -> Function:
    def run(sandbox: Sandbox, value: Any, number: Any = by) -> bool:
        if not isinstance(value, (int, float)) or not isinstance(number, (int, float)):
            raise TypeError("odd, even and divisibleby are for numbers")
        return bool(value % number == wanted)

    return run


def _cased(name: str) -> Function:
    return lambda sandbox, value: text_method(sandbox, sandbox.text(value), name)()


FILTERS: dict[str, Function] = {
    EACH: lambda sandbox, value: sandbox.each(value),
    CONCAT: _concat,
    COMPARE: _compare,
    MADE: _made,
    DICT: _dict,
    SLICE: slice_of,
    NAMED: _named,
    STEP: _step,
    **{name: _text(name) for name in ("capitalize", "lower", "upper")},
    **{"trim": _text("strip"), "center": _center, "title": _title, "replace": _replace, "indent": _indent},
    **dict.fromkeys(("string", "safe"), Sandbox.text),  # nothing is escaped, so all is safe
    **{"e": _escape, "escape": _escape, "format": _format, "join": in_context(_join)},
    **{"tojson": _tojson, "from_json": _from_json},
    **LIST_FILTERS,
    **{"default": _default, "d": _default},
    **{"abs": _number(abs), "round": _number(_round)},
    **{"int": _number(JINJA_FILTERS["int"]), "float": _number(JINJA_FILTERS["float"])},
}
_SHALLOW = """
    defined undefined none boolean false true integer float string mapping number sequence iterable sameas
"""
SHALLOW = _SHALLOW.split()
COMPARING = {
    **{"eq": "eq", "equalto": "eq", "==": "eq", "ne": "ne", "!=": "ne", "in": "in"},
    **{"lt": "lt", "lessthan": "lt", "<": "lt", "le": "lteq", "<=": "lteq"},
    **{"gt": "gt", "greaterthan": "gt", ">": "gt", "ge": "gteq", ">=": "gteq"},
}
TESTS: dict[str, Function] = {
    **{name: _shallow(name) for name in SHALLOW},
    **{name: _comparing(op) for name, op in COMPARING.items()},
    **{"odd": _remainder(1, 2), "even": _remainder(0, 2), "divisibleby": _remainder(0)},
    **{"lower": _cased("islower"), "upper": _cased("isupper")},
    "callable": lambda sandbox, value: isinstance(value, (Guarded, Macro)),
}
