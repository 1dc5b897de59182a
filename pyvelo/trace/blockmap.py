"""Block map of a recorded run, rebuilt step by step, and summaries over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from pyvelo.errors import TraceError
from pyvelo.trace.format import Arrived, Evicted, Finished, Preempted, Trace, TraceHeader, TraceStep

__all__ = ["BlockMap", "Moment", "RunSummary", "moments", "replay", "summarize"]


@dataclass
class TableView:
    """Blocks of an owner in position order, and the tokens that they store."""

    blocks: list[int]
    n_tokens: int


class BlockMap:
    """Map of all blocks and tables. `apply` advances it to the next step of the trace.

    A block is used if a table refers to it, cached if it is published but not used, and otherwise free.
    """

    def __init__(self, header: TraceHeader, path: str = "trace") -> None:
        self.header = header
        self.time = 0.0
        self.tables: dict[int, TableView] = {}
        self.swapped: dict[int, tuple[int, ...]] = {}  # blocks of host memory
        self.published: set[int] = set()
        self.references = [0] * header.n_blocks
        self.n_used = 0
        self.n_shared = 0  # blocks with two references or more
        self.n_cached = 0
        self._path = path
        self._line = 1

    @property
    def n_free(self) -> int:
        """Blocks that are neither used nor cached."""
        return self.header.n_blocks - self.n_used - self.n_cached

    @property
    def n_swapped(self) -> int:
        """Blocks of host memory that are held."""
        return sum(map(len, self.swapped.values()))

    @property
    def n_stored(self) -> int:
        """Tokens in used blocks. Tokens in shared blocks count once."""
        size = self.header.block_size
        unused: dict[int, int] = {}
        for table in self.tables.values():
            first = table.n_tokens // size
            for index, block in enumerate(table.blocks[first:], first):
                empty = min(size, (index + 1) * size - table.n_tokens)
                unused[block] = min(empty, unused.get(block, size))
        return self.n_used * size - sum(unused.values())

    def cached(self) -> set[int]:
        """Return the cached blocks."""
        return {block for block in self.published if not self.references[block]}

    def apply(self, step: TraceStep) -> None:
        """Apply the changes of a step. Raise TraceError, with its line, if they do not fit the map."""
        self._line, self.time = step.line, step.time
        self._check(step.published + step.unpublished, self.header.n_blocks)
        for owner in step.freed:
            self._refer(self._table(owner).blocks, -1)
            del self.tables[owner]
        for owner, n_unchanged, blocks, n_tokens in step.tables:
            self._check(blocks, self.header.n_blocks)
            table = self.tables.setdefault(owner, TableView([], 0))
            if n_unchanged > len(table.blocks):
                raise self._error(f"owner {owner} has {len(table.blocks)} blocks, not {n_unchanged}")
            self._refer(table.blocks[n_unchanged:], -1)
            self._refer(blocks, 1)
            table.blocks[n_unchanged:] = blocks
            self._store(owner, table, n_tokens)
        for owner, n_tokens in step.tokens:
            # the first line of a table without blocks
            table = self._table(owner) if n_tokens else self.tables.setdefault(owner, TableView([], 0))
            self._store(owner, table, n_tokens)
        self._publish(step)
        for owner, blocks in step.swapped:
            self._check(blocks, self.header.n_swap_blocks)
            if blocks:
                self.swapped[owner] = blocks
            elif self.swapped.pop(owner, None) is None:
                raise self._error(f"owner {owner} has nothing in host memory")

    def _publish(self, step: TraceStep) -> None:
        for block in step.unpublished:
            if block not in self.published:
                raise self._error(f"block {block} is unpublished, but was not published")
            self.published.remove(block)
            self.n_cached -= not self.references[block]
        for block in step.published:
            if block in self.published:
                raise self._error(f"block {block} is published already")
            self.published.add(block)
            self.n_cached += not self.references[block]

    def _table(self, owner: int) -> TableView:
        table = self.tables.get(owner)
        if table is None:
            raise self._error(f"owner {owner} has no blocks")
        return table

    def _store(self, owner: int, table: TableView, n_tokens: int) -> None:
        if n_tokens > len(table.blocks) * self.header.block_size:
            raise self._error(f"owner {owner} stores {n_tokens} tokens in {len(table.blocks)} blocks")
        table.n_tokens = n_tokens

    def _refer(self, blocks: Iterable[int], change: int) -> None:
        for block in blocks:
            before = self.references[block]
            now = self.references[block] = before + change
            self.n_used += (now > 0) - (before > 0)
            self.n_shared += (now > 1) - (before > 1)
            if block in self.published:
                self.n_cached -= (now > 0) - (before > 0)

    def _check(self, blocks: Iterable[int], n_blocks: int) -> None:
        wrong = next((block for block in blocks if block >= n_blocks), None)
        if wrong is not None:
            raise self._error(f"block {wrong} of {n_blocks} does not exist")

    def _error(self, message: str) -> TraceError:
        return TraceError(f"{self._path}, line {self._line}: {message}")


def replay(trace: Trace) -> Iterator[tuple[TraceStep, BlockMap]]:
    """Yield every step with the block map after it. The map is one object, which changes."""
    blocks = BlockMap(trace.header, trace.path)
    for step in trace.steps:
        blocks.apply(step)
        yield step, blocks


# ---- over time ----


@dataclass(frozen=True)
class Moment:
    """Block map in numbers, until the next moment. Units are blocks, except for tokens and slots.

    `tokens_held` counts the tokens of every running sequence, `tokens_stored` counts shared tokens once.
    `reserved_ctx` and `reserved_max` are the slots that the same running sequences would hold if each had
    contiguous memory for n_ctx tokens, or for its prompt and its longest output.
    """

    time: float
    running: int
    used: int
    shared: int
    cached: int
    free: int
    swapped: int
    unshared: int  # blocks, if nothing were shared
    tokens_held: int
    tokens_stored: int
    reserved_ctx: int
    reserved_max: int


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run. Units are blocks unless noted, shares are from 0 to 1, means are over time.

    `waste_*` is the share of the allocated slots without a token: of pages, and of contiguous memory for the
    same running sequences (see Moment). `saved_by_sharing` is the share of blocks that sharing saved.
    """

    seconds: float
    steps: int
    requests: int
    finished: int
    blocks_total: int
    block_size: int  # tokens
    block_bytes: int
    peak_running: int
    peak_used: int
    mean_used: float
    peak_shared: int
    peak_swapped: int
    evictions: int
    preemptions: int
    swaps: int
    waste_paged: float
    waste_reserved_ctx: float
    waste_reserved_max: float
    peak_reserved_ctx: int  # slots
    peak_reserved_max: int  # slots
    saved_by_sharing: float


