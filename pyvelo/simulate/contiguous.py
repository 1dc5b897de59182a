"""What the same memory would serve without pages: the ways in which a cache is laid out contiguously.

Beside pages, four layouts of equally many slots take the same workload, with the same limits of a step and
the same costs:

- `reserved n_ctx`: whoever runs holds n_ctx slots in one piece for its life.
- `reserved max`: whoever runs holds a piece for its prompt and the most that it may generate; pieces go
  where they fit first, so that holes between them may be too small for the next.
- `streams`: the slots are cut into equal slices, one for each sequence, as llama.cpp does without its unified
  buffer. Whoever does not fit into a slice is refused.
- `unified`: one buffer of cells for all, as llama.cpp's unified cache. A token takes the first cell
  that is free, and whoever runs reads the whole buffer up to the last cell that is taken, in steps of 256,
  and masks what is not its own. Where no cell is left the youngest is preempted and computed again, which is
  kinder than llama.cpp, where its request fails.

None of them shares: a sample is a sequence with a prompt of its own.
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
"""llama.cpp reads a number of cells that is a multiple of this."""


@dataclass(eq=False)
class _Sequence:
    """A sample of a job on its way."""

    number: tuple[int, int]
    job: Job
    n_stored: int = 0
    n_generated: int = 0
    cells: list[int] = field(default_factory=list)
    piece: tuple[int, int] = (0, 0)  # start and size

    @property
    def n_known(self) -> int:
        """Tokens of prompt and answer; of those of the answer the last one is not stored yet."""
        return self.job.n_prompt + self.n_generated

    @property
    def decodes(self) -> bool:
        """Whether all but its last token are stored."""
        return self.n_generated > 0 and self.n_stored == self.n_known - 1


class Layout(Protocol):
    """How slots are handed out."""

    name: str

    def fits(self, job: Job) -> bool:
        """Whether it could ever run."""

    def start(self, sequence: _Sequence, n_running: int) -> bool:
        """Gives it what it needs to start; False where that is not there now."""

    def grow(self, sequence: _Sequence) -> bool:
        """Gives it a slot for one more token; False where there is none."""

    def end(self, sequence: _Sequence) -> None:
        """Takes back what it holds."""

    @property
    def held(self) -> int:
        """Slots that are held."""

    @property
    def scanned(self) -> int:
        """Slots that every sequence reads, its own among them; 0: it reads its own alone."""


class Reserved:
    """A piece for each sequence, as large as `size_of` says, in the first gap that is large enough."""

    scanned = 0

    def __init__(self, name: str, n_slots: int, n_ctx: int, size_of: Callable[[Job], int]) -> None:
        self.name = name
        self.held = 0
        self._n_slots, self._n_ctx, self._size_of = n_slots, n_ctx, size_of
        self._pieces: list[tuple[int, int]] = []

    def fits(self, job: Job) -> bool:
        return job.n_prompt + job.n_answer <= self._n_ctx and self._size_of(job) <= self._n_slots

    def start(self, sequence: _Sequence, n_running: int) -> bool:
        size, at = self._size_of(sequence.job), 0
        for start, length in self._pieces:
            if start - at >= size:
                break
            at = start + length
        if at + size > self._n_slots:
            return False
        sequence.piece = at, size
        insort(self._pieces, sequence.piece)
        self.held += size
        return True

    def grow(self, sequence: _Sequence) -> bool:
        return True

    def end(self, sequence: _Sequence) -> None:
        self._pieces.remove(sequence.piece)
        self.held -= sequence.piece[1]


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
    """Cells for all, taken one by one from the front; `n_parallel` run at once."""

    def __init__(self, n_slots: int, n_ctx: int, n_parallel: int) -> None:
        self.name = f"unified: {n_parallel}"
        self._n_ctx = n_ctx
        self._n_parallel = n_parallel
        self._taken = np.zeros(n_slots, np.bool_)
        self.held = 0

    @property
    def scanned(self) -> int:
        last = int(len(self._taken) - np.argmax(self._taken[::-1])) if self.held else 0
        return min(len(self._taken), -(-last // CELL_STEP) * CELL_STEP)

    def fits(self, job: Job) -> bool:
        longest = min(job.n_prompt + job.max_tokens, self._n_ctx)
        return job.n_prompt + job.n_answer <= self._n_ctx and longest - 1 <= len(self._taken)

    def start(self, sequence: _Sequence, n_running: int) -> bool:
        if n_running >= self._n_parallel:
            return False
        # a cell to spare for each that runs, and for itself
        return self._take(sequence, sequence.n_known, min(n_running + 1, len(self._taken) - sequence.n_known))

    def grow(self, sequence: _Sequence) -> bool:
        return self._take(sequence, 1, 0)

    def end(self, sequence: _Sequence) -> None:
        self._taken[sequence.cells] = False
        self.held -= len(sequence.cells)
        sequence.cells = []

    def _take(self, sequence: _Sequence, n: int, spare: int) -> bool:
        if n + spare > len(self._taken) - self.held:
            return False
        cells = np.flatnonzero(~self._taken)[:n]
        self._taken[cells] = True
        self.held += n
        sequence.cells += cells.tolist()
        return True


def layouts(setup: Setup, jobs: Sequence[Job], n_parallel: int | None = None) -> list[Layout]:
    """The four of them. `n_parallel` is how many sequences share the last two; None: as many streams as leave
    each job its place, and as many in the unified buffer as the engine may run."""
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
    """Runs a workload, whose jobs are in the order of time, over that layout."""
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
    """One simulation; a step is planned as the engine's scheduler plans it."""

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
        """Those that decode get a cell each, prompts share the rest of the batch, then others start."""
        preempted = self._grow()
        chunks = [(s, 1) for s in self._running if s.decodes]
        budget = self._setup.limits.max_batch_tokens - len(chunks)
        n_listening = sum(s.n_generated > 0 for s in self._running)
        if n_listening and chunks:  # who listens may be computed again
            n_waiting = len(self.waiting) + len(self._running) - len(chunks)
            budget = min(budget, self._prefill_budget.allowance(len(chunks), n_listening, n_waiting))
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
        self.waiting.insert(0, sequence)  # the youngest of those that ran, older than those that wait
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
        self._prefill_budget.stepped(n_decodes, int(n_tokens.sum()) - n_decodes, seconds)
        for sequence, _ in chunks:
            if sequence.n_stored == sequence.n_known:
                self._draw(sequence)
        self._running = [s for s in self._running if s.n_generated < s.job.n_answer]

    def _draw(self, sequence: _Sequence) -> None:
        sequence.n_generated += 1
        self.meter.token(sequence.number, sequence.job.time, self.now)
        if sequence.n_generated == sequence.job.n_answer:
            self._layout.end(sequence)
