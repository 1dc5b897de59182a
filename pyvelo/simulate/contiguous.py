"""Contiguous caches to compare with pages: four layouts with the same number of slots.

Each layout runs the same workload as the pages, with the same limits and costs of a step:

- `reserved n_ctx`: each running sequence has n_ctx contiguous slots until it ends.
- `reserved max`: each running sequence has contiguous slots for its prompt and its longest answer, in the
  first gap that is large enough. So gaps may be too small for the next sequence.
- `streams`: the slots are split into equal slices, one for each sequence, as in llama.cpp without its unified
  buffer. A sequence that does not fit into a slice is refused.
- `unified`: one buffer of cells for all sequences, as llama.cpp's unified cache. A token gets the first free
  cell. Every sequence reads the buffer up to the last used cell, in steps of 256, and masks the cells of
  other sequences. If no cell is free, the youngest sequence is preempted and recomputed; in llama.cpp its
  request fails.

No layout shares blocks: every sample is a sequence with its own prompt.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pyvelo.engine.prefill_budget import PrefillBudget
from pyvelo.errors import ConfigError
from pyvelo.simulate.engine import Setup
from pyvelo.simulate.metrics import Meter, Outcome
from pyvelo.simulate.workload import Job

__all__ = ["Layout", "Reserved", "Streams", "Unified", "layouts", "simulate_contiguous"]

CELL_STEP = 256
"""llama.cpp reads a multiple of this number of cells."""


@dataclass(eq=False)
class _Sequence:
    """Sequence of one sample of a job."""

    number: tuple[int, int]
    job: Job
    n_stored: int = 0
    n_generated: int = 0
    cells: list[int] = field(default_factory=list)
    span: tuple[int, int] = (0, 0)  # start and size

    @property
    def n_known(self) -> int:
        """Tokens of prompt and answer. The last token of the answer is not stored yet."""
        return self.job.n_prompt + self.n_generated

    @property
    def decodes(self) -> bool:
        """Whether all but its last token are stored."""
        return self.n_generated > 0 and self.n_stored == self.n_known - 1


class Layout(Protocol):
    """Interface of a layout: how it allocates slots."""

    name: str

    def fits(self, job: Job) -> bool:
        """Return whether the job fits into the empty cache."""

    def start(self, sequence: _Sequence, n_running: int) -> bool:
        """Allocate the slots that the sequence needs to start. Return False if they are not free."""

    def grow(self, sequence: _Sequence) -> bool:
        """Allocate a slot for one more token. Return False if none is free."""

    def end(self, sequence: _Sequence) -> None:
        """Free the slots of the sequence."""

    @property
    def held(self) -> int:
        """Allocated slots."""

    @property
    def scanned(self) -> int:
        """Slots that every sequence reads, its own included; 0: it reads only its own."""


class Reserved:
    """Contiguous memory for each sequence, of `size_of` slots, in the first gap that is large enough."""

    scanned = 0

    def __init__(self, name: str, n_slots: int, n_ctx: int, size_of: Callable[[Job], int]) -> None:
        self.name = name
        self.held = 0
        self._n_slots, self._n_ctx, self._size_of = n_slots, n_ctx, size_of
        self._spans: list[tuple[int, int]] = []

    def fits(self, job: Job) -> bool:
        return job.n_prompt + job.n_answer <= self._n_ctx and self._size_of(job) <= self._n_slots

    def start(self, sequence: _Sequence, n_running: int) -> bool:
        size, at = self._size_of(sequence.job), 0
        for start, length in self._spans:
            if start - at >= size:
                break
            at = start + length
        if at + size > self._n_slots:
            return False
        sequence.span = at, size
        insort(self._spans, sequence.span)
        self.held += size
        return True

    def grow(self, sequence: _Sequence) -> bool:
        return True

    def end(self, sequence: _Sequence) -> None:
        self._spans.remove(sequence.span)
        self.held -= sequence.span[1]


class Streams:
    """Equal slices, each for one sequence."""

    scanned = 0

    def __init__(self, n_slots: int, n_ctx: int, n_parallel: int) -> None:
        if n_parallel < 1:
            raise ConfigError(f"parallel {n_parallel}: give a number of 1 and more")
        self.name = f"streams: {n_parallel}"
        self._slice = n_slots // n_parallel
        self._n_ctx = n_ctx
        self._n_free = n_parallel
        self.held = 0

    def fits(self, job: Job) -> bool:
        return job.n_prompt + job.n_answer <= min(self._n_ctx, self._slice)

    def start(self, sequence: _Sequence, n_running: int) -> bool:
        if not self._n_free:
            return False
        self._n_free -= 1
        self.held += self._slice
        return True

    def grow(self, sequence: _Sequence) -> bool:
        return True

    def end(self, sequence: _Sequence) -> None:
        self._n_free += 1
        self.held -= self._slice


class Unified:
    """One buffer of cells for all sequences. Each token gets the first free cell; `n_parallel` run."""

    def __init__(self, n_slots: int, n_ctx: int, n_parallel: int) -> None:
        self.name = f"unified: {n_parallel}"
        self._n_ctx = n_ctx
        self._n_parallel = n_parallel
        self._used = np.zeros(n_slots, np.bool_)
        self.held = 0

    @property
    def scanned(self) -> int:
        last = int(len(self._used) - np.argmax(self._used[::-1])) if self.held else 0
        return min(len(self._used), -(-last // CELL_STEP) * CELL_STEP)

    def fits(self, job: Job) -> bool:
        longest = min(job.n_prompt + job.max_tokens, self._n_ctx)
        return job.n_prompt + job.n_answer <= self._n_ctx and longest - 1 <= len(self._used)

    def start(self, sequence: _Sequence, n_running: int) -> bool:
        if n_running >= self._n_parallel:
            return False
        # one spare cell for each running sequence and for itself
        n_spare = min(n_running + 1, len(self._used) - sequence.n_known)
        return self._allocate(sequence, sequence.n_known, n_spare)

    def grow(self, sequence: _Sequence) -> bool:
        return self._allocate(sequence, 1, 0)

    def end(self, sequence: _Sequence) -> None:
        self._used[sequence.cells] = False
        self.held -= len(sequence.cells)
        sequence.cells = []

    def _allocate(self, sequence: _Sequence, n: int, spare: int) -> bool:
        if n + spare > len(self._used) - self.held:
            return False
        cells = np.flatnonzero(~self._used)[:n]
        self._used[cells] = True
        self.held += n
        sequence.cells += cells.tolist()
        return True


def layouts(setup: Setup, jobs: Sequence[Job], n_parallel: int | None = None) -> list[Layout]:
    """Return the four layouts.

    `n_parallel` is the number of sequences in the last two. None: as many streams as leave a slice for the
    longest job, and in the unified buffer as many sequences as the engine may run.
    """
    longest = min(max((job.n_prompt + job.n_answer for job in jobs), default=1), setup.n_ctx)
    n_streams = n_parallel if n_parallel is not None else max(1, setup.n_slots // longest)
    n_slots, n_ctx = setup.n_slots, setup.n_ctx
    return [
        Reserved("reserved n_ctx", n_slots, n_ctx, lambda job: n_ctx),
        Reserved("reserved max", n_slots, n_ctx, lambda job: min(n_ctx, job.n_prompt + job.max_tokens)),
        Streams(n_slots, n_ctx, n_streams),
        Unified(n_slots, n_ctx, n_parallel if n_parallel is not None else setup.limits.max_seqs),
    ]


def simulate_contiguous(setup: Setup, jobs: Sequence[Job], layout: Layout) -> Outcome:
    """Run a workload, in the order of time, over a layout."""
    run = _Run(setup, layout)
    pending = deque(enumerate(jobs))
    while pending or run.busy:
        if not run.busy:
            run.now = max(run.now, pending[0][1].time)
        while pending and pending[0][1].time <= run.now:
            index, job = pending.popleft()
            if layout.fits(job):
                run.waiting += [_Sequence((index, sample), job) for sample in range(job.samples)]
            else:
                run.meter.refused += 1
        if run.busy:
            run.step()
    return run.meter.outcome(layout.name, len(jobs), run.now)


class _Run:
    """State of one simulation. It plans a step as the engine's scheduler does."""

    def __init__(self, setup: Setup, layout: Layout) -> None:
        self.now = 0.0
        self.meter = Meter()
        self.waiting: list[_Sequence] = []  # both in the order of arrival
        self._running: list[_Sequence] = []
        self._setup, self._layout = setup, layout
        self._prefill_budget = PrefillBudget()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._running)

    def step(self) -> None:
        """Run a step: decode first, then prefill with the rest of the batch, then start waiting sequences."""
        preempted = self._grow()
        chunks = [(s, 1) for s in self._running if s.decodes]
        budget = self._setup.limits.max_batch_tokens - len(chunks)
        n_streaming = sum(s.n_generated > 0 for s in self._running)
        if n_streaming and chunks:  # a preempted sequence is prefill again
            n_waiting = len(self.waiting) + len(self._running) - len(chunks)
            budget = min(budget, self._prefill_budget.tokens(len(chunks), n_streaming, n_waiting))
        for sequence in self._running:
            if not sequence.decodes and budget:
                chunks.append((sequence, min(budget, sequence.n_known - sequence.n_stored)))
                budget -= chunks[-1][1]
        while budget and self.waiting and not preempted and len(self._running) < self._setup.limits.max_seqs:
            if not self._layout.start(self.waiting[0], len(self._running)):
                break
            self._running.append(self.waiting.pop(0))
            chunks.append((self._running[-1], min(budget, self._running[-1].n_known)))
            budget -= chunks[-1][1]
        self._compute(chunks)

    def _grow(self) -> bool:
        """Give each decoding sequence a cell. Return whether one was preempted for that."""
        index, before = 0, len(self._running)
        while index < len(self._running):
            sequence = self._running[index]
            while index < len(self._running) and sequence.decodes and not self._layout.grow(sequence):
                self._preempt(self._running.pop())
            index += 1
        return len(self._running) < before

    def _preempt(self, sequence: _Sequence) -> None:
        self._layout.end(sequence)
        sequence.n_stored = 0
        self.waiting.insert(0, sequence)  # younger than the running sequences, older than the waiting ones
        self.meter.preemptions += 1

    def _compute(self, chunks: Sequence[tuple[_Sequence, int]]) -> None:
        n_tokens = np.array([n for _, n in chunks], np.int32)
        for sequence, n in chunks:
            sequence.n_stored += n
        lengths = np.array([sequence.n_stored for sequence, _ in chunks], np.int32)
        layout = self._layout
        seconds = self._setup.costs.seconds(n_tokens, lengths, layout.scanned)
        stored = sum(sequence.n_stored for sequence in self._running)
        self.meter.step(seconds, len(self._running), layout.held, stored, layout.held)
        self.now += seconds
        n_decodes = sum(n == 1 and sequence.n_generated > 0 for sequence, n in chunks)
        if n_decodes:
            self._prefill_budget.stepped(int(n_tokens.sum()) - n_decodes, seconds)
        for sequence, _ in chunks:
            if sequence.n_stored == sequence.n_known:
                self._sample(sequence)
        self._running = [s for s in self._running if s.n_generated < s.job.n_answer]

    def _sample(self, sequence: _Sequence) -> None:
        sequence.n_generated += 1
        self.meter.token(sequence.number, sequence.job.time, self.now)
        if sequence.n_generated == sequence.job.n_answer:
            self._layout.end(sequence)
