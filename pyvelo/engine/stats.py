"""What an engine has, holds and has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyvelo.engine.queues import Counters
    from pyvelo.kv.manager import BlockManager
    from pyvelo.memory.budget import Limits, PoolSize
    from pyvelo.native import ContextInfo

__all__ = ["EngineStats", "QueueLengths", "picture"]


class QueueLengths(NamedTuple):
    """Numbers of requests, and of sequences that hold blocks while nothing runs on them."""

    running: int
    waiting: int
    swapped: int
    idle: int


@dataclass(frozen=True)
class EngineStats:
    """A consistent picture of an engine between two steps.

    blocks_total = blocks_used + blocks_cached + blocks_free: used is referred to by a sequence that runs,
    cached is not but would still be a hit, free is neither. `waste` is the share of the slots of used blocks
    that hold no token. Bytes are those that were allocated. Times are in seconds, totals since the engine was
    made: of a step, up to its forward pass, the pass, and what becomes of its tokens.
    """

    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    blocks_reserved: int  # free, but reserved for running sequences
    waste: float
    queried_tokens: int  # of sequences that started
    hit_tokens: int  # of those, what was there already
    block_copies: int
    block_evictions: int
    preemptions: int
    swaps: int  # of those, to host memory
    swap_blocks_total: int
    swap_blocks_used: int

    block_size: int
    block_bytes: int
    pool_bytes: int
    state_bytes: int
    compute_bytes: int
    output_bytes: int
    tokens_total: int  # that the pool holds
    sequences_total: int  # of n_ctx tokens each that it holds at once, where they share nothing
    tokens_stored: int

    n_ctx: int
    max_num_seqs: int
    max_batch_tokens: int
    running: int
    waiting: int
    swapped: int  # of those that wait, whose K and V are in host memory
    idle: int  # sequences of sessions that hold blocks while nothing runs on them

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
        """In steps, the waiting for requests left out."""
        return self.schedule_seconds + self.run_seconds + self.sample_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated in a second of steps, on average; 0 before the first."""
        return self.completion_tokens / self.step_seconds if self.step_seconds else 0.0


def picture(
    manager: BlockManager,
    counters: Counters,
    queues: QueueLengths,
    limits: Limits,
    info: ContextInfo,
    pool: PoolSize,
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
        block_copies=manager.counts.copies,
        block_evictions=manager.counts.evictions,
        preemptions=counters.preemptions,
        swaps=counters.swaps,
        swap_blocks_total=manager.swap.n_blocks,
        swap_blocks_used=manager.swap.n_blocks - manager.swap.n_free,
        block_size=info.block_size,
        block_bytes=info.block_bytes,
        pool_bytes=info.pool_bytes,
        state_bytes=info.state_bytes,
        compute_bytes=info.compute_bytes,
        output_bytes=info.output_bytes,
        tokens_total=manager.n_blocks * manager.block_size,
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
