"""Block map for viewers: snapshots of an engine between two steps, and the rows that they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pyvelo.engine.request import ParentRequest, Request, RequestStatus
from pyvelo.engine.request import Sequence as TokenSequence
from pyvelo.kv.pool import BlockTable
from pyvelo.server.auth import ANYBODY, Tenant
from pyvelo.trace.observer import CoreObserver

__all__ = [
    "STATES",
    "BlockView",
    "RequestRow",
    "Snapshot",
    "TableCopy",
    "changed_rows",
    "collect",
    "shown",
]

STATES = ("free", "used", "shared", "cached")
"""States of a block. A shared block is in two tables or more, a cached one in none."""
FREE, USED, SHARED, CACHED = range(4)


class TableCopy(NamedTuple):
    """Copy of a block table: number of the first block, and the blocks, of each group of layers.

    state: blocks of a recurrent state.
    """

    groups: tuple[tuple[int, list[int]], ...]
    n_tokens: int
    state: tuple[int, ...] = ()

    @property
    def n_blocks(self) -> int:
        """Blocks that it holds."""
        return sum(len(blocks) for _, blocks in self.groups) + len(self.state)


class RequestRow(NamedTuple):
    """State of a request or of an idle session.

    key: number of the request, below 0 for an idle session; rows of blocks name their owners by it.
    sequence, parent: they tell the tenant, and are not sent.
    state: waiting, swapped, prefill, decode or idle.
    """

    key: int
    id: str
    sequence: TokenSequence
    parent: ParentRequest | None
    state: str
    n_tokens: int
    n_blocks: int
    n_prompt: int
    n_cached: int
    n_new: int
    tenant: Tenant | None = None


class Snapshot(NamedTuple):
    """State between two steps, as plain data.

    tables: by owner.
    published: blocks that changed since the last snapshot, and whether each is a possible prefix hit.
    reserved: blocks that are free or cached, but reserved for running requests.
    swapped: blocks of host memory that are used.
    """

    tables: dict[int, TableCopy]
    published: dict[int, bool]
    requests: list[RequestRow]
    reserved: int
    swapped: int


def collect(observer: CoreObserver, waiting: Sequence[Request], running: Sequence[Request]) -> Snapshot:
    """Return a snapshot; call it between two steps, while the core is locked."""
    core = observer.core
    published, _ = observer.take()
    owned = list(observer.owned([*running, *waiting]))  # a session that waits may keep its blocks
    others = {id(table): key for key, table in owned if key < 0}
    requests = [
        _request_row(request) for first in (*running, *waiting) for request in (first, *first.followers)
    ]
    requests += [
        _idle_row(sequence, others[id(sequence.table)])
        for sequence in core.idle
        if id(sequence.table) in others
    ]
    return Snapshot(
        {key: _copy(table) for key, table in owned},
        published,
        requests,
        core.manager.n_reserved,
        core.manager.swap.n_blocks - core.manager.swap.n_free,
    )


def _copy(table: BlockTable) -> TableCopy:
    groups = tuple((first, list(blocks)) for first, blocks in zip(table.firsts, table.groups, strict=True))
    return TableCopy(groups, table.n_tokens, table.snapshot)


def _request_row(request: Request) -> RequestRow:
    sequence, runs = request.sequence, request.status is RequestStatus.RUNNING
    if not runs:
        state = "waiting" if sequence.swapped is None else "swapped"
    else:
        computed = request.n_generated and request.n_computed >= len(request.tokens) - 1
        state = "decode" if computed else "prefill"
    return RequestRow(
        *(request.number, request.parent.request_id, sequence, request.parent, state),
        n_tokens=len(request.tokens),
        n_blocks=0 if sequence.table is None else len(sequence.table.held),
        n_prompt=request.n_prompt,
        n_cached=request.n_cached or 0,
        n_new=request.n_generated,
    )


def _idle_row(sequence: TokenSequence, key: int) -> RequestRow:
    parent = None if sequence.request is None else sequence.request.parent
    name = "session" if parent is None else parent.request_id
    n_blocks = 0 if sequence.table is None else len(sequence.table.held)
    return RequestRow(key, name, sequence, parent, "idle", len(sequence.tokens), n_blocks, 0, 0, 0)


class BlockView:
    """Owners, tokens and state of every block, brought up to date with each snapshot.

    counts: blocks in each of STATES.
    """

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.counts = [n_blocks, 0, 0, 0]
        self._size = block_size
        self._tables: dict[int, TableCopy] = {}
        self._held: list[dict[int, int]] = [{} for _ in range(n_blocks)]  # tokens by owner
        self._published: set[int] = set()
        self._states = bytearray(n_blocks)

    def apply(self, snapshot: Snapshot) -> list[int]:
        """Take a later snapshot; return the blocks that changed."""
        changed: set[int] = set()
        for key in self._tables.keys() - snapshot.tables.keys():
            self._replace(key, self._tables[key], TableCopy((), 0), changed)
        for key, table in snapshot.tables.items():
            before = self._tables.get(key)
            if before != table:
                self._replace(key, before or TableCopy((), 0), table, changed)
        self._tables = snapshot.tables
        for block, hit in snapshot.published.items():
            changed.add(block)
            (self._published.add if hit else self._published.discard)(block)
        for block in changed:
            state = self._state(block)
            self.counts[self._states[block]] -= 1
            self.counts[state] += 1
            self._states[block] = state
        return sorted(changed)

    def row(self, block: int) -> list[int]:
        """Return block, state, references, tokens, and the keys of the owners."""
        held, state = self._held[block], self._states[block]
        n_tokens = self._size if state == CACHED else max(held.values(), default=0)
        return [block, state, len(held), n_tokens, *held]

    def rows(self) -> list[list[int]]:
        """Return the rows of all blocks that are not free."""
        return [self.row(block) for block, state in enumerate(self._states) if state != FREE]

    def _state(self, block: int) -> int:
        n = len(self._held[block])
        if n:
            return USED if n == 1 else SHARED
        return CACHED if block in self._published else FREE

    def _replace(self, key: int, before: TableCopy, after: TableCopy, changed: set[int]) -> None:
        """Take the blocks of an owner whose table changed; what stayed the same at its start is skipped."""
        old, new = list(self._tails(before, after)), list(self._tails(after, before))
        for block, _ in old:
            self._held[block].pop(key, None)
            changed.add(block)
        for block, n_tokens in new:
            self._held[block][key] = n_tokens
            changed.add(block)

    def _tails(self, table: TableCopy, other: TableCopy) -> Iterator[tuple[int, int]]:
        """Yield each block with its tokens, from the first difference to another table on."""
        size, n_tokens = self._size, table.n_tokens
        for number, (first, blocks) in enumerate(table.groups):
            start = 0
            if len(other.groups) > number and other.groups[number][0] == first:
                full = min(n_tokens, other.n_tokens) // size - first
                start = max(0, min(full, _common(blocks, other.groups[number][1])))
            for index in range(start, len(blocks)):
                yield blocks[index], max(0, min(size, n_tokens - (first + index) * size))
        for block in table.state:
            yield block, 0


def _common(blocks: Sequence[int], others: Sequence[int]) -> int:
    """Return how many blocks at the start of both are equal."""
    n = min(len(blocks), len(others))
    if blocks[:n] == others[:n]:
        return n
    return next(i for i in range(n) if blocks[i] != others[i])


def changed_rows(
    before: dict[int, RequestRow], after: Iterable[RequestRow]
) -> tuple[list[RequestRow], list[int], dict[int, RequestRow]]:
    """Return the rows that are new or changed, the keys that are gone, and all rows by key."""
    now = {row.key: row for row in after}
    return (
        [row for key, row in now.items() if before.get(key) != row],
        [key for key in before if key not in now],
        now,
    )


def shown(row: RequestRow, viewer: Tenant) -> dict[str, Any]:
    """Return a row as a viewer sees it: rows of other tenants have no names."""
    own = viewer is ANYBODY or row.tenant is viewer
    return {
        "key": row.key,
        "id": row.id if own else "other",
        "tenant": viewer.name if own else "other",
        "state": row.state,
        "tokens": row.n_tokens,
        "blocks": row.n_blocks,
        "prompt": row.n_prompt if own else 0,
        "cached": row.n_cached if own else 0,
        "new": row.n_new if own else 0,
    }
