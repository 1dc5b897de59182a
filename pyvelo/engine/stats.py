"""Statistics of an engine: blocks, memory, requests and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyvelo.engine.request import ParentRequest, Request
    from pyvelo.kv.manager import BlockManager
    from pyvelo.memory.budget import Limits, PoolSize
    from pyvelo.native import ContextInfo
    from pyvelo.outputs import FinishReason
    from pyvelo.store.base import StoreTotals

__all__ = ["BlockMeter", "Counters", "EngineStats", "QueueLengths", "picture"]


@dataclass
class Counters:
    """Totals since the engine was opened."""

    steps: int = 0
    prompt_tokens: int = 0  # of prompts that were computed completely
    completion_tokens: int = 0  # generated
    n_ended: int = 0  # requests, for any reason
    stopped: int = 0  # of these, with "stop"
    ran_out: int = 0  # with "length"
    aborted: int = 0
    timed_out: int = 0
    failed: int = 0
    preemptions: int = 0
    swaps: int = 0  # preemptions that swapped out
    evicted_sequences: int = 0  # while they were idle
    schedule_seconds: float = 0.0  # from the start of a step to its forward pass
    run_seconds: float = 0.0  # in forward passes
    sample_seconds: float = 0.0  # from the forward pass to the end of the step

    def ended(self, reason: FinishReason) -> None:
        """Count a request that has ended."""
        self.n_ended += 1
        self.stopped += reason == "stop"
        self.ran_out += reason == "length"
        self.aborted += reason == "abort"
        self.timed_out += reason == "timeout"
        self.failed += reason == "error"


class QueueLengths(NamedTuple):
    """Numbers of requests, and of sequences that hold blocks while nothing runs on them."""

    running: int
    waiting: int
    swapped: int
    idle: int


@dataclass(frozen=True)
class EngineStats:
    """Consistent statistics of an engine between two steps.

    blocks_total = blocks_used + blocks_cached + blocks_free: a used block is in a block table, a cached block
    is only a possible prefix hit, a free block is neither. `waste` is the share of the slots of used blocks
    without a token. Bytes are allocated bytes. Totals count from the opening of the engine. Times are in
    seconds: schedule, forward pass and sampling of all steps.
    """

    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    blocks_reserved: int  # free, but reserved for running sequences
    waste: float
    queried_tokens: int  # prompt tokens of sequences that started
    hit_tokens: int  # queried tokens that were a prefix hit
    loaded_tokens: int  # tokens that were loaded from the KV store into the pool, before they were hits
    host_loaded_tokens: int  # loaded tokens that were in host memory, in front of the store
    saved_blocks: int  # blocks and states that were saved in the KV store
    store_failures: int  # calls of the KV store that failed, and records of it that were damaged
    block_copies: int
    block_evictions: int
    preemptions: int
    swaps: int  # preemptions that swapped out
    swap_blocks_total: int
    swap_blocks_used: int

    block_size: int
    block_bytes: int
    n_groups: int  # of layers, with a block table each
    pool_bytes: int
    state_bytes: int
    compute_bytes: int
    output_bytes: int
    tokens_total: int  # of the longest sequence that the pool can hold
    sequences_total: int  # sequences of n_ctx tokens that fit at once, if they share nothing
    tokens_stored: int

    n_ctx: int
    max_num_seqs: int
    max_batch_tokens: int
    running: int
    waiting: int
    swapped: int  # waiting requests whose blocks are in host memory
    idle: int  # idle sequences of sessions that keep blocks

    steps: int
    prompt_tokens: int
    completion_tokens: int
    requests_finished: int
    requests_aborted: int
    requests_timed_out: int
    requests_failed: int
    schedule_seconds: float
    run_seconds: float
    sample_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds in steps, without waiting for requests."""
        return self.schedule_seconds + self.run_seconds + self.sample_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second of steps; 0 before the first step."""
        return self.completion_tokens / self.step_seconds if self.step_seconds else 0.0


class BlockMeter:
    """Counter of the blocks that requests hold over time, in their parents.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._holding: list[ParentRequest] = []

    def count(self, running: Sequence[Request]) -> None:
        """Add the time since the last call for what was held then; count the blocks of running requests."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        for parent in self._holding:
            parent.block_seconds += parent.n_blocks * seconds
            parent.n_blocks = 0
        for request in running:
            table = request.sequence.table
            request.parent.n_blocks += 0 if table is None else sum(map(len, table.groups))
        self._holding = list({request.parent for request in running})
        for parent in self._holding:
            parent.peak_blocks = max(parent.peak_blocks, parent.n_blocks)


def picture(
    manager: BlockManager,
    counters: Counters,
    queues: QueueLengths,
    limits: Limits,
    info: ContextInfo,
    pool: PoolSize,
    stored: StoreTotals,
) -> EngineStats:
    """Return the numbers of an engine between two steps."""
    slots = manager.n_used * manager.block_size
    return EngineStats(
        blocks_total=manager.n_blocks,
        blocks_used=manager.n_used,
        blocks_cached=manager.n_cached,
        blocks_free=manager.n_free,
        blocks_reserved=manager.n_reserved,
        waste=1.0 - manager.n_stored / slots if slots else 0.0,
        queried_tokens=manager.counts.queried,
        hit_tokens=manager.counts.hits,
        loaded_tokens=stored.loaded_tokens,
        host_loaded_tokens=stored.host_tokens,
        saved_blocks=stored.saved_blocks,
        store_failures=stored.failures,
        block_copies=manager.counts.copies,
        block_evictions=manager.counts.evictions,
        preemptions=counters.preemptions,
        swaps=counters.swaps,
        swap_blocks_total=manager.swap.n_blocks,
        swap_blocks_used=manager.swap.n_blocks - manager.swap.n_free,
        block_size=info.block_size,
        block_bytes=info.block_bytes,
        n_groups=info.n_groups,
        pool_bytes=info.pool_bytes,
        state_bytes=info.state_bytes,
        compute_bytes=info.compute_bytes,
        output_bytes=info.output_bytes,
        tokens_total=pool.n_tokens,
        sequences_total=pool.n_sequences,
        tokens_stored=manager.n_stored,
        n_ctx=pool.n_ctx,
        max_num_seqs=limits.max_seqs,
        max_batch_tokens=limits.max_batch_tokens,
        running=queues.running,
        waiting=queues.waiting,
        swapped=queues.swapped,
        idle=queues.idle,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        completion_tokens=counters.completion_tokens,
        requests_finished=counters.stopped + counters.ran_out,
        requests_aborted=counters.aborted,
        requests_timed_out=counters.timed_out,
        requests_failed=counters.failed,
        schedule_seconds=counters.schedule_seconds,
        run_seconds=counters.run_seconds,
        sample_seconds=counters.sample_seconds,
    )
