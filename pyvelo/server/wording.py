"""Refusals of msgspec in plain words, with the field that they are about."""

from __future__ import annotations

import re

__all__ = ["in_words", "is_no_utf8"]

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_EXPECTED = re.compile(r"Expected `([^`]+)`(?: (of length )?(>=|<=|>|<) (\S+))?(?:, got `(\w+)`)?")
_ENUM = re.compile(r"Invalid enum value (.+)")

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_UNITS = {"str": "character", "array": "item", "object": "entry"}


def is_no_utf8(error: Exception) -> bool:
    """Return whether JSON is no UTF-8: msgspec says so by an error of its own since 0.23."""
    return isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error)


def in_words(error: Exception) -> tuple[str, str | None]:
    """Return the message of an error of `msgspec.convert` or a decoder, and the path of the field or None."""
    message = str(error)
    path = _PATH.search(message)
    where, text = (path[1] if path else ""), _PATH.sub("", message)
    if missing := _MISSING.fullmatch(text):
        name = f"{where}.{missing[1]}" if where else missing[1]
        return f"{name} is missing", name
    if unknown := _UNKNOWN.fullmatch(text):
        name = f"{where}.{unknown[1][:64]}" if where else unknown[1][:64]
        return f"{name} is no parameter", name
    if expected := _EXPECTED.fullmatch(text):
        text = f"{where or 'it'} must be {_expectation(*expected.groups())}"
    elif wrong := _ENUM.fullmatch(text):
        text = f"{where or 'it'} must not be {wrong[1]}"
    elif where:
        text = f"{where}: {text}"
    return text, where or None


def _expectation(kinds: str, of_length: str | None, bound: str, limit: str, got: str | None) -> str:
    names = kinds.split(" | ")
    text = " or ".join(_KINDS.get(name, name) for name in names)
    if bound and of_length:
        unit = _UNITS.get(names[0], "item")
        text += f" of {_BOUNDS[bound]} {limit} {unit}{'s' * (limit != '1')}"
    elif bound:
        text += f" of {_BOUNDS[bound]} {limit}"
    return text + (f", got {_KINDS.get(got, got)}" if got else "")
