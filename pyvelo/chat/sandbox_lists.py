"""Filters of lists and dictionaries; all but the lazy ones return lists."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import make_attrgetter, sync_do_slice
from jinja2.runtime import Context, Undefined

from pyvelo.chat.meter import NODE, TEXT, Refused
from pyvelo.chat.sandbox import SLOT, Sandbox

__all__ = ["LIST_FILTERS", "in_context", "slice_of"]

Function = Callable[..., Any]


def slice_of(sandbox: Sandbox, value: Any, start: Any, stop: Any, step: Any) -> Any:
    if not isinstance(value, (str, list, tuple, range, Undefined)):
        raise Refused(f"a {type(value).__name__} has no slices")
    found = value[slice(start, stop, step)]
    sandbox.meter.charge(SLOT * len(found) if isinstance(found, (list, tuple)) else len(found))
    return found


def _list(sandbox: Sandbox, value: Any) -> list[Any]:
    found = list(sandbox.each(value))
    sandbox.meter.charge(SLOT * len(found))
    return found


def _reverse(sandbox: Sandbox, value: Any) -> Any:
    if isinstance(value, str):
        return slice_of(sandbox, value, None, None, -1)
    return _list(sandbox, value)[::-1]


def _items(sandbox: Sandbox, value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Undefined):
        return []
    if not isinstance(value, Mapping):
        raise TypeError("Can only get item pairs from a mapping.")
    sandbox.meter.charge(NODE * len(value))
    return list(value.items())


def _sorted(name: str) -> Function:
    """Return one of Jinja's filters that compare items with each other."""

    def run(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
        return JINJA_FILTERS[name](sandbox, _to_sort(sandbox, _list(sandbox, value)), *args, **kwargs)

    return run


def _to_sort(sandbox: Sandbox, value: Any, n_keys: int = 1) -> Any:
    """Charge for sorting the items of a list or dictionary, however deep, by `n_keys` parts of each."""
    before = sandbox.meter.left
    sandbox.meter.charge_value(value)
    sandbox.meter.charge((before - sandbox.meter.left) * len(value).bit_length() * n_keys)
    return value


def _sort(
    sandbox: Sandbox,
    value: Any,
    reverse: bool = False,
    case_sensitive: bool = False,
    attribute: str | int | None = None,
) -> Any:
    n_keys = 1 + (attribute.count(",") if isinstance(attribute, str) else 0)
    items = _to_sort(sandbox, _list(sandbox, value), n_keys)
    return JINJA_FILTERS["sort"](sandbox, items, reverse, case_sensitive, attribute)


def _dictsort(sandbox: Sandbox, value: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"dictsort takes a dictionary, not a {type(value).__name__}")
    return JINJA_FILTERS["dictsort"](_to_sort(sandbox, value), *args, **kwargs)


def _unique(sandbox: Sandbox, value: Any, case_sensitive: bool = False, attribute: Any = None) -> list[Any]:
    part = make_attrgetter(sandbox, attribute)
    seen: set[Any] = set()
    found = []
    for item in sandbox.each(value):
        key = sandbox.key(part(item))
        if isinstance(key, str):
            sandbox.meter.charge(TEXT + len(key))
            key = str.__str__(key) if case_sensitive else str.lower(key)
        if key not in seen:
            seen.add(key)
            found.append(item)
    return found


def _batch(sandbox: Sandbox, value: Any, linecount: int, fill_with: Any = None) -> list[list[Any]]:
    items, size = _list(sandbox, value), _count("batch", linecount)
    rest = -len(items) % size if items and fill_with is not None else 0
    sandbox.meter.charge(SLOT * (len(items) + rest) + NODE * (len(items) // size + 1))
    return [*JINJA_FILTERS["batch"](items, size, fill_with)]


def _slices(sandbox: Sandbox, value: Any, slices: int, fill_with: Any = None) -> list[list[Any]]:
    items, n = _list(sandbox, value), _count("slice", slices)
    sandbox.meter.charge(SLOT * len(items) + NODE * n)
    return [*sync_do_slice(items, n, fill_with)]


def _count(name: str, value: Any) -> int:
    count = operator.index(value)
    if count < 1:
        raise ValueError(f"{name} takes a count of at least 1, not {count}")
    return count


def in_context(function: Function) -> Function:
    function.__dict__["wants_context"] = True
    return function


def _picking(name: str) -> Function:
    """Return one of Jinja's filters that apply another filter or test to every item."""
    at = 1 if name.endswith("attr") else 0

    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        sandbox = cast(Sandbox, context.environment)
        named = args[at : at + 1]
        # the hash of a tuple is deep; names with a space belong to functions that replace syntax
        if named and (not isinstance(named[0], str) or named[0].startswith(" ")):
            raise Refused(f"{name} takes the name of a filter, a test or an attribute")
        items = sandbox.each(value) if value else ()
        return _list(sandbox, JINJA_FILTERS[name](context, items, *args, **kwargs))  # all lists have a length

    return in_context(run)


def _sum(context: Context, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    sandbox = cast(Sandbox, context.environment)
    if attribute is not None:
        iterable = JINJA_FILTERS["map"](context, iterable, attribute=attribute)
    for item in sandbox.each(iterable):
        start = sandbox.call_binop(context, "+", start, item)
    return start


LIST_FILTERS: dict[str, Function] = {
    **{"list": _list, "first": JINJA_FILTERS["first"], "last": JINJA_FILTERS["last"]},
    **dict.fromkeys(("length", "count"), lambda sandbox, value: len(value)),
    **{"reverse": _reverse, "items": _items},
    **{name: _sorted(name) for name in ("groupby", "max", "min")},
    "sort": _sort,
    **{"unique": _unique, "dictsort": _dictsort, "batch": _batch, "slice": _slices},
    "sum": in_context(_sum),
    **{name: _picking(name) for name in ("map", "select", "reject", "selectattr", "rejectattr")},
}
