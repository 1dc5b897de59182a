"""Costs of the methods of strings, in the meter's units, bounded by the sizes of string and arguments.

A method that is not in METHODS cannot be called. A cost function has the signature of its method. All
arguments, positional and by name, are bound to it, and their types are checked before anything is charged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyvelo.chat.meter import TEXT
from pyvelo.lazy import lazy_property

__all__ = ["METHODS", "TextMethod", "search_cost"]

COMPARED = 16  # characters that are compared in the time of a unit


@dataclass(frozen=True)
class TextMethod:
    """A method of strings: its signature and its costs, each charged before the next one is computed."""

    name: str
    signature: inspect.Signature
    cost: Callable[..., Iterable[int]]

    def bind(self, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return all arguments by position, defaults included; TypeError if they do not fit."""
        parameters = self._parameters
        if kwargs or not self._n_required <= len(args) <= len(parameters):
            bound = self.signature.bind(text, *args, **kwargs)
            bound.apply_defaults()
            given: tuple[Any, ...] = bound.args[1:]
        else:  # as `Signature.bind`, which takes several times longer
            given = (*args, *(item.default for item in parameters[len(args) :]))
        for item, value in zip(parameters, given, strict=True):
            if not isinstance(value, item.annotation):
                raise TypeError(f"{self.name} takes no {type(value).__name__} as {item.name}")
        return given

    @lazy_property
    def _parameters(self) -> tuple[inspect.Parameter, ...]:
        """Parameters behind the string itself."""
        return tuple(self.signature.parameters.values())[1:]

    @lazy_property
    def _n_required(self) -> int:
        return sum(item.default is item.empty for item in self._parameters)


def search_cost(text: str, piece: str) -> int:
    """Bound the work of a search: Python may compare the piece with every place of the text."""
    places = max(0, len(text) - len(piece) + 1)
    return 1 + len(text) // 4 + places * len(piece) // COMPARED


def _whole(text: str) -> Iterable[int]:
    return (1 + len(text),)


def _asked(text: str) -> Iterable[int]:
    return (1 + len(text) // 4,)


def _search(text: str, sub: str, start: int | None = None, end: int | None = None) -> Iterable[int]:
    return (search_cost(text, sub),)


def _edge(text: str, affix: str | tuple, start: int | None = None, end: int | None = None) -> Iterable[int]:  # type: ignore[type-arg]
    pieces = affix if isinstance(affix, tuple) else (affix,)
    return (sum(1 + len(piece) // COMPARED for piece in pieces if isinstance(piece, str)),)


def _remove(text: str, affix: str) -> Iterable[int]:
    return _whole(text)


def _partition(text: str, sep: str) -> Iterable[int]:
    return search_cost(text, sep), len(text) + 3 * TEXT


def _split(text: str, sep: str | None = None, maxsplit: int = -1) -> Iterable[int]:
    yield len(text)
    if sep is None:
        places = len(text) // 2
    else:
        yield 2 * search_cost(text, sep)  # the count is a search, too
        places = text.count(sep) if sep else 0
    yield TEXT * (1 + (places if maxsplit < 0 else min(places, maxsplit)))


def _splitlines(text: str, keepends: bool | int = False) -> Iterable[int]:
    return (len(text) + TEXT * (1 + len(text)),)


def _strip(text: str, chars: str | None = None) -> Iterable[int]:
    return (1 + len(text) * (1 + (0 if chars is None else len(chars)) // COMPARED),)


def _replace(text: str, old: str, new: str, count: int = -1) -> Iterable[int]:
    yield len(text) + 2 * search_cost(text, old)
    places = text.count(old)
    yield (places if count < 0 else min(places, count)) * (len(new) + TEXT)


def _pad(text: str, width: int, fillchar: str = " ") -> Iterable[int]:
    return (len(text) + max(0, width),)


def _fill(text: str, width: int) -> Iterable[int]:
    return _pad(text, width)


def _tabs(text: str, tabsize: int = 8) -> Iterable[int]:
    yield 2 * len(text)
    yield text.count("\t") * max(0, tabsize)


_COSTS: dict[str, Callable[..., Iterable[int]]] = {
    **dict.fromkeys(("capitalize", "lower", "swapcase", "title", "upper"), _whole),
    **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower"), _asked),
    **dict.fromkeys(("isnumeric", "isspace", "istitle", "isupper"), _asked),
    **dict.fromkeys(("count", "find", "index", "rfind", "rindex"), _search),
    **dict.fromkeys(("endswith", "startswith"), _edge),
    **dict.fromkeys(("removeprefix", "removesuffix"), _remove),
    **dict.fromkeys(("partition", "rpartition"), _partition),
    **dict.fromkeys(("rsplit", "split"), _split),
    **dict.fromkeys(("lstrip", "rstrip", "strip"), _strip),
    **dict.fromkeys(("center", "ljust", "rjust"), _pad),
    **{"splitlines": _splitlines, "replace": _replace, "zfill": _fill, "expandtabs": _tabs},
}
METHODS: Mapping[str, TextMethod] = {
    name: TextMethod(name, inspect.signature(cost, eval_str=True), cost) for name, cost in _COSTS.items()
}
