"""Simulated engine: the real step loop, scheduler and block manager on a simulated clock, without a model.

Only the forward pass is simulated: `StepCosts` gives its time, the workload gives its tokens. So blocks,
sharing, preemption and the order of requests come from the engine itself.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pyvelo.engine.prefill_budget import Costs
from pyvelo.engine.request import Detokenizer, Request
from pyvelo.engine.request import Sequence as RequestSequence
from pyvelo.engine.step import EngineCore
from pyvelo.errors import ConfigError, InternalError
from pyvelo.kv.adopt import AdoptingManager, AdoptingStates
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.prefix import FULL, BlockLayout, Window
from pyvelo.memory.budget import Limits
from pyvelo.sampling import SamplingParams
from pyvelo.simulate.metrics import Meter, Outcome
from pyvelo.simulate.workload import END, Job, Texts
from pyvelo.trace.recorder import Tracer

__all__ = ["POLICIES", "Clock", "Setup", "SimulatedEngine", "StepCosts", "simulate"]

MOST_BLOCKS = 1 << 24
MOST_BATCH = 1 << 20  # tokens
MOST_ENTRIES = 1 << 28  # of block tables

POLICIES = ("auto", "swap", "recompute")
"""Policies for preempted sequences: the cheaper one, swap out if host memory has room, always recompute."""


@dataclass(frozen=True)
class StepCosts:
    """Costs of the parts of a step, in seconds.

    The defaults are fitted to docs/PERFORMANCE.md, Qwen3-0.6B's shape over f16 pages on two cores: `step` and
    `decode` to decode of 1 to 16 sequences of 32 tokens, `decode_read` to the slope over the context,
    `prompt` and `prompt_read` to prefill at 0 and 4096 tokens, and `masked` to stock's unified buffer with 16
    sequences of 1024. `move` is the speed of copying memory on such a machine.
    """

    step: float = 0.015
    prompt: float = 0.75e-3  # a prompt token
    decode: float = 1.5e-3  # a decoded token
    prompt_read: float = 0.52e-6  # for a prompt token, each token before it
    decode_read: float = 4.2e-6  # for a decoded token, each token before it
    masked: float = 0.48  # cost of a masked cell of another sequence, relative to an own cell
    move: float = 1.25e-10  # a byte swapped or copied: 8 GB/s

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"cost {name}={value}: give a number of 0 and more")
        if not self.step + min(self.prompt, self.decode) > 0:
            raise ConfigError("a step must cost some time: step, or prompt and decode, must be above 0")

    def seconds(self, n_tokens: NDArray[np.int32], lengths: NDArray[np.int32], n_cells: int = 0) -> float:
        """Return the time of a step.

        Args:
            n_tokens: int32 [n], tokens of each sequence in the step.
            lengths: int32 [n], tokens of each sequence after the step.
            n_cells: cells that every sequence reads, if all read one buffer.
        """
        decodes = n_tokens == 1
        n, length = n_tokens.astype(np.float64), lengths.astype(np.float64)
        before = np.where(decodes, length, length - n / 2)
        scanned = before + self.masked * np.maximum(0, n_cells - length)
        each = np.where(
            decodes, self.decode + self.decode_read * scanned, n * (self.prompt + self.prompt_read * scanned)
        )
        return self.step + float(each.sum())


@dataclass(frozen=True)
class Setup:
    """Memory and limits of a run: blocks of `block_size` tokens and `block_bytes` bytes, sequences of at most
    `n_ctx` tokens.

    `windows` are of the groups of layers. `state_blocks` are the blocks of a snapshot of a recurrent state, 0
    without recurrent layers.

    Raises:
        ConfigError: a value is out of range.
    """

    n_blocks: int
    block_size: int
    block_bytes: int
    n_ctx: int
    n_swap_blocks: int = 0
    max_seqs: int = 256
    max_batch_tokens: int = 512
    prefix_cache: bool = True
    policy: str = "auto"
    costs: StepCosts = StepCosts()
    windows: tuple[Window, ...] = (FULL,)
    state_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("n_blocks", "block_size", "n_ctx", "max_seqs", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number of 1 and more")
        if self.n_slots >= 1 << 31 or max(self.n_blocks, self.n_swap_blocks) > MOST_BLOCKS:
            raise ConfigError(
                f"{self.n_blocks} blocks of {self.block_size} tokens and {self.n_swap_blocks} of host memory "
                f"are too many: up to {MOST_BLOCKS} blocks and {(1 << 31) - 1} tokens can be simulated"
            )
        if self.limits.max_batch_tokens > MOST_BATCH or self.limits.max_seqs * self.width > MOST_ENTRIES:
            raise ConfigError(
                f"steps of {self.max_batch_tokens} tokens and {self.limits.max_seqs} sequences of up to "
                f"{self.width} blocks are too large to simulate"
            )
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r}: choose from {', '.join(POLICIES)}")

    @property
    def n_slots(self) -> int:
        """Tokens of the pool, if no window frees a block."""
        return self.n_blocks * self.block_size // len(self.windows)

    @property
    def layout(self) -> BlockLayout:
        """Layout of a sequence's blocks."""
        return BlockLayout(self.block_size, self.windows, self.max_batch_tokens, self.state_blocks)

    def fits(self, job: Job) -> bool:
        """Return whether the engine accepts the job: its longest answer must fit into the empty pool."""
        longest = min(job.n_prompt + job.max_tokens, self.n_ctx)
        return job.n_prompt + job.n_answer <= self.n_ctx and (
            self.layout.peak_blocks(longest - 1) <= self.n_blocks
        )

    @property
    def width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-min(self.n_ctx, self.n_blocks * self.block_size) // self.block_size)

    @property
    def limits(self) -> Limits:
        """Limits of a step."""
        return Limits(min(self.max_seqs, self.max_batch_tokens), self.max_batch_tokens)


