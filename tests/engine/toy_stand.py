"""An engine over the toy model: how it is put together, and what is verified of it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, cast

from pyvelo.engine.adapters import AdapterTurns
from pyvelo.engine.interrupts import InterruptGuard
from pyvelo.engine.loop import EngineLoop
from pyvelo.engine.prefill_budget import Costs
from pyvelo.engine.request import Request, Sequence
from pyvelo.engine.step import EngineCore
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.prefix import FULL, BlockHashes, BlockLayout, Window
from pyvelo.kv.records import Event
from pyvelo.kv.states import StateManager
from pyvelo.memory.budget import Limits
from pyvelo.trace.recorder import Tracer

from .fakes import FakeArrays
from .toy_checks import Held, Job, check_engine, check_nothing_left
from .toy_model import Faults, ToyAdapter, ToyContext, ToySampler
from .toy_values import END, N_VOCAB

MOST_STEPS = 5000  # from which on an engine is taken to hang; a request takes fewer than 150


def _colliding_hash(hashes: BlockHashes, index: int) -> bytes:
    """Return a hash that blocks of the same tokens have in common, whatever is before them."""
    return bytes([sum(hashes.block_tokens(index)) % 64])


class ToyCosts(Costs):
    """Costs that choose between swapping and computing by chance."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._state = rng.randrange(1 << 16)

    def favour_swap(self, n_blocks: int, n_tokens: int) -> bool:
        self._state = (self._state * 75 + 74) % 65537
        return self._state % 3 > 0


