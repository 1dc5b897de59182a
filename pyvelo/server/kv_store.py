"""/v1/kv_store and saved sessions: what the KV store has of a key."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pyvelo.server.dialogue import Dialogue
from pyvelo.server.errors import HttpError, not_found, refused
from pyvelo.session import AsyncSession
from pyvelo.store import saved
from pyvelo.store.persistence import Persistence
from pyvelo.threads import in_thread

MAX_NAME = 128

if TYPE_CHECKING:
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["check_name", "delete", "load", "persistence_of", "purge", "show"]


def persistence_of(serving: Serving) -> Persistence:
    """Return the server's store; raise HttpError 403 if it has none, 503 while the model's file is read."""
    found = serving.engine.persistence
    if found is None:
        raise HttpError(403, "this server has no KV store: start it with --kv-store PLACE")
    if found.is_identifying:
        message = "the model's file is still being read for the KV store: try again soon"
        raise HttpError(503, message, headers={"Retry-After": "2"})
    return found


def check_name(param: str, name: str) -> None:
    """Raise HttpError unless a saved session can have this name, which is a part of a path."""
    if not 0 < len(name) <= MAX_NAME or "/" in name:
        raise refused(param, f"{param}: give a name of 1 to {MAX_NAME} characters without /")


def load(serving: Serving, name: str, salt: str) -> tuple[AsyncSession, str, Dialogue | None]:
    """Open a saved session; return it with the name of its adapter and its conversation."""
    try:
        sequence, note = saved.load_sequence(serving.engine, name, salt)
    except saved.NoSession as error:
        raise not_found(str(error)) from error
    known = None if note is None else Dialogue(**{**note, "messages": tuple(note["messages"])})
    lora = "" if sequence.adapter is None else sequence.adapter.name
    return AsyncSession(serving.loop, sequence), lora, known


async def show(serving: Serving, exchange: Exchange) -> None:
    """Answer with the size of the store, of all keys together; null: unknown."""
    found = await in_thread(persistence_of(serving).store.stats)
    await exchange.answer({"object": "kv_store", "n_records": found.n_records, "n_bytes": found.n_bytes})


async def purge(serving: Serving, exchange: Exchange) -> None:
    """Delete the blocks and the saved sessions of the key; without keys, all."""
    persistence_of(serving)
    tenant = exchange.tenant
    owner = tenant.owner if tenant.has_key else None
    n_records = await in_thread(partial(saved.purge, serving.engine, owner))
    await exchange.answer({"object": "kv_store", "n_deleted": n_records})


async def delete(serving: Serving, exchange: Exchange) -> None:
    """Delete the session of this name that the key saved without a cache_salt, if there is one."""
    persistence_of(serving)
    salt = exchange.tenant.salt("")
    if not await in_thread(partial(saved.delete_session, serving.engine, exchange.path_id, salt)):
        raise not_found(f"this key has no saved session {exchange.path_id!r}")
    await exchange.answer({"id": exchange.path_id, "object": "saved_session", "deleted": True})
