"""Names of arguments: unknown names and second names; and objects that cannot be copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, iscoroutinefunction, signature
from typing import (
    Any,
    ClassVar,
    NoReturn,
    ParamSpec,
    SupportsIndex,
    TypeVar,
    cast,
    get_type_hints,
)

from pyvelo.errors import ArgumentError, RequestError, shown
from pyvelo.other_names import EQUIVALENTS, OF_CALLS, WITHOUT

__all__ = ["NotCopied", "check_fields", "checked", "either"]

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

_STREAMS = {"generate": "stream", "chat": "chat_stream"}

_NEAR = 0.84  # of SequenceMatcher.ratio: a typo in a name, but no other name of the same words

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def checked(*options: type, params: type | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that a wrong keyword raises ArgumentError with the nearest right one.

    So does a keyword that is True or False by default, or by its type in `options`, and is neither. Those of
    a constructor are checked by what it makes.

    Args:
        options: the TypedDicts that it takes as `**options`.
        params: the dataclass of its argument `params`; whose fields are no keywords of the function.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        given_by = signature(function).parameters
        names = [name for name, each in given_by.items() if each.kind in _NAMED]
        names += [name for each in options for name in each.__annotations__]
        known = dict.fromkeys(name for name in names if name != "self")
        flags = {name for each in options for name, kind in get_type_hints(each).items() if kind is bool}
        if function.__name__ != "__init__":
            flags |= {name for name, each in given_by.items() if isinstance(each.default, bool)}

        def check(given: Mapping[str, Any]) -> None:
            for name, value in given.items():
                if name not in known:
                    raise ArgumentError(_explain(function.__qualname__, name, list(known), params))
                if name in flags and not isinstance(value, bool):
                    raise ArgumentError(f"{name}={shown(value)}: give True or False")

        if iscoroutinefunction(function):

            @wraps(function)
            async def wait(*args: P.args, **kwargs: P.kwargs) -> Any:
                check(kwargs)
                return await function(*args, **kwargs)

            return cast(Callable[P, T], wait)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            check(kwargs)
            return function(*args, **kwargs)

        return call

    return decorate


def either(params: Any, sampling_params: Any, default: Any = None) -> Any:
    """Return the sampling parameters of a call under either name, or the default.

    Raises:
        RequestError: both names were given.
    """
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params are two names of one argument: give one of them")
    if params is not None:
        return params
    return default if sampling_params is None else sampling_params


def check_fields(cls: C) -> C:
    """Decorate a dataclass so that a wrong field raises ArgumentError with the nearest right one."""
    made: Any = cast(Any, cls).__init__
    made.__qualname__ = cls.__qualname__
    setattr(cls, "__init__", checked()(made))  # noqa: B010
    return cls


class NotCopied:
    """Base of classes whose objects own memory or requests: `copy` and `pickle` raise ArgumentError."""

    _instead: ClassVar[str] = ""
    """What to do instead."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ArgumentError(f"{type(self).__name__} cannot be copied or pickled: {self._instead}")


def _explain(where: str, name: str, known: Sequence[str], params: type | None) -> str:
    """Return the message for an unknown keyword of `where`, with the right one if there is a good guess."""
    constructor = where.endswith(".__init__")
    where = where.removesuffix(".__init__")
    wrong = f"{where} has no argument {shown(name)}"
    own = [field.name for field in fields(params)] if params is not None else []
    method = where.rpartition(".")[2]
    if name == "stream" and method in _STREAMS:
        return f"{wrong}: call {_STREAMS[method]} to get its pieces"
    if constructor and name in OF_CALLS:
        return f"{wrong}: {OF_CALLS[name]}"
    if name in WITHOUT and name not in own:
        return f"{wrong}: {WITHOUT[name]}"
    near = None if name in own else _nearest(name, known)
    if near is None and params is not None and (of_params := _nearest(name, own)):
        if constructor:
            return f"{wrong}: {of_params} belongs to {params.__name__}, which generate takes"
        return (
            f"{wrong}: it is part of the sampling parameters, give params={params.__name__}({of_params}=...)"
        )
    return f"{wrong}: did you mean {near}?" if near else f"{wrong}: there are {', '.join(known)}"


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the name that was meant: the same, its equivalent, one with these words, or one with a typo."""
    if name in known:
        return name
    if name in EQUIVALENTS:
        return EQUIVALENTS[name] if EQUIVALENTS[name] in known else None
    words = set(name.split("_"))
    longer = [each for each in known if len(name) > 2 and words <= set(each.split("_"))]
    near = get_close_matches(name, known, n=1, cutoff=_NEAR) or get_close_matches(name, longer, 1, 0.0)
    return near[0] if near else None