def moments(trace: Trace) -> Iterator[Moment]:
    """Yield a Moment for each step of the run. Raise TraceError as `BlockMap.apply` does."""
    longest: dict[int, int] = {}
    for step, blocks in replay(trace):
        for event in step.events:
            if isinstance(event, Arrived):
                longest[event.owner] = min(trace.header.n_ctx, event.n_prompt + event.max_new)
        yield _moment(blocks, longest)


def _moment(blocks: BlockMap, longest: dict[int, int]) -> Moment:
    header, tables = blocks.header, blocks.tables
    return Moment(
        time=blocks.time,
        running=len(tables),
        used=blocks.n_used,
        shared=blocks.n_shared,
        cached=blocks.n_cached,
        free=blocks.n_free,
        swapped=blocks.n_swapped,
        unshared=sum(len(table.blocks) for table in tables.values()),
        tokens_held=sum(table.n_tokens for table in tables.values()),
        tokens_stored=blocks.n_stored,
        reserved_ctx=len(tables) * header.n_ctx,
        reserved_max=sum(longest.get(owner, header.n_ctx) for owner in tables),
    )


def summarize(trace: Trace) -> RunSummary:
    """Return the summary of the whole run. Raise TraceError as `BlockMap.apply` does."""
    run = list(moments(trace))
    events = [event for step in trace.steps for event in step.events]
    preemptions = [event for event in events if isinstance(event, Preempted)]
    seconds = run[-1].time - run[0].time if run else 0.0
    lasts = [(now, then.time - now.time) for now, then in pairwise(run)]

    def over_time(name: str) -> float:
        return float(sum(getattr(moment, name) * length for moment, length in lasts))

    def waste(held: float, slots: float) -> float:
        return 1.0 - held / slots if slots else 0.0

    def peak(name: str) -> int:
        return max((getattr(moment, name) for moment in run), default=0)

    return RunSummary(
        seconds=seconds,
        steps=len(run),
        requests=sum(isinstance(event, Arrived) for event in events),
        finished=sum(isinstance(event, Finished) for event in events),
        blocks_total=trace.header.n_blocks,
        block_size=trace.header.block_size,
        block_bytes=trace.header.block_bytes,
        peak_running=peak("running"),
        peak_used=peak("used"),
        mean_used=over_time("used") / seconds if seconds else 0.0,
        peak_shared=peak("shared"),
        peak_swapped=peak("swapped"),
        evictions=sum(isinstance(event, Evicted) for event in events),
        preemptions=len(preemptions),
        swaps=sum(event.swapped for event in preemptions),
        waste_paged=waste(over_time("tokens_stored"), over_time("used") * trace.header.block_size),
        waste_reserved_ctx=waste(over_time("tokens_held"), over_time("reserved_ctx")),
        waste_reserved_max=waste(over_time("tokens_held"), over_time("reserved_max")),
        peak_reserved_ctx=peak("reserved_ctx"),
        peak_reserved_max=peak("reserved_max"),
        saved_by_sharing=waste(over_time("used"), over_time("unshared")),
    )
