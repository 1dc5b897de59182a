"""Ids of requests, as callers give them and abort by them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from pyvelo.engine.request import ParentRequest
from pyvelo.errors import RequestError, shown

__all__ = ["abort_requests", "check_id"]

MAX_ID = 256
"""Characters of an id."""


def check_id(request_id: object) -> None:
    """Raise RequestError if this is not a string of 1 to 256 characters."""
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_ID:
        raise RequestError(f"request_id={shown(request_id)}: give a string of 1 to {MAX_ID} characters")


def abort_requests(parents: set[ref[ParentRequest]], request_ids: str | Iterable[str]) -> bool:
    """Mark the requests of these ids, so that the core ends them; return whether there are any.

    Other threads may add to `parents` meanwhile: it is copied by one call of C.

    Raises:
        RequestError: an id is not a string of 1 to 256 characters.
    """
    try:
        ids: list[Any] = [request_ids] if isinstance(request_ids, (str, bytes)) else list(request_ids)
    except TypeError:
        ids = [request_ids]
    for request_id in ids:
        check_id(request_id)
    wanted = set(ids)
    found = [parent for each in parents.copy() if (parent := each()) is not None]
    named = [parent for parent in found if {parent.request_id, parent.batch_id} & wanted]
    for parent in named:
        parent.aborted = True
    return bool(named)