class ToyStand:
    """A core, its loop and its callers, in one thread; the work of other threads happens within calls."""

    def __init__(self, rng: Random) -> None:
        block_size, n_most = rng.choice((4, 8, 8)), rng.randint(2, 12)
        windows = self._windows(rng, block_size)
        n_states = rng.choice((0, 0, 0, 0, 1, 3))
        max_seqs = n_states or rng.randint(1, 6)
        self.limits = Limits(max_seqs, max_seqs + rng.choice((0, 1, 5, 20, 60)))
        self.faults = Faults()
        self.now = 0.0
        n_blocks = n_most * len(windows)
        state_blocks = rng.choice((1, 1, 2, 3)) if n_states else 0
        layout = BlockLayout(block_size, windows, self.limits.max_batch_tokens, state_blocks)
        n_blocks = max(n_blocks, layout.peak_blocks(1))
        fitting = (n for n in range(n_most * block_size, 0, -1) if layout.peak_blocks(n) <= n_blocks)
        self.n_tokens = next(fitting)
        self.manager = (StateManager if n_states else BlockManager)(
            n_blocks,
            block_size,
            windows=windows,
            max_chunk=self.limits.max_batch_tokens,
            state_blocks=layout.state_blocks,
            share=rng.random() < 0.75,
            n_swap_blocks=rng.choice((0, 3, 20)),
            make_hash=rng.choice((BlockHashes.block_hash, BlockHashes.block_hash, _colliding_hash)),
            observer=self._observe,
        )
        self.context = ToyContext(
            self.manager, self.faults, n_states, self.limits.max_outputs, lambda: self._tick(0.01)
        )
        self.samplers: list[ToySampler] = []
        self.core = EngineCore(
            context=cast(Any, self.context),
            arrays=cast(Any, FakeArrays(self.limits.max_batch_tokens, max_seqs, n_most, len(windows))),
            manager=self.manager,
            limits=self.limits,
            n_states=n_states,
            new_sampler=cast(Any, self._sampler),
            is_end=lambda token: token == END,
            debug=rng.random() < 0.5,
            clock=lambda: self.now,
            costs=ToyCosts(rng),
        )
        self.adapters: list[ToyAdapter | None] = [None]
        if rng.random() < 0.4:
            turns = AdapterTurns(self.context.adapt)
            self.core.schedule = turns.schedule
            self.core.before_run.append(turns.apply)
            self.adapters += [ToyAdapter(b"one:"), ToyAdapter(b"two:"), ToyAdapter(b"two:")]
        self.loop = EngineLoop(self.core, InterruptGuard())
        self.jobs: list[Job] = []
        self.open_jobs: list[Job] = []  # of prompts that had an open sample at the last check
        self.sessions: list[Held] = []
        self.texts: list[list[int]] = [[rng.randrange(1, N_VOCAB) for _ in range(3 * block_size)]]
        self.tracer: Tracer | None = None
        self._watched = rng.random() < 0.5
        self.sequences: list[Sequence] = []
        self.n_states = n_states
        self._closes = rng.random() < 0.2  # while requests run
        self._look_over_shoulders()

    def _windows(self, rng: Random, block_size: int) -> tuple[Window, ...]:
        """Choose groups of layers: mostly one without a window, or that and some with one."""
        sizes = (1, 3, block_size, block_size + 3, 2 * block_size, 3 * block_size + 1)
        n_windows = rng.choice((0, 0, 0, 1, 1, 2))
        windows = [Window(rng.choice(sizes), rng.random() < 0.3) for _ in range(n_windows)]
        full = [FULL] * rng.choice((1, 1, 1, 2) if n_windows else (1,))
        return (*full, *windows) if rng.random() < 0.8 or not windows else tuple(windows)

    def _look_over_shoulders(self) -> None:
        core, move, build = self.core, self.core._mover.move, self.core._batches.build
        schedule = core._schedule

        def moved(moves: Any) -> None:
            self.faults.check("mover")
            move(moves)
            self.faults.check("mover", "after")

        def built(plan: Any) -> Any:
            self.context.owners = plan.requests
            return build(plan)

        def scheduled() -> Any:
            plan = schedule()
            self.faults.check("schedule", "middle")
            return plan

        setattr(core, "_schedule", scheduled)  # noqa: B010
        setattr(core._mover, "move", moved)  # noqa: B010
        setattr(core._batches, "build", built)  # noqa: B010
        recover = core.recover

        def recovered(error: Exception) -> None:
            self.context.note(self.faults.caused(error), f"the engine recovers from {error!r}")
            recover(error)

        setattr(core, "recover", recovered)  # noqa: B010
        if self._watched:
            core.observer = lambda waiting, running: self.faults.check("watch")

    def _tick(self, seconds: float) -> None:
        self.now += seconds

    def _observe(self, event: Event) -> None:
        self.faults.check("observe")

    def _sampler(self, request: Request) -> ToySampler:
        sampler = ToySampler(self.context, request)
        self.samplers.append(sampler)
        return sampler

    def end_recording(self) -> None:
        tracer, self.tracer = self.tracer, None
        if tracer is not None:
            try:
                with self.loop.visit():
                    tracer.detach()
            finally:
                tracer.close()

    def survive(self, call: Callable[[], object]) -> None:
        """Calls what may raise an armed failure, but nothing else."""
        try:
            call()
        except BaseException as error:
            if not self.faults.caused(error):
                raise

    # ---- what holds, and the end ----

    @property
    def broken(self) -> bool:
        """Whether the engine has given up: it could not even end its requests undisturbed."""
        return self.loop._broken is not None

    @property
    def idle(self) -> bool:
        return all(job.request.finished for job in self.open_jobs)

    def check(self, every_job: bool = False) -> None:
        """Verify what holds between two operations, of open jobs or of every job."""
        if every_job or self.broken:
            self.open_jobs = list(self.jobs)
        check_engine(self)

    def finish(self) -> None:
        """Without failures: all that runs comes to its end, or is closed, and nothing is left."""
        self.faults.off()
        self.survive(lambda: self.loop.cancel(()))  # raises what an observer has raised
        if self.broken and self.tracer is not None:
            self.tracer.close()
        if self.broken:
            return
        if not self._closes:
            left = MOST_STEPS

            def ready() -> bool:
                nonlocal left
                left -= 1
                assert left, "the engine does not get on"
                return self.idle

            self.loop.run_until(ready)
        self.end_recording()
        if self._closes:
            self.loop.close(lambda: None)
        for session in self.sessions:
            self.loop.release(session.sequence)
        self.loop.close(lambda: None)
        self.check(every_job=True)
        check_nothing_left(self)
