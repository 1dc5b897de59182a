"""From a running engine to a publisher of KV events."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pyvelo.config import EngineConfig
from pyvelo.errors import VeloError
from pyvelo.events.feed import Feed
from pyvelo.events.names import Adapters, Names
from pyvelo.events.publisher import Publisher
from pyvelo.hosts import is_loopback
from pyvelo.kv.adopt import AdoptingManager
from pyvelo.kv_events import KVEvents

__all__ = ["connect", "is_local", "publishing"]

_log = logging.getLogger("pyvelo")

# of the engine, which imports this file
EngineLoop = Any
EngineCore = Any


@contextmanager
def publishing(config: EngineConfig) -> Iterator[Publisher | None]:
    """Yield a publisher at the addresses of the settings, None for none; an error in the block closes it.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """
    settings = config.kv_events
    if not isinstance(settings, KVEvents):
        yield None
        return
    publisher = Publisher(settings)
    replay = "" if publisher.replay_endpoint is None else f", replays at {publisher.replay_endpoint}"
    _log.info("KV events at %s%s", publisher.endpoint, replay)
    for address in (settings.endpoint, settings.replay):
        if address is not None and not is_local(address):
            _log.warning("KV events at %s: other machines can read the token ids of all prompts", address)
    try:
        yield publisher
    except BaseException:
        publisher.close()
        raise


def connect(publisher: Publisher, loop: EngineLoop, core: EngineCore, adapters: Adapters) -> None:
    """Publish the changes of each turn of a loop.

    Args:
        adapters: by name, each behind its description.
    """
    manager: AdoptingManager = core.manager
    if manager.index is None:
        return
    names = Names(adapters)
    feed = Feed(manager.index, manager.layout, names.split)
    publisher.block_size = manager.block_size
    publisher.on_room = _visit(weakref.ref(loop))
    publisher.close_with(loop)
    before = manager.set_observer(feed.observe)
    if before is not None:
        raise RuntimeError("the manager has an observer already")
    loop.publishers.append(lambda: _publish(names, feed, publisher))


def _publish(names: Names, feed: Feed, publisher: Publisher) -> None:
    """Give the publisher the changes; while its queue is full they are merged with later ones."""
    if publisher.has_room and names.update():
        feed.note_adapters()
    if feed.has_changes and publisher.has_room:
        changes = feed.take()
        if changes is not None:
            publisher.put(changes)


def _visit(loop: weakref.ref[EngineLoop]) -> Callable[[], None]:
    """Return what makes the loop publish between two steps."""

    def visit() -> None:
        found = loop()
        if found is not None:
            with suppress(VeloError), found.visit():  # an engine that is closed or broken has no events
                pass

    return visit


def is_local(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    scheme, _, place = address.partition("://")
    return scheme == "ipc" or is_loopback(place.rpartition(":")[0])
