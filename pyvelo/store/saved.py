"""Saved sessions: tokens under a name in the store. Their blocks are stored as for all sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from pyvelo.errors import ConfigError, RequestError, StoreError, shown
from pyvelo.sampling import SamplingParams
from pyvelo.store.base import RecordName
from pyvelo.store.persistence import Persistence
from pyvelo.store.record import owner_of

__all__ = ["NoSession", "delete_session", "load_sequence", "purge", "save_session"]

# of the engine, which imports this folder
Engine = Any
Sequence = Any

HEAD = b"PyVeloSe\x01"  # the last byte is the version
MAX_NAME = 256  # characters
PATIENCE = 30.0  # seconds that saving the blocks may take


class NoSession(RequestError):
    """There is no saved session of a name."""


class _Address(NamedTuple):
    model: bytes
    salt: bytes
    session: bytes

    @property
    def name(self) -> RecordName:
        return RecordName(owner_of(self.salt), self._digest())

    @property
    def n_bytes(self) -> None:
        return None

    @property
    def is_kept(self) -> bool:
        return True

    def head(self) -> bytes:
        return HEAD + self._digest()

    def _digest(self) -> bytes:
        parts = (self.model, self.salt, self.session)
        return sha256(
            b"session" + b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        ).digest()


def _in_use(engine: Engine) -> Persistence:
    engine.check_open()
    persistence: Persistence | None = engine.persistence
    if persistence is None:
        raise ConfigError('this needs a KV store: open the model with kv_store="~/.cache/pyvelo/kv"')
    return persistence


def save_session(
    engine: Engine, name: str, sequence: Sequence, note: Mapping[str, Any] | None = None
) -> None:
    """Save a session under a name, in place of an earlier one, after its blocks in the pool.

    sequence: no request runs on it. note: what a server keeps with it; JSON can express it.

    Raises:
        ClosedError, UnsupportedError, ConfigError: the engine is closed, only embeds, or has no store.
        RequestError: the name is invalid.
        StoreError: the store is away, is too small, or belongs to another process.
    """
    persistence = _in_use(engine)
    address, tokens = _address(persistence, name, sequence.salt), list(sequence.tokens)
    n_purges = persistence.store.n_purges(address)
    persistence.save(sequence.fork(tokens, len(tokens)).hashes, len(tokens), PATIENCE)
    lora = "" if sequence.adapter is None else sequence.adapter.name
    record = json.dumps({"tokens": tokens, "lora": lora, "note": note}).encode()
    if not persistence.store.insist(address, record, n_purges):
        raise StoreError(
            f"the KV store {persistence.store.name} did not save the session: it is too small, was purged "
            f"meanwhile, or another process writes to it"
        )


def load_sequence(engine: Engine, name: str, salt: str) -> tuple[Sequence, Mapping[str, Any] | None]:
    """Return the sequence of a saved session and its note.

    Raises:
        ConfigError, StoreError: as `save_session`.
        RequestError: this model has no session of this name and salt, or its adapter is not loaded.
        OutOfBlocks: it is too long for the context or the cache.
    """
    persistence = _in_use(engine)
    payload = persistence.store.demand(_address(persistence, name, salt))
    if payload is None:
        raise NoSession(f"there is no saved session {shown(name)} of this model and this cache_salt")
    saved = json.loads(payload)
    return engine.processor.sequence(saved["tokens"], salt, saved["lora"]), saved["note"]


def delete_session(engine: Engine, name: str, salt: str) -> bool:
    """Delete a saved session, and return whether there was one; its blocks stay. Raise as `save_session`."""
    persistence = _in_use(engine)
    address, store = _address(persistence, name, salt), persistence.store
    there = store.demand(address) is not None
    store.delete(address)
    return there


def purge(engine: Engine, owner: str | None) -> int:
    """Delete the blocks and sessions of an owner, or of all; return how many records.

    owner: salts "OWNER" and "OWNER:..." belong to it.

    Raises:
        ConfigError, StoreError: as `save_session`.
    """
    if owner is not None:
        SamplingParams(cache_salt=owner)  # checks it
    digest = None if owner is None else owner_of(owner.encode("utf-8", "surrogatepass"))
    return _in_use(engine).purge(digest)


def _address(persistence: Persistence, name: str, salt: str) -> _Address:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise RequestError(f"name={shown(name)}: give a string of 1 to {MAX_NAME} characters")
    SamplingParams(cache_salt=salt)  # checks it
    text = name.encode("utf-8", "surrogatepass")
    return _Address(persistence.identity.model, salt.encode("utf-8", "surrogatepass"), text)
