"""Reports of a replica: which prefixes its pool holds, and how much it has to do."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from pyvelo.cluster.forwarded import Forwarded
from pyvelo.cluster.policy import Report, short
from pyvelo.kv.adopt import AdoptingManager
from pyvelo.server.serving import Serving
from pyvelo.threads import in_thread

__all__ = ["MAX_HELD", "Reporter"]

MAX_HELD = 4096
"""Prefixes in a report, of 8 bytes each."""


class Reporter:
    """Maker of reports for one server. It belongs to the event loop.

    A report has the prefixes that requests asked for most recently, as far as the pool still holds them, and
    then the newest ones of the pool.
    """

    def __init__(self, serving: Serving, most: int = MAX_HELD) -> None:
        self._serving, self._most = serving, most
        self._asked: OrderedDict[bytes, None] = OrderedDict()
        self._of_routers: Counter[str] = Counter()

    @contextmanager
    def answering(self, request: Forwarded) -> Iterator[None]:
        """Note the block hashes of a request, and count it within a block."""
        for name in request.hashes:
            self._asked[name] = None
            self._asked.move_to_end(name)
        while len(self._asked) > self._most:
            self._asked.popitem(last=False)
        self._of_routers[request.router] += 1
        try:
            yield
        finally:
            self._of_routers[request.router] -= 1
            if not self._of_routers[request.router]:
                del self._of_routers[request.router]

    async def report(self) -> dict[str, Any]:
        """Return the values of a `Report`; wait for the end of the step in progress."""
        held = await in_thread(self._held)
        serving, stats = self._serving, self._serving.stats
        report = Report(
            held=frozenset(map(short, held)),
            n_open=len(serving.admission),
            n_running=0 if stats is None else stats.running,
            queued_tokens=serving.admission.queued_tokens(),
            free_blocks=0 if stats is None else stats.blocks_free,
        )
        return report.packed(self._of_routers)

    def _held(self) -> list[bytes]:
        if not self._serving.generates:
            return []
        wanted = list(reversed(self._asked))
        with self._serving.engine.loop.visit() as core:
            return cast(AdoptingManager, core.manager).held_hashes(wanted, self._most)
