"""What templates may do with text, each charged with what it makes before it is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

from jinja2.sandbox import SandboxedFormatter

from pyvelo.text.marked import is_marked, merge, ours, theirs
from pyvelo.text.meter import TEXT, Refused

if TYPE_CHECKING:
    from pyvelo.text.sandbox import Sandbox

__all__ = ["TEXT_METHODS", "format_text", "percent", "text_method"]

# every method of str that makes text and is here has one of Marked, which keeps the marks
_METHODS = """
    capitalize center count endswith expandtabs find format format_map index isalnum isalpha isascii isdecimal
    isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix
    removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip
    swapcase title upper zfill
"""
TEXT_METHODS = frozenset(_METHODS.split())
PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
CUTTING = frozenset({"rsplit", "split", "splitlines"})
MAX_WIDTH = 10_000  # of a formatted field


def text_method(sandbox: Sandbox, text: str, name: str) -> Callable[..., Any]:
    """A method of a string, metered."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if name == "format":
            return format_text(sandbox, text, args, kwargs)
        if name == "format_map":
            (mapping,) = args
            return format_text(sandbox, text, (), mapping)
        if name == "join" and len(args) == 1:
            args = (list(sandbox.each(args[0])),)
        sandbox.meter.charge(_cost(text, name, args, kwargs))
        return getattr(ours(text), name)(*args, **kwargs)

    return run


def _cost(text: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Units of a call; wrong arguments raise when it is made."""
    given = [*args, *kwargs.values()]
    if name == "startswith" or name == "endswith" or name.startswith("is"):
        return 1
    if name in PADDING:
        return len(text) + sum(width for width in given if isinstance(width, int))
    if name == "expandtabs":
        return len(text) + text.count("\t") * sum(size for size in given if isinstance(size, int))
    if name == "join":
        items = [item for item in given[0] if isinstance(item, str)] if given else []
        return len(text) * len(items) + sum(map(len, items))
    if name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        places = text.count(args[0])
        return len(text) + places * (len(args[1]) + TEXT)
    if name in CUTTING:
        places = text.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(text)
        return len(text) + TEXT * (1 + places)
    return 1 + len(text)


def format_text(sandbox: Sandbox, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """`str.format`: fields reach what templates may reach; widths are bounded."""
    if is_marked(text):
        sandbox.meter.charge(len(text))
        return theirs(str.__str__(_fields(sandbox, str.__str__(text), args, kwargs)))
    return _fields(sandbox, text, args, kwargs)


def _fields(sandbox: Sandbox, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    finder = SandboxedFormatter(sandbox)
    parts: list[str] = []
    automatic = 0
    for literal, field, spec, conversion in Formatter().parse(str.__str__(text)):
        sandbox.meter.charge(1 + len(literal))
        parts.append(literal)
        if field is None:
            continue
        if field[:1] in ("", ".", "["):
            field = f"{automatic}{field}"
            automatic += 1
        value, _ = finder.get_field(field, args, kwargs)
        parts.append(_field(sandbox, value, spec or "", conversion))
    return merge(parts)


def _field(sandbox: Sandbox, value: Any, spec: str, conversion: str | None) -> str:
    marked = False if isinstance(value, str) else sandbox.meter.weigh(value)
    if conversion in ("r", "a"):
        marked = sandbox.meter.weigh(value)
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


def percent(sandbox: Sandbox, text: str, value: Any) -> str:
    """`text % value`. Where it has %s and %d alone, what was the template's in it stays so."""
    pieces = re.split(r"(%[sdi%])", str.__str__(text))
    if not is_marked(text) and not any("%" in piece for piece in pieces[::2]):
        return _percent_pieces(sandbox, pieces, value if isinstance(value, tuple) else (value,))
    _check_widths(text)
    if "*" in text:
        raise Refused("a % format takes its width from a value: write it as a number")
    before = sandbox.meter.left
    marked = sandbox.meter.weigh(value) or is_marked(text)
    sandbox.meter.charge((before - sandbox.meter.left) * text.count("%") + MAX_WIDTH * text.count("%"))
    result = str.__str__(text) % value
    return theirs(result) if marked else result


def _percent_pieces(sandbox: Sandbox, pieces: Sequence[str], values: tuple[Any, ...]) -> str:
    parts: list[str] = []
    left = list(values)
    for index, piece in enumerate(pieces):
        if index % 2 == 0 or piece == "%%":
            parts.append("%" if piece == "%%" else piece)
            continue
        if not left:
            raise TypeError("not enough arguments for format string")
        value = left.pop(0)
        parts.append(sandbox.text(value) if piece == "%s" else piece % value)
        sandbox.meter.charge(len(parts[-1]))
    if left:
        raise TypeError("not all arguments converted during string formatting")
    return merge(parts)
