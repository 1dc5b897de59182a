"""Plain data for templates: copies of lists, dictionaries, strings and numbers, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyvelo.chat.marked import theirs
from pyvelo.errors import RequestError, shown

__all__ = ["Parts", "plain", "units"]

MAX_DEPTH = 64


class Parts(list[dict[str, str]]):
    """Parts of a content: a list for a template that loops over them, else text."""

    @property
    def text(self) -> str:
        """Return the texts of all parts, as lines."""
        return theirs("\n").join(part["text"] for part in self)


def plain(value: Any, where: str, string: Callable[[str], str] = theirs, depth: int = 0) -> Any:
    """Return a copy of `value` in which `string` converted every string.

    Raises:
        RequestError: it contains other types than JSON has; the text has `where`, the value's name.
    """
    if isinstance(value, str):
        return string(str.__str__(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth >= MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {
            _key(key, where, string): plain(item, where, string, depth + 1) for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(item, where, string, depth + 1) for item in value]
    raise RequestError(
        f"{where} has a {type(value).__name__} in it: "
        "give strings, numbers, lists and dictionaries, as JSON has them"
    )


def _key(key: Any, where: str, string: Callable[[str], str]) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{where} has the key {shown(key)}: the keys of a dictionary must be strings")
    return string(str.__str__(key))


def units(value: Any) -> int:
    """Return the size of plain data: 8 for each value, and 1 for each character."""
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        total += 8 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            stack += item
    return total
