"""Calls that run when an object is dropped, exactly once, unless they were detached."""

from __future__ import annotations

import gc
from functools import partial

import pytest

from pyvelo.finalizer import Finalizer


class Owner:
    """Object that can be dropped, equal to every other one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner)

    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_the_calls_of_all_finalizers_run_once(in_a_cycle: bool) -> None:
    ran: list[int] = []
    owner, other = Owner(), Owner()
    first = Finalizer(owner, partial(ran.append, 1), partial(ran.append, 2))
    Finalizer(owner, partial(ran.append, 3))
    Finalizer(other, partial(ran.append, 4))
    assert first.alive
    if in_a_cycle:
        owner.me, owner.finalizer = owner, first  # type: ignore[attr-defined]
    del owner
    gc.collect()
    assert sorted(ran) == [1, 2, 3]
    assert not first.alive
    assert not first.detach()
    del other
    assert sorted(ran) == [1, 2, 3, 4]


def test_detached_calls_do_not_run_and_are_freed() -> None:
    ran: list[int] = []
    owner, argument = Owner(), Owner()
    freed: list[bool] = []
    Finalizer(argument, partial(freed.append, True))
    finalizer = Finalizer(owner, partial(ran.append, argument))  # type: ignore[arg-type]
    del argument
    assert not freed
    assert finalizer.detach()
    assert freed
    assert not finalizer.alive
    assert not finalizer.detach()
    del owner
    assert not ran
