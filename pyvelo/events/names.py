"""Names of adapters in KV events: a name stands for one adapter until its blocks are withdrawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyvelo.kv.extra import salt_of

__all__ = ["Names"]

Adapters = Mapping[str, tuple[Any, Any]]


class Names:
    """Snapshot of the names of loaded adapters. Not thread-safe.

    Args:
        adapters: by name, each behind its description; they may change.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._names: dict[bytes, str] = {}  # by key
        self.update()

    def update(self) -> bool:
        """Take a new snapshot; return whether it has changed.

        An adapter whose name has changed is in no snapshot once, so that its blocks are removed first.
        """
        now: dict[bytes, str] = {}
        for name, (_, adapter) in list(self._adapters.items()):
            now.setdefault(adapter.key, name)
        new = {key: name for key, name in now.items() if self._names.get(key, name) == name}
        has_changed, self._names = new != self._names, new
        return has_changed

    def split(self, extra: bytes) -> tuple[str | None, bytes] | None:
        """Return the name of the adapter and the salt in the `extra` of block hashes.

        None: the adapter was unloaded, so blocks with this `extra` cannot be a hit.
        """
        salt = salt_of(extra)
        key = extra.removesuffix(salt) if salt else extra
        if not key:
            return None, salt
        return (self._names[key], salt) if key in self._names else None
