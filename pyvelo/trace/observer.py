"""Observer of a running engine's blocks, the source of recordings and of live views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pyvelo.engine.request import Request
from pyvelo.engine.step import EngineCore
from pyvelo.errors import ConfigError
from pyvelo.kv.pool import BlockTable
from pyvelo.kv.records import Event
from pyvelo.trace.format import Evicted

__all__ = ["CoreObserver"]


class CoreObserver:
    """Observer of the blocks of a core, until `disconnect`. A core has one at most.

    Use it between two steps only, while the core is locked.

    Args:
        record: called with the waiting and the running requests after each `settle`; must not raise.

    Raises:
        ConfigError: the core has an observer.
    """

    def __init__(
        self, core: EngineCore, record: Callable[[Sequence[Request], Sequence[Request]], None]
    ) -> None:
        if core.observer is not None:
            raise ConfigError("this engine is being recorded already: end the other recording first")
        self.core = core
        self._watching = True
        self._others: dict[int, tuple[BlockTable, int]] = {}  # tables of no request, which keep their ids
        self._n_others = 0
        self._published = dict.fromkeys(core.manager.published(), True)
        self._evicted: list[Evicted] = []
        self._next_observer: Callable[[Event], None] | None = core.manager.set_observer(self._observe)
        core.observer = record

    def disconnect(self) -> None:
        """Stop to observe; may be called again."""
        if self._watching:
            self._watching = False
            self.core.observer = None
            self.core.manager.set_observer(self._next_observer)

    def take(self) -> tuple[dict[int, bool], list[Evicted]]:
        """Return what changed since the last call: whether blocks are published, and evictions."""
        found = self._published, self._evicted
        self._published, self._evicted = {}, []
        return found

    def owned(self, requests: Sequence[Request]) -> Iterator[tuple[int, BlockTable]]:
        """Yield the live tables, each with the number of its request; without a request, numbers below 0."""
        numbers = {id(request.sequence.table): request.number for request in requests}
        tables = list(self.core.manager.tables())
        alive = set(map(id, tables))
        self._others = {key: other for key, other in self._others.items() if key in alive}
        for table in tables:
            number = numbers.get(id(table))
            yield self._other(table) if number is None else number, table

    def _other(self, table: BlockTable) -> int:
        if id(table) not in self._others:
            self._n_others += 1
            self._others[id(table)] = table, -self._n_others
        return self._others[id(table)][1]

    def _observe(self, event: Event) -> None:
        if event.kind == "stored":
            self._published[event.block] = True
        elif event.kind in ("evicted", "reset", "duplicate"):
            self._published[event.block] = False
            if event.kind == "evicted":
                self._evicted.append(Evicted(event.block))
        if self._next_observer is not None:
            self._next_observer(event)
