"""Jinja sandbox for untrusted templates: allows what is listed here, and refuses everything else.

A template sees plain data, the methods listed below, and the filters, tests and globals of sandbox_functions.
Each operation that can grow or take long is charged to the rendering's meter before it runs. So a hostile
template ends within its limits, in any thread, without a signal or a process.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.nodes import Template
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import Cycler, Joiner, Namespace

from pyvelo.chat.marked import merge, theirs
from pyvelo.chat.meter import NODE, TEXT, Meter, Refused
from pyvelo.chat.plain import Parts
from pyvelo.chat.sandbox_costs import search_cost
from pyvelo.chat.sandbox_syntax import GenerationBlocks, metered
from pyvelo.chat.sandbox_text import TEXT_METHODS, TextSandbox, percent, text_method

__all__ = ["SLOT", "Guarded", "Notes", "Sandbox", "bounded"]

SLOT = 4  # units for an item in a list whose value existed before
MAX_CALLS = 60  # macros inside macros
MAX_INT = 1 << 63
NOTHING = object()
Function = Callable[..., Any]
LOOP_NAMES = frozenset({"depth", "depth0", "first", "index", "index0", "last", "length"})
LOOP_NAMES |= {"nextitem", "previtem", "revindex", "revindex0"}
PLAIN = (str, dict, list, tuple, range)
SCALAR = (str, int, float, type(None), Undefined)
NUMBER = (int, float, Undefined)
OPERANDS = (str, list, tuple, *NUMBER)
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}


METHODS: dict[type, dict[str, Callable[[Any, tuple[Any, ...], Meter], int]]] = {
    dict: {
        "copy": lambda owner, args, meter: NODE * len(owner),
        **dict.fromkeys(("get", "items", "keys", "values"), lambda owner, args, meter: 0),
    },
    list: {
        "append": lambda owner, args, meter: 0,  # the lists are copies, and templates keep queues
        "pop": lambda owner, args, meter: len(owner) // 16,
        "copy": lambda owner, args, meter: SLOT * len(owner),
        **dict.fromkeys(("count", "index"), lambda owner, args, meter: _compared(owner, args, meter)),
    },
    tuple: dict.fromkeys(("count", "index"), lambda owner, args, meter: _compared(owner, args, meter)),
    LoopContext: {
        "cycle": lambda owner, args, meter: SLOT * len(args),
        "changed": lambda owner, args, meter: _compared((), args, meter),
    },
    Cycler: dict.fromkeys(("next", "reset"), lambda owner, args, meter: 0),
}
"""Allowed methods of values other than strings, and their costs beside the cost of a call."""


def _compared(owner: Any, args: Any, meter: Meter) -> int:
    """Charge for a comparison of the items of `owner` with the arguments, which is as deep as they are."""
    meter.charge_value([owner, *args])
    return 0


class Guarded(partial[Any]):
    """A function that templates may call."""


class Notes(Namespace):
    """A template's namespace; no name in it can be one of Python's own."""

    def __init__(self, values: dict[Any, Any]) -> None:
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise Refused(f"a namespace cannot hold {str(name)[:80]!r}: names in it must not begin with _")
        super().__setitem__(str.__str__(name), value)


class Each:
    """Iterable of a loop; every item is charged."""

    __slots__ = ("_items", "_meter")

    def __init__(self, items: Any, meter: Meter) -> None:
        self._items = items
        self._meter = meter

    def __bool__(self) -> bool:
        return True  # the length of an iterator is unknown

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        units = TEXT if isinstance(self._items, str) else 1  # every character becomes a string
        for item in self._items:
            self._meter.charge(units)
            yield item


@pass_context  # with it, Jinja does not try it on constants when it compiles
def _written(context: Context, value: Any) -> str:
    sandbox = context.environment
    return sandbox.text(value) if isinstance(sandbox, Sandbox) else ""


class Sandbox(TextSandbox):
    """Environment for templates. `metered_by` makes a copy with a meter for each rendering."""

    intercepted_binops = frozenset(BINARY)

    def __init__(
        self,
        filters: dict[str, Callable[..., Any]],
        tests: dict[str, Callable[..., Any]],
        names: dict[str, Callable[[Sandbox], Any]],
    ) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants, too, are computed under the meter
            finalize=_written,
            extensions=[GenerationBlocks, loopcontrols],
        )
        self.filters = dict(filters)
        self.tests = dict(tests)
        self._names = names
        self.globals = {}

    def code(self, tree: Template, filename: str) -> CodeType:
        """Compile a parsed template and change its tree.

        Raises TemplateSyntaxError, or the error of Python's compiler about deep nesting.
        """
        return self.compile(metered(tree), filename=filename)

    def metered_by(self, meter: Meter) -> Sandbox:
        """Return the environment of one rendering."""
        twin = copy.copy(self)
        twin.meter = meter
        twin.globals = {name: make(twin) for name, make in self._names.items()}
        return twin

    # ---- values ----

    def each(self, value: Any) -> Each:
        """Return a metered iterable of a value's items."""
        return Each(value, self.meter)

    def text(self, value: Any) -> str:
        """Return a value's text in the output; Refused for a generator, a macro or another non-value."""
        if isinstance(value, str):
            return value
        if isinstance(value, Undefined):
            return str(value)
        if isinstance(value, Parts):
            self.meter.charge_value(value)
            return value.text
        marked = self.meter.charge_value(value)
        return theirs(str(value)) if marked else str(value)

    def concat(self, parts: Any) -> str:
        """Return the text of a macro or a block."""
        listed = list(parts)
        self.meter.charge(sum(map(len, listed)))
        return merge(listed)

    def key(self, value: Any) -> Any:
        """Return a key or index; Refused for a tuple, whose hash is deep and can be made to collide."""
        if isinstance(value, tuple):
            raise Refused("a tuple is no key: take a string or a number")
        return value

    def compare(self, op: str, left: Any, right: Any) -> bool:
        """Compare two values; deep comparisons are charged."""
        if op in ("in", "notin"):
            found = self._contains(left, right)
            return found if op == "in" else not found
        if isinstance(left, str) and isinstance(right, str):
            self.meter.charge(1 + min(len(left), len(right)) // 16)
        elif not (isinstance(left, SCALAR) and isinstance(right, SCALAR)):
            self.meter.charge_value(left)
            self.meter.charge_value(right)
        return bool(COMPARISONS[op](left, right))

    def _contains(self, item: Any, container: Any) -> bool:
        if isinstance(container, str):
            self.meter.charge(search_cost(container, item) if isinstance(item, str) else 1)
        elif isinstance(container, dict):
            self.key(item)
        elif isinstance(container, (list, tuple, range)) and not isinstance(item, (list, tuple, dict)):
            size = len(item) if isinstance(item, str) else 1
            self.meter.charge(len(container) * (1 + size // 16))
        elif isinstance(container, Undefined):
            pass
        else:
            container = list(self.each(container))
            self.meter.charge_value(item)
            self.meter.charge_value(container)
        return item in container

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator. Text and lists are charged before they grow; numbers stay within 64 bits."""
        meter = self.meter
        allowed = OPERANDS if operator in ("+", "*") else NUMBER
        if operator == "%" and isinstance(left, str):
            return percent(self, left, right)
        if operator == "**":
            if not all(isinstance(value, (int, float)) and abs(value) <= MAX_INT for value in (left, right)):
                raise Refused("** is for numbers of up to 64 bits")
            if abs(right) > 64 and isinstance(left, int) and isinstance(right, int):
                raise Refused(f"{left} ** {right} is too large a number")
        elif not (isinstance(left, allowed) and isinstance(right, allowed)):
            kinds = f"a {type(left).__name__} and a {type(right).__name__}"
            raise TypeError(f"{operator} is not for {kinds}")
        elif operator == "+":
            meter.charge(_weight(left) + _weight(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    meter.charge(_weight(one) * max(1, other))
        return bounded(BINARY[operator](left, right))

    # ---- names ----

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`: one of the allowed methods, else an item."""
        self.meter.charge(1)
        found = self._attribute(obj, attribute)
        if found is not NOTHING:
            return found
        if isinstance(obj, (dict, Undefined)):
            try:
                return obj[attribute]
            except LookupError:
                pass
        return self._missing(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]`: an item, else one of the allowed methods."""
        self.meter.charge(1)
        if isinstance(obj, (*PLAIN, Undefined)):
            try:
                return obj[self.key(argument)]
            except (TypeError, LookupError):
                pass
        if isinstance(argument, str):
            found = self._attribute(obj, str(argument))
            return found if found is not NOTHING else self._missing(obj, argument)
        name: Any = argument if isinstance(argument, (int, float)) else type(argument).__name__
        return self.undefined(obj=obj, name=name)  # its message shows the name

    def _attribute(self, obj: Any, name: str) -> Any:
        """Return the allowed attribute of that name; NOTHING if there is none."""
        if isinstance(obj, str):
            return Guarded(text_method(self, obj, name)) if name in TEXT_METHODS else NOTHING
        for kind, methods in METHODS.items():
            if isinstance(obj, kind) and name in methods:
                return Guarded(self._method(obj, name, methods[name]))
        match obj:
            case tuple() if name in ("grouper", "list"):
                return getattr(obj, name, NOTHING)
            case Namespace() if not name.startswith("_"):
                return getattr(obj, name, NOTHING)
            case LoopContext() if name in LOOP_NAMES:
                return getattr(obj, name)
            case Cycler() if name == "current":
                return obj.current
            case Macro() if name == "name":
                return obj.name
        return NOTHING

    def _method(self, owner: Any, name: str, cost: Callable[[Any, tuple[Any, ...], Meter], int]) -> Function:
        """Return a method of `owner` that charges its cost before it runs; it takes no keywords."""

        def run(*args: Any) -> Any:
            if isinstance(owner, dict):
                args = tuple(map(self.key, args[:1])) + args[1:]
            self.meter.charge(TEXT + cost(owner, args, self.meter))
            return getattr(owner, name)(*args)

        return run

    def _missing(self, obj: Any, name: str) -> Undefined:
        if name.startswith("__" if isinstance(obj, dict) else "_") or name in ("mro", "gi_frame", "gi_code"):
            raise SecurityError(f"it reaches for {name} of a {type(obj).__name__}")
        if hasattr(type(obj), name) and not isinstance(obj, Undefined):
            return self.unsafe_undefined(obj, name)
        return self.undefined(obj=obj, name=name)

    # ---- calls ----

    def is_safe_callable(self, obj: Any) -> bool:
        return isinstance(obj, (Guarded, Macro, Joiner, LoopContext, Undefined))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an allowed object; macros may nest up to MAX_CALLS deep."""
        meter = __self.meter
        meter.charge(1 + len(args) + len(kwargs))
        if not __self.is_safe_callable(__obj):  # Jinja's own message shows all of the value
            raise SecurityError(f"it calls a {type(__obj).__name__}")
        if isinstance(__obj, LoopContext):
            args = tuple(map(__self.each, args))
        if not isinstance(__obj, (Macro, LoopContext)):
            return super().call(__context, __obj, *args, **kwargs)
        if meter.depth >= MAX_CALLS:
            raise Refused(f"its macros call each other more than {MAX_CALLS} deep")
        meter.charge(TEXT)
        meter.depth += 1
        try:
            return super().call(__context, __obj, *args, **kwargs)
        finally:
            meter.depth -= 1


def bounded(value: Any) -> Any:
    """Return the value; Refused if it is an integer of more than 64 bits, which is slow."""
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise Refused("it makes a number of more than 64 bits")
    return value


def _weight(value: Any) -> int:
    """Return the cost of a copy in units."""
    if isinstance(value, str):
        return len(value)
    return SLOT * len(value) if isinstance(value, (list, tuple)) else 0
