"""KV blocks that outlive the process: they are loaded before a request arrives, and saved when it has ended.

A request whose prompt may be in the store is held until a thread has read its blocks. The thread puts them
into the pool between two steps, as cached blocks; then the request arrives and finds a prefix hit like any
other. When a request ends, the thread reads its blocks from the pool, between two steps, and saves them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from array import array
from collections import abc, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from pyvelo._version import __version__
from pyvelo.config import EngineConfig, KVStore
from pyvelo.errors import VeloError
from pyvelo.kv.adopt import SNAPSHOT, Part, parts_to_load
from pyvelo.kv.geometry import Geometry
from pyvelo.kv.prefix import ROOT, BlockHashes, BlockLayout
from pyvelo.models.gguf_parts import part_paths, scan_model
from pyvelo.models.hub import locate
from pyvelo.store.fingerprint import file_digest, fingerprint
from pyvelo.store.guard import GuardedStore
from pyvelo.store.opening import cache_folder, open_store
from pyvelo.store.record import Address

__all__ = ["Persistence", "StoreCounts", "open_persistence"]

_log = logging.getLogger("pyvelo")

# of the engine, which imports this file
Request = Any
EngineLoop = Any
EngineCore = Any
Context = Any

PAYLOAD = 1  # version of the bytes that `Context.read_blocks` returns
LONG_ROPE = "rope.scaling.original_context_length"  # such models have other factors in a longer context
AT_ONCE = 8  # blocks that are put into the pool between two steps
SAVED_AT_ONCE = 2  # blocks that are read between two steps
MOST_ENDED = 256  # ended requests whose blocks are to be saved; the oldest are dropped
MOST_HELD = 5.0  # seconds of a load whose worth is unknown
CLOSING = 5.0  # seconds that saving may take when an engine is closed
LOOK_AGAIN = 0.005  # seconds
SHARE = 0.02  # of the time that saving may take while requests run
REMEMBERED = 1 << 16  # records that are known to be stored
WEIGHT = 0.2  # of the newest measurement


@dataclass
class StoreCounts:
    """Totals: tokens of prompts that were loaded, and seconds for which requests were held."""

    tokens_loaded: int = 0
    seconds_held: float = 0.0


class _End(NamedTuple):
    hashes: BlockHashes
    n_blocks: int


class Persistence:
    """Place between the callers of a loop and its core that holds requests while their blocks are loaded.

    Args:
        store: becomes this object's own.
        fingerprint: of the model and the settings, 32 bytes; computed in the thread.
        min_blocks: of a sequence that is saved, though nothing of it was a hit.
        clock: seconds.
    """

    def __init__(
        self,
        loop: EngineLoop,
        core: EngineCore,
        context: Context,
        store: GuardedStore,
        fingerprint: Callable[[], bytes],
        min_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.counts = store, StoreCounts()
        self._loop, self._core, self._context = loop, core, context
        self._layout: BlockLayout = core.manager.layout
        self._block_bytes = context.info.block_bytes
        self._clock, self._min_blocks = clock, min_blocks
        self._fingerprint: bytes | None = None
        self._held: deque[list[Request]] = deque()
        self._ended: deque[_End] = deque(maxlen=MOST_ENDED)
        self._known: dict[bytes, None] = {}  # keys of stored records, the oldest first
        self._per_record = 0.0  # seconds to load one
        self._closing = self._busy = False
        self._stopped = threading.Event()
        self.wake: SimpleQueue[bool] = SimpleQueue()
        """True: there is something to do; False: end. A put is a call of C, for finalizers."""
        target = (weakref.ref(self), store, self.wake, self._stopped, fingerprint)
        self._thread = threading.Thread(target=_run, args=target, name="pyvelo-persistence", daemon=True)
        self._thread.start()

    # ---- for the loop, which holds its lock ----

    def submit(self, requests: abc.Sequence[Request]) -> None:
        """Submit requests, at once or when their blocks are loaded."""
        for request in requests:
            request.on_end = _both(self._note_end, request.on_end)
        inbox = self._core.inbox
        if self._fingerprint is None or self._closing or not any(map(self._may_load, requests)):
            inbox.submit(requests)
            return
        inbox.hold(requests)
        self._held.append(list(requests))
        self.wake.put(True)

    def stop(self) -> None:
        """End the thread soon, and let the held requests arrive; may be called again."""
        self._closing = True
        self._stopped.set()
        self.wake.put(False)
        while self._held:
            self._let_arrive(self._held.popleft())

    def close(self, timeout: float = CLOSING) -> None:
        """Save what is still to be saved, for at most `timeout` seconds; then stop."""
        self._closing = True
        self.flush(timeout)
        self.stop()

    def flush(self, timeout: float) -> bool:
        """Wait until the blocks of all ended requests are saved, and return whether they are."""
        deadline = self._clock() + timeout
        while (self._ended or self._busy) and self._thread.is_alive() and not self._stopped.is_set():
            if self._clock() >= deadline or self.store.is_away:
                return False
            self._stopped.wait(LOOK_AGAIN)
        return not self._ended

    @property
    def ready(self) -> bool:
        """Whether the model is identified, so that the store is in use."""
        return self._fingerprint is not None

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens that were loaded, and records that were saved."""
        return self.counts.tokens_loaded, self.store.counts.n_saved

    def _may_load(self, request: Request) -> bool:
        fresh = request.sequence.table is None and request.sequence.swapped is None
        return fresh and self._n_blocks(request) > 0 and not self.store.is_away

    def _n_blocks(self, request: Request) -> int:
        """Return the full blocks of a prompt that can be a hit: its last token is computed."""
        most = len(request.tokens) - 1
        if request.max_cached is not None:
            most = min(most, request.max_cached)
        return most // self._layout.block_size

    def _note_end(self, request: Request) -> None:
        """Note the blocks of a request that has ended, in the thread that steps."""
        n_blocks = request.n_computed // self._layout.block_size
        if n_blocks and (n_blocks >= self._min_blocks or request.n_cached) and not self._stopped.is_set():
            n_tokens = n_blocks * self._layout.block_size
            self._ended.append(
                _End(request.hashes.fork(array("i", request.tokens[:n_tokens]), n_tokens), n_blocks)
            )
            self.wake.put(True)

    # ---- for the thread ----

    def work(self) -> None:
        """Load for the held requests, and save while no request is held."""
        self._busy = True
        try:
            while not self._stopped.is_set() and (self._held or self._ended):
                if self._held:
                    self._load_first()
                else:
                    self._save(self._ended.popleft())
        finally:
            self._busy = False

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Begin to use the store."""
        self._fingerprint = fingerprint

    def _load_first(self) -> None:
        """Load the blocks of the request that is held longest, and let it arrive."""
        try:
            requests = self._held[0]
        except IndexError:  # stopped
            return
        start = self._clock()
        try:
            self._load(requests[0])
        except VeloError:
            pass  # the engine is closed or broken: the request will say so
        except Exception as error:
            _log.warning("blocks were not loaded from %s: %s", self.store.name, error)
        self.counts.seconds_held += self._clock() - start
        with suppress(IndexError):  # `stop` let them all arrive
            self._let_arrive(self._held.popleft())

    def _let_arrive(self, requests: list[Request]) -> None:
        self._loop.submit_held(requests)

    def _load(self, request: Request) -> None:
        n_blocks = self._n_blocks(request)
        size = self._layout.block_size
        hashes = BlockHashes(array("i", request.tokens[: n_blocks * size]), size, request.hashes.extra)
        stored = self._stored_parts(hashes, n_blocks)
        if not stored:
            return
        with self._loop.visit() as core:
            published = core.manager.published_parts(hashes, n_blocks)
            before = core.manager.hit_blocks(hashes, n_blocks)
        parts = parts_to_load(self._layout, published, stored, n_blocks)
        if not parts:
            return
        seconds = core.costs.seconds_for(size * (parts[-1].number + 1 - before)) or MOST_HELD
        if self._per_record * len(parts) >= seconds:
            return
        deadline = self._clock() + seconds
        for first in range(0, len(parts), AT_ONCE):
            if not self._load_some(hashes, parts[first : first + AT_ONCE], deadline):
                break
        with self._loop.visit() as core:
            n_tokens = size * (core.manager.hit_blocks(hashes, n_blocks) - before)
        request.parent.n_loaded += n_tokens
        self.counts.tokens_loaded += n_tokens

    def _load_some(self, hashes: BlockHashes, parts: abc.Sequence[Part], deadline: float) -> bool:
        """Load some parts and put them into the pool; return whether to go on."""
        start, payloads = self._clock(), list[bytes]()
        for part in parts:
            payload = self.store.load(self._address(hashes, part)) if self._clock() < deadline else None
            if payload is None or self._stopped.is_set():
                break
            payloads.append(payload)
        n_wanted, parts = len(parts), parts[: len(payloads)]
        if not parts:
            return False
        per_record = (self._clock() - start) / len(parts)
        self._per_record += (WEIGHT if self._per_record else 1.0) * (per_record - self._per_record)
        data = np.frombuffer(b"".join(payloads), np.uint8).reshape(-1, self._block_bytes)

        def write(blocks: abc.Sequence[int]) -> None:
            self._context.write_blocks(blocks, data[: len(blocks)])

        with self._loop.visit() as core:
            n: int = core.manager.adopt(hashes, parts, write)
        self.store.touch([self._address(hashes, part).name for part in parts[:n]])
        return n == n_wanted

    def _stored_parts(self, hashes: BlockHashes, n_blocks: int) -> set[Part]:
        groups = [*range(self._layout.n_groups), *([SNAPSHOT] if self._layout.state_blocks else [])]
        parts = [Part(number, group) for number in range(n_blocks) for group in groups]
        found = self.store.lookup([self._address(hashes, part).name for part in parts])
        return {part for part, there in zip(parts, found, strict=True) if there}

    def _address(self, hashes: BlockHashes, part: Part) -> Address:
        if self._fingerprint is None:
            raise RuntimeError("the store is not in use yet")
        number, group = part
        return Address(
            self._fingerprint,
            hashes.block_hash(number - 1) if number else ROOT,
            hashes.block_hash(number),
            hashes.extra,
            hashes.block_tokens(number),
            group,
            self._block_bytes * (self._layout.state_blocks if group == SNAPSHOT else 1),
        )

    def _save(self, end: _End) -> None:
        """Save the published blocks of a sequence that are not stored."""
        with suppress(VeloError):  # the engine is closed or broken
            with self._loop.visit() as core:
                published = core.manager.published_parts(end.hashes, end.n_blocks)
            names = {part: self._address(end.hashes, part).name for part in published}
            parts = [part for part, name in names.items() if name.key not in self._known]
            found = self.store.lookup([names[part] for part in parts])
            missing = [part for part, stored in zip(parts, found, strict=True) if not stored]
            for first in range(0, len(missing), SAVED_AT_ONCE):
                if self._stopped.is_set() or self.store.is_away:
                    return
                if self._held:  # they go first
                    self._ended.append(end)
                    return
                self._save_some(end.hashes, missing[first : first + SAVED_AT_ONCE])
            for name in names.values():
                self._remember(name.key)

    def _save_some(self, hashes: BlockHashes, parts: abc.Sequence[Part]) -> None:
        with self._loop.visit() as core:
            start = self._clock()
            published = core.manager.published_parts(hashes, parts[-1].number + 1)
            data = {part: self._context.read_blocks(published[part]) for part in parts if part in published}
        for part, payload in data.items():
            self.store.save(self._address(hashes, part), payload.tobytes())
        if self._core.n_running:  # saving shares the cores with steps
            self._stopped.wait((self._clock() - start) / SHARE)

    def _remember(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]


def _both(
    first: Callable[[Request], None], second: Callable[[Request], None] | None
) -> Callable[[Request], None]:
    def call(request: Request) -> None:
        first(request)
        if second is not None:
            second(request)

    return call


def _run(
    owner: weakref.ref[Persistence],
    store: GuardedStore,
    wake: SimpleQueue[bool],
    stopped: threading.Event,
    fingerprint: Callable[[], bytes],
) -> None:
    """Work when woken, until the end; an engine that is dropped meanwhile is freed."""
    try:
        digest = fingerprint()
    except OSError as error:
        _log.warning("the KV store %s is not used: %s", store.name, error)
        digest = None
    persistence = owner()
    if persistence is not None and digest is not None:
        persistence.set_fingerprint(digest)
    del persistence
    while wake.get() and not stopped.is_set() and (persistence := owner()) is not None:
        persistence.work()
        del persistence
    store.close()


def open_persistence(
    config: EngineConfig,
    loop: EngineLoop,
    core: EngineCore,
    context: Context,
    geometry: Geometry,
    n_ctx: int,
    instructions: str,
) -> Persistence | None:
    """Connect the loop with the store of the settings; None: they have none.

    Args:
        instructions: of the processor, which change the bits of K and V.

    Raises:
        ConfigError: the store's address is wrong, or a package is missing.
    """
    where = config.kv_store
    if not isinstance(where, KVStore):
        return None
    store = open_store(os.fspath(where.where), max_bytes=where.max_bytes, ttl=where.ttl, key=where.key)
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
    paths, memory = part_paths(summary), cache_folder() / "digests.json"

    def compute() -> bytes:
        return fingerprint({**settings, "model": file_digest(paths, memory)})

    persistence = Persistence(loop, core, context, store, compute, where.min_blocks)
    loop.submit_to = persistence.submit
    return persistence
