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

__all__ = ["NotCopied", "check_fields", "checked", "either"]

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

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
    where = where.removesuffix(".__init__")
    if params is not None:
        own = [field.name for field in fields(params)]
        if name in own or (not get_close_matches(name, known) and get_close_matches(name, own)):
            name_there = name if name in own else get_close_matches(name, own)[0]
            return (
                f"{where} has no argument {shown(name)}: it is part of the sampling parameters, give "
                f"params={params.__name__}({name_there}=...)"
            )
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"{where} has no argument {shown(name)}: {hint}"