class Clock:
    """Clock of a simulation, in seconds from its start."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Policy(Costs):
    """Measured costs with a fixed choice."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self._swap = swap

    def favour_swap(self, n_blocks: int, n_tokens: int) -> bool:
        return self._swap


class _Arrays:
    """Arrays of a step, as StepArrays, without the compiled library."""

    def __init__(self, limits: Limits, width: int, n_groups: int) -> None:
        self.tokens = np.zeros(limits.max_batch_tokens, np.int32)
        self.positions = np.zeros(limits.max_batch_tokens, np.int32)
        self.slots = np.zeros((n_groups, limits.max_batch_tokens), np.int32)
        self.outputs = np.zeros(limits.max_batch_tokens, np.int8)
        self.seqs = np.zeros((limits.max_seqs, 4), np.int32)
        self.firsts = np.zeros((n_groups, limits.max_seqs), np.int32)
        self.tables = np.zeros((n_groups, limits.max_seqs, width), np.int32)
        self.states = np.zeros(limits.max_seqs, np.int32)


class _Sampler:
    """Sampler that returns the answer of the workload, token by token."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self._tokens = iter(tokens.tolist())

    def draw(self) -> int:
        return int(next(self._tokens))

    def close(self) -> None:
        """Do nothing."""


class _Context:
    """Context that only advances the clock."""

    def __init__(self, setup: Setup, clock: Clock, meter: Meter, manager: BlockManager) -> None:
        self._setup = setup
        self._clock = clock
        self._meter = meter
        self._manager = manager
        self.core: EngineCore | None = None

    def run(self, arrays: _Arrays, n_tokens: int, n_seqs: int) -> None:
        core, manager = self.core, self._manager
        if core is None:
            raise InternalError("a simulated context runs without its engine")
        seconds = self._setup.costs.seconds(arrays.seqs[:n_seqs, 1], arrays.seqs[:n_seqs, 2])
        size = manager.block_size
        # the slots of this step are allocated before it, and filled after it
        self._meter.step(
            seconds,
            core.n_running,
            manager.n_used * size,
            manager.n_stored + n_tokens,
            size * sum(len(table.blocks) for table in manager.tables()),
        )
        self._clock.now += seconds

    def sample(self, rows: Any, samplers: Sequence[_Sampler]) -> tuple[Any, Any]:
        tokens = [sampler.draw() for sampler in samplers]
        return np.array(tokens, np.int32), np.zeros(len(tokens), np.int32)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._move(len(targets))

    def swap_out(self, blocks: Sequence[int], swap_blocks: Sequence[int]) -> None:
        self._move(len(blocks))

    def swap_in(self, swap_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self._move(len(blocks))

    def fill_blocks(self, blocks: Sequence[int], byte: int) -> None:
        """Do nothing."""

    def clear_state(self, state: int) -> None:
        """Do nothing."""

    def copy_state(self, source: int, target: int) -> None:
        self._move(self._setup.state_blocks)

    def save_state(self, state: int, blocks: Sequence[int], *, swapped: bool = False) -> None:
        self._move(len(blocks))

    def load_state(self, state: int, blocks: Sequence[int], *, swapped: bool = False) -> None:
        self._move(len(blocks))

    def _move(self, n_blocks: int) -> None:
        self._clock.now += n_blocks * self._setup.block_bytes * self._setup.costs.move


def simulate(
    setup: Setup,
    jobs: Sequence[Job],
    *,
    seed: int = 0,
    record: str | os.PathLike[str] | None = None,
    audit: bool = False,
) -> Outcome:
    """Run a workload over pages.

    Args:
        setup: memory and limits.
        jobs: the workload, in the order of time.
        seed: of the tokens.
        record: path for a trace of the run.
        audit: check the invariants of the block manager after every step.
    """
    run = SimulatedEngine(setup, jobs, Texts(jobs, seed), audit)
    if record is None:
        run.finish()
    else:
        tracer = Tracer(run.core, record, setup.block_bytes, setup.n_ctx)
        try:
            run.finish()
            tracer.detach()
        finally:
            tracer.close()
    return run.outcome()


class SimulatedEngine:
    """Engine of a simulation, with a clock of its own.

    Args:
        setup: memory and limits.
        jobs: the workload; `submit` takes some of them, `finish` all.
        texts: of the jobs.
        audit: check the invariants of the block manager after every step.
    """

    def __init__(self, setup: Setup, jobs: Sequence[Job], texts: Texts, audit: bool = False) -> None:
        self._setup, self._jobs, self._texts = setup, jobs, texts
        self._clock, self.meter, self._n_submitted = Clock(), Meter(), 0
        self._answers: dict[int, NDArray[np.int32]] = {}
        self._pending = deque(enumerate(jobs))
        self.manager = (AdoptingStates if setup.state_blocks else AdoptingManager)(
            setup.n_blocks,
            setup.block_size,
            windows=setup.windows,
            max_chunk=setup.limits.max_batch_tokens,
            state_blocks=setup.state_blocks,
            share=setup.prefix_cache,
            n_swap_blocks=setup.n_swap_blocks,
        )
        context = _Context(setup, self._clock, self.meter, self.manager)
        self.core = context.core = EngineCore(
            context=cast(Any, context),
            arrays=cast(Any, _Arrays(setup.limits, setup.width, len(setup.windows))),
            manager=self.manager,
            limits=setup.limits,
            n_states=setup.limits.max_seqs if setup.state_blocks else 0,
            new_sampler=cast(Any, self._new_sampler),
            is_end=lambda token: token == END,
            debug=audit,
            clock=self._clock,
            costs=None if setup.policy == "auto" else _Policy(setup.policy == "swap"),
        )

    @property
    def n_open(self) -> int:
        """Submitted requests that have not ended."""
        return self._n_submitted - self.core.counters.n_ended

    def finish(self) -> None:
        """Step until every job is done."""
        clock, pending = self._clock, self._pending
        while True:
            while pending and pending[0][1].time <= clock.now:
                index, _ = pending.popleft()
                self.submit(index, self._texts.prompt(index))
            if self._step():
                continue
            if not pending:
                return
            clock.now = pending[0][1].time

    def advance(self, time: float) -> None:
        """Step until a time; a step that has begun ends after it."""
        while self._clock.now < time and self._step():
            pass
        self._clock.now = max(self._clock.now, time)

    def _step(self) -> bool:
        """Run a step; return False if nothing is left to do."""
        stepped = self.core.step()
        if not stepped and (self.core.n_running or self.core.n_waiting):
            raise InternalError("a simulated request is not finished, but nothing is left to do")
        return stepped

    def outcome(self) -> Outcome:
        """Return the results so far."""
        meter, counts, counters = self.meter, self.manager.counts, self.core.counters
        meter.preemptions, meter.swaps = counters.preemptions, counters.swaps
        meter.hit_rate = counts.hits / counts.queried if counts.queried else 0.0
        setup = self._setup
        scheme = f"pages of {setup.block_size}, {setup.policy}"
        return meter.outcome(scheme, len(self._jobs), self._clock.now)

    def submit(self, index: int, prompt: NDArray[np.int32]) -> None:
        """Submit a job as the input processor does: refuse what cannot fit."""
        job = self._jobs[index]
        if not self._setup.fits(job):
            self.meter.refused += 1
            return
        params = SamplingParams(max_tokens=job.max_tokens, n=job.samples)
        requests = [self._request(index, job, sample, prompt, params) for sample in range(job.samples)]
        requests[0].hold(requests[1:])
        self._n_submitted += len(requests)
        self.core.inbox.submit(requests)

    def _request(
        self, index: int, job: Job, sample: int, prompt: NDArray[np.int32], params: SamplingParams
    ) -> Request:
        sample_of, meter, clock = (index, sample), self.meter, self._clock
        request = Request(
            RequestSequence(prompt.tolist(), self._setup.block_size),
            params,
            max_new=min(job.max_tokens, self._setup.n_ctx - job.n_prompt),
            seed=0,
            detokenizer=Detokenizer(lambda token: b""),
            index=sample,
            on_piece=lambda piece: meter.token(sample_of, job.time, clock.now),
        )
        self._answers[id(request)] = self._texts.answer(index, sample)
        return request

    def _new_sampler(self, request: Request) -> _Sampler:
        return _Sampler(self._answers.pop(id(request)))
