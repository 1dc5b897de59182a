"""From the setting `kv_store` to a store, and to its place in an engine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from pyvelo._version import __version__
from pyvelo.config import EngineConfig
from pyvelo.errors import ConfigError, ModelError, StoreError
from pyvelo.kv.geometry import Geometry
from pyvelo.kv_store import KVStore, place_of, place_shown
from pyvelo.models.files import ModelFiles
from pyvelo.models.gguf_parts import scan_model
from pyvelo.models.hub import locate
from pyvelo.store.base import BlockStore
from pyvelo.store.files import FileStore, make_folder
from pyvelo.store.fingerprint import file_digest, fingerprint, known_digest
from pyvelo.store.guard import GuardedStore
from pyvelo.store.link import Identity, Link
from pyvelo.store.persistence import Persistence
from pyvelo.store.record import Codec

__all__ = ["cache_folder", "default_folder", "open_persistence", "open_store"]

# of the engine, which imports this file
EngineLoop = Any
EngineCore = Any
Context = Any

PAYLOAD = 1  # version of the bytes that `Context.read_blocks` returns
LONG_ROPE = "rope.scaling.original_context_length"  # such models have other factors in a longer context


def open_store(given: KVStore | str | os.PathLike[str]) -> GuardedStore:
    """Return the store at a folder or at the address of a Valkey or Redis server.

    A folder is made; nothing is opened before the first call.

    Raises:
        ConfigError: a setting is wrong, a package is missing, or the folder cannot be used.
    """
    settings = given if isinstance(given, KVStore) else KVStore(given)
    scheme, place = place_of(settings.where)
    codec, ttl = Codec(settings.key), settings.ttl
    if not scheme:
        try:
            make_folder(Path(place))
        except (StoreError, OSError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"kv_store={place!r}: {why}") from error
        folder = partial(FileStore, Path(place), max_bytes=settings.max_bytes, ttl=ttl)
        return GuardedStore(folder, place, codec)
    from pyvelo.store.valkey import ValkeyStore

    server: BlockStore = ValkeyStore(place, ttl=ttl)  # connects at the first call
    return GuardedStore(lambda: server, place_shown(place), codec)


def cache_folder() -> Path:
    """Return this user's folder for what can be made again; raise ConfigError if there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "pyvelo"
    except RuntimeError:
        raise ConfigError("there is no home folder: set XDG_CACHE_HOME to a folder for caches") from None


def default_folder() -> Path:
    """Return the folder of the store that chats use."""
    return cache_folder() / "kv"


def open_persistence(
    config: EngineConfig,
    files: ModelFiles,
    loop: EngineLoop,
    core: EngineCore,
    context: Context,
    geometry: Geometry,
    n_ctx: int,
    instructions: str,
) -> Persistence | None:
    """Connect the loop with the store of the settings; None: they have none.

    Args:
        files: of the model, as it was loaded.
        instructions: of the processor, which change the bits of K and V.

    Raises:
        ConfigError: the store's address is wrong, or a package is missing.
    """
    where = config.kv_store
    if not isinstance(where, KVStore):
        return None
    store = open_store(where)
    _share_host_memory(config.swap_bytes, store, core, context)
    summary = scan_model(locate(config.model))
    settings = {
        "payload": PAYLOAD,
        "version": __version__,  # of the kernels
        "types": [geometry.type_k.name, geometry.type_v.name],
        "block size": geometry.block_size,
        "rows": [astuple(row) for row in geometry.rows],
        "groups": [[*group.window, group.layers, group.n_shares] for group in geometry.groups],
        "state bytes": geometry.state_bytes,
        "deterministic": instructions if config.deterministic else "",
        "attention": config.attention_precision,
        "context": n_ctx if any(key.endswith(LONG_ROPE) for key in summary.metadata) else 0,
    }
    descriptors, memory = files.descriptors(), cache_folder() / "digests.json"
    known = known_digest(descriptors, memory)

    def identity_of(digest: str) -> Identity:
        files.check()
        return Identity(bytes.fromhex(digest), fingerprint({**settings, "model": digest}))

    def identify() -> Identity:
        try:
            return identity_of(known or file_digest(descriptors, memory))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    link = Link(loop, core, context, store, time.monotonic)
    if known is not None:
        with suppress(ModelError):  # `identify` tells of it
            link.identity = identity_of(known)  # so that the first request already uses the store
    persistence = Persistence(link, identify, where.min_blocks)
    loop.submit_to = persistence.submit
    return persistence


def _share_host_memory(n_bytes: int, store: GuardedStore, core: EngineCore, context: Context) -> None:
    """Give the store the host memory that preempted sequences have not used so far."""
    if not n_bytes or context.pins_swap:
        return
    block_bytes = context.info.block_bytes

    def leave(n_written: int) -> None:
        store.limit_host(max(0, n_bytes - n_written * block_bytes))

    leave(0)
    core.manager.swap.on_growth = leave
