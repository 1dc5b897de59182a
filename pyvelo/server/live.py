"""Recording of the engine's blocks for all viewers of a server, only while there are some."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvelo.engine.loop import EngineLoop
from pyvelo.engine.request import Request
from pyvelo.engine.step import EngineCore
from pyvelo.errors import ConfigError
from pyvelo.server.auth import Tenant
from pyvelo.server.blocks import STATES, BlockView, RequestRow, Snapshot, changed_rows, collect, shown
from pyvelo.server.errors import HttpError
from pyvelo.server.http import encoded
from pyvelo.server.rates import RateRow, Rates
from pyvelo.threads import in_thread
from pyvelo.trace.observer import CoreObserver

if TYPE_CHECKING:
    from pyvelo.engine.engine import Engine
    from pyvelo.server.admission import Admission

__all__ = ["LiveBlocks", "Recording", "Viewer"]

PERIOD = 0.2
"""Shortest time between two snapshots, in seconds."""
MAX_VIEWERS = 64
MAX_VIEWERS_OF_KEY = 16

Owners = Callable[[], dict[int, tuple[Tenant, str]]]

_log = logging.getLogger("pyvelo.server")


class Viewer:
    """One open stream.

    version: of the recording that it has; n_rates: rows of rates that it has.
    """

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.wake = asyncio.Event()
        self.recording: Recording | None = None
        self.version = -1
        self.n_rates = 0


class LiveBlocks:
    """Viewers of a server and their recording. It belongs to the event loop.

    Args:
        admission: it knows the tenants of requests.
        owners: returns tenant and id of each session, by the identity of its sequence.
        rates: of the last minutes, which viewers get, too.

    recording: None without viewers; when it ends, the streams end.
    """

    def __init__(
        self, engine: Engine, model_name: str, admission: Admission, owners: Owners, rates: Rates
    ) -> None:
        self.ended = False
        self.recording: Recording | None = None
        self._engine, self._model_name = engine, model_name
        self._admission, self._owners, self._rates = admission, owners, rates
        self._viewers: set[Viewer] = set()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def enter(self, tenant: Tenant) -> Viewer:
        """Return a new viewer; the first one starts the recording.

        Raises: HttpError if there are too many, or if the engine is recorded to a file.
        """
        if self.ended:
            raise HttpError(503, "the server ends", code="draining")
        if len(self._viewers) >= MAX_VIEWERS:
            raise HttpError(503, f"{MAX_VIEWERS} viewers are connected", headers={"Retry-After": "10"})
        of_key = sum(viewer.tenant is tenant for viewer in self._viewers)
        if tenant.has_key and of_key >= MAX_VIEWERS_OF_KEY:
            message = f"{MAX_VIEWERS_OF_KEY} viewers of this key are connected"
            raise HttpError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "10"})
        viewer = Viewer(tenant)
        self._viewers.add(viewer)
        try:
            async with self._lock:
                if self.recording is None:
                    self.recording = await self._start()
                    self._task = asyncio.ensure_future(self._run(self.recording))
        except BaseException:
            self._viewers.discard(viewer)
            raise
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer; without viewers the recording ends soon."""
        self._viewers.discard(viewer)

    def end(self) -> None:
        """End all streams and take no new ones."""
        self.ended = True
        if self.recording is not None:
            self.recording.ended = True
        self.recording = None
        self.wake()

    def wake(self) -> None:
        """Let each viewer look for news."""
        for viewer in self._viewers:
            viewer.wake.set()

    def header(self, tenant: Tenant) -> bytes:
        """Return the first event, with what does not change."""
        manager, info = self._engine.core.manager, self._engine.context.info
        fixed = {
            "version": 1,
            "model": self._model_name,
            "tenant": tenant.name,
            "blocks": manager.n_blocks,
            "block_size": manager.block_size,
            "block_bytes": info.block_bytes,
            "groups": info.n_groups,
            "n_ctx": self._engine.n_ctx,
            "swap_blocks": manager.swap.n_blocks,
            "states": STATES,
            "rates": RateRow._fields,
        }
        return _event("header", fixed)

    def news(self, viewer: Viewer) -> bytes:
        """Return the events that a viewer has not got: changes, or a snapshot if it has missed some."""
        found, recording, rates = [], self.recording, self._rates
        if recording is not None and recording.version:
            if viewer.recording is not recording or viewer.version < recording.version - 1:
                found.append(recording.whole(viewer.tenant))
            elif viewer.version < recording.version:
                found.append(recording.changes(viewer.tenant))
            viewer.recording, viewer.version = recording, recording.version
        if viewer.n_rates < rates.n_rows:
            found.append(_event("rates", {"n": rates.n_rows, "rows": rates.since(viewer.n_rates)}))
            viewer.n_rates = rates.n_rows
        return b"".join(found)

    async def _start(self) -> Recording:
        loop = asyncio.get_running_loop()
        engine = self._engine

        def deliver(recording: Recording, snapshot: Snapshot) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._take, recording, snapshot)

        def start() -> Recording:
            with engine.loop.visit() as core:
                engine.loop.check_open()
                return Recording(core, deliver)

        try:
            return await in_thread(start)
        except ConfigError as error:
            raise HttpError(409, str(error)) from None

    def _take(self, recording: Recording, snapshot: Snapshot) -> None:
        if recording.ended:
            return
        owners = self._owners()
        rows = [self._named(row, owners.get(id(row.sequence))) for row in snapshot.requests]
        recording.take(snapshot._replace(requests=rows))
        if any(row.state == "idle" and row.tenant is None for row in rows):
            recording.dirty = True  # a session gets its name after its blocks
        self.wake()

    def _named(self, row: RequestRow, session: tuple[Tenant, str] | None) -> RequestRow:
        """Return a row with its tenant, and with the name of its session."""
        if session is None:
            return row._replace(tenant=self._admission.tenant_of(row.parent))
        tenant, name = session
        return row._replace(tenant=tenant, id=name if row.state == "idle" else row.id)

    async def _run(self, recording: Recording) -> None:
        """Take the last changes when the engine is idle; end the recording without viewers."""
        engine, rates = self._engine, self._rates
        n_rates = 0
        try:
            while await self._is_wanted(recording):
                await asyncio.sleep(PERIOD)
                if recording.dirty and not engine.core.has_work:
                    await in_thread(partial(recording.flush, engine.loop))
                if n_rates != rates.n_rows:
                    n_rates = rates.n_rows
                    self.wake()
        finally:
            recording.ended = True
            self.recording = None
            self.wake()
        await in_thread(partial(recording.flush, engine.loop))

    async def _is_wanted(self, recording: Recording) -> bool:
        async with self._lock:
            if self._viewers and not recording.ended:
                return True
            self.recording = None
            return False


