"""Operations of templates on text; each is charged for its result before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from pyvelo.chat.marked import Marked, is_marked, merge, ours, theirs
from pyvelo.chat.meter import TEXT, Meter, Refused
from pyvelo.chat.sandbox_costs import METHODS

__all__ = ["TEXT_METHODS", "TextSandbox", "format_text", "percent", "text_method"]

# every method of str here that returns text is overridden in Marked, which preserves the marks
TEXT_METHODS = frozenset({*METHODS, "format", "format_map", "join"})
MAX_WIDTH = 10_000  # of a formatted field
MISSING = object()


class TextSandbox(ImmutableSandboxedEnvironment):
    """Environment with the meter and the methods that text needs; `sandbox.Sandbox` completes it."""

    meter: Meter

    def each(self, value: Any) -> Iterable[Any]:
        """Return the items of a value, metered."""
        raise NotImplementedError

    def text(self, value: Any) -> str:
        """Return a value as it is written."""
        raise NotImplementedError


def text_method(sandbox: TextSandbox, text: str, name: str) -> Callable[..., Any]:
    """Return a method of a string that charges its cost before it runs."""
    match name:
        case "format":
            return lambda *args, **kwargs: format_text(sandbox, text, args, kwargs)
        case "format_map":
            return lambda mapping, /: format_text(sandbox, text, (), _dictionary(mapping))
        case "join":
            return lambda items, /: _join(sandbox, text, items)
    method = METHODS[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = method.bind(text, args, kwargs)
        for units in method.cost(text, *given):
            sandbox.meter.charge(units)
        return getattr(ours(text) if name in vars(Marked) else text, name)(*given)

    return run


def _dictionary(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"format_map takes a dictionary, not a {type(value).__name__}")
    return value


def _join(sandbox: TextSandbox, text: str, items: Any) -> str:
    listed = list(sandbox.each(items))
    for item in listed:
        if not isinstance(item, str):
            raise TypeError(f"join takes strings, not a {type(item).__name__}")
        sandbox.meter.charge(TEXT + len(text) + len(item))
    return ours(text).join(listed)


def format_text(sandbox: TextSandbox, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Format text as `str.format` does; fields follow the sandbox's rules, and widths are bounded."""
    sandbox.meter.charge(len(text))
    if is_marked(text):
        return theirs(str.__str__(_fields(sandbox, str.__str__(text), args, kwargs)))
    return _fields(sandbox, text, args, kwargs)


def _fields(sandbox: TextSandbox, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    finder = SandboxedFormatter(sandbox)
    parts: list[str] = []
    automatic = 0
    for literal, field, spec, conversion in Formatter().parse(str.__str__(text)):
        sandbox.meter.charge(TEXT + len(literal))
        parts.append(literal)
        if field is None:
            continue
        if field[:1] in ("", ".", "["):
            field = f"{automatic}{field}"
            automatic += 1
        value, _ = finder.get_field(field, args, kwargs)
        parts.append(_field(sandbox, value, spec or "", conversion))
    return merge(parts)


def _field(sandbox: TextSandbox, value: Any, spec: str, conversion: str | None) -> str:
    marked = False if isinstance(value, str) else sandbox.meter.charge_value(value)
    if conversion in ("r", "a"):
        marked = sandbox.meter.charge_value(value)
        value = ascii(value) if conversion == "a" else repr(value)
    elif conversion == "s" or (not spec and not isinstance(value, str)):
        value = sandbox.text(value)
    if not spec:
        result = value
    else:
        _check_widths(spec)
        if "{" in spec:
            raise Refused(f"the format {spec!r} has a field in a field: write the width as a number")
        marked = marked or (isinstance(value, str) and is_marked(value))
        result = format(str.__str__(value) if isinstance(value, str) else value, spec)
    sandbox.meter.charge(len(result))
    return theirs(result) if marked else result


def _check_widths(spec: str) -> None:
    for digits in re.findall(r"\d+", spec):
        if len(digits) > 5 or int(digits) > MAX_WIDTH:
            raise Refused(f"the width {digits[:20]} of a format is beyond {MAX_WIDTH}")


def percent(sandbox: TextSandbox, text: str, value: Any) -> str:
    """Return `text % value`. With %s and %d only, the template's characters stay unmarked."""
    sandbox.meter.charge(len(text) + TEXT * str.count(text, "%"))
    pieces = re.split(r"(%[sdi%])", str.__str__(text))
    if not is_marked(text) and not any("%" in piece for piece in pieces[::2]):
        return _percent_pieces(sandbox, pieces, value if isinstance(value, tuple) else (value,))
    _check_widths(text)
    if "*" in text:
        raise Refused("a % format takes its width from a value: write it as a number")
    before = sandbox.meter.left
    marked = sandbox.meter.charge_value(value) or is_marked(text)
    sandbox.meter.charge((before - sandbox.meter.left) * text.count("%") + MAX_WIDTH * text.count("%"))
    result = str.__str__(text) % value
    return theirs(result) if marked else result


def _percent_pieces(sandbox: TextSandbox, pieces: Sequence[str], values: tuple[Any, ...]) -> str:
    parts: list[str] = []
    left = iter(values)
    for index, piece in enumerate(pieces):
        if index % 2 == 0 or piece == "%%":
            parts.append("%" if piece == "%%" else piece)
            continue
        value = next(left, MISSING)
        if value is MISSING:
            raise TypeError("not enough arguments for format string")
        parts.append(sandbox.text(value) if piece == "%s" else piece % value)
        sandbox.meter.charge(len(parts[-1]))
    if next(left, MISSING) is not MISSING:
        raise TypeError("not all arguments converted during string formatting")
    return merge(parts)