class Recording:
    """Block map of a core. The core calls it between two steps, at most once a PERIOD.

    The event loop calls `take`, `whole` and `changes`, a thread `flush`.

    version: number of snapshots taken.
    dirty: something may have changed since the last snapshot.
    ended: the core drops it after its next step.
    """

    def __init__(self, core: EngineCore, deliver: Callable[[Recording, Snapshot], None]) -> None:
        core.settle()  # disconnects a recording that has ended
        self.version = 0
        self.dirty = self.ended = False
        self._core = core
        self._deliver = deliver
        self._due, self._flushing = -1.0, False
        self._stamp = (0, 0, 0)
        self._view = BlockView(core.manager.n_blocks, core.manager.block_size)
        self._requests: dict[int, RequestRow] = {}
        self._blocks: list[int] = []
        self._state: dict[str, Any] = {}
        self._changed: tuple[list[RequestRow], list[int]] = ([], [])
        self._encoded: dict[tuple[str, Tenant | None], bytes] = {}
        self._observer = CoreObserver(core, self._record)
        core.settle()

    # ---- in the thread that has locked the core ----

    def _record(self, waiting: Sequence[Request], running: Sequence[Request]) -> None:
        if self.ended:
            self._observer.disconnect()
            return
        core = self._core
        stamp = (core.counters.steps, core.counters.n_ended, core.inbox.n_arrived)
        now = core.clock()
        if now < self._due:
            self.dirty = not self._flushing or stamp != self._stamp
            return
        try:
            snapshot = collect(self._observer, waiting, running)
        except Exception:
            _log.exception("the block map cannot be recorded")
            self.ended = True
            self._observer.disconnect()
            return
        self._due, self._stamp, self.dirty = now + PERIOD, stamp, False
        self._deliver(self, snapshot)

    def flush(self, loop: EngineLoop) -> None:
        """Take a snapshot now, or disconnect if the recording has ended; wait for the step in progress."""
        self._due, self._flushing = -1.0, True
        try:
            with loop.visit():
                pass
        finally:
            self._flushing = False

    # ---- in the event loop ----

    def take(self, snapshot: Snapshot) -> None:
        """Take a snapshot from the core; one that is the same as the last changes nothing."""
        blocks = self._view.apply(snapshot)
        changed, gone, self._requests = changed_rows(self._requests, snapshot.requests)
        state = {
            "counts": dict(zip(STATES, self._view.counts, strict=True)),
            "reserved": snapshot.reserved,
            "swapped": snapshot.swapped,
        }
        if self.version and not (blocks or changed or gone) and state == self._state:
            return
        self.version += 1
        self._blocks, self._changed, self._state, self._encoded = blocks, (changed, gone), state, {}

    def whole(self, tenant: Tenant) -> bytes:
        """Return events with all blocks and all requests."""
        if ("snapshot", None) not in self._encoded:
            data = _event("snapshot", {"n": self.version, **self._state, "blocks": self._view.rows()})
            self._encoded["snapshot", None] = data
        if ("snapshot", tenant) not in self._encoded:
            rows = [shown(row, tenant) for row in self._requests.values()]
            self._encoded["snapshot", tenant] = _event("requests", {"all": True, "rows": rows, "gone": []})
        return self._encoded["snapshot", None] + self._encoded["snapshot", tenant]

    def changes(self, tenant: Tenant) -> bytes:
        """Return events with the blocks and requests that the last snapshot has changed."""
        if ("delta", None) not in self._encoded:
            blocks = [self._view.row(block) for block in self._blocks]
            data = {"n": self.version, **self._state, "blocks": blocks}
            self._encoded["delta", None] = _event("delta", data)
        if ("delta", tenant) not in self._encoded:
            changed, gone = self._changed
            rows = [shown(row, tenant) for row in changed]
            known = {"all": False, "rows": rows, "gone": gone}
            self._encoded["delta", tenant] = _event("requests", known) if changed or gone else b""
        return self._encoded["delta", None] + self._encoded["delta", tenant]


def _event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encoded(data))
