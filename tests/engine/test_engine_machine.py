"""Operations of the engine in any order, and failures at any point, over a model that verifies its reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pyvelo.engine import scheduler
from pyvelo.kv import states
from pyvelo.memory import budget

from .toy_engine import ToyEngine

EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))  # 33: a million steps
SCORED_TOKENS = 5  # so that prompts that are scored are cut
SNAPSHOT_TOKENS = 16  # so that some prompts have several places for snapshots
RANDOM = st.randoms(use_true_random=False, note_method_calls=False)


@pytest.fixture(autouse=True, scope="module")
def _few_scored_tokens() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (scheduler, budget):
            patch.setattr(module, "SCORED_TOKENS", SCORED_TOKENS)
        patch.setattr(states, "SNAPSHOT_TOKENS", SNAPSHOT_TOKENS)
        yield


class EngineMachine(RuleBasedStateMachine):
    """Small cases, which hypothesis makes smaller where they fail."""

    @initialize(rng=RANDOM)
    def start(self, rng: Random) -> None:
        self.engine: ToyEngine | None = ToyEngine(rng)

    def do(self, operation: Callable[[ToyEngine, Random], None], rng: Random) -> None:
        engine, self.engine = self.engine, None  # what has failed once is not looked at again
        assert engine is not None
        try:
            operation(engine, rng)
            engine.check()
        except BaseException:  # hypothesis raises its own, too
            if engine.tracer is not None:
                engine.tracer.close()
            raise
        self.engine = engine

    @rule(rng=RANDOM)
    def submit(self, rng: Random) -> None:
        self.do(ToyEngine.submit, rng)

    @rule(rng=RANDOM)
    def cancel(self, rng: Random) -> None:
        self.do(ToyEngine.cancel, rng)

    @rule(rng=RANDOM)
    def pass_time(self, rng: Random) -> None:
        self.do(ToyEngine.pass_time, rng)

    @rule(rng=RANDOM)
    def open_session(self, rng: Random) -> None:
        self.do(ToyEngine.open_session, rng)

    @rule(rng=RANDOM)
    def append(self, rng: Random) -> None:
        self.do(ToyEngine.append, rng)

    @rule(rng=RANDOM)
    def go_on(self, rng: Random) -> None:
        self.do(ToyEngine.go_on, rng)

    @rule(rng=RANDOM)
    def compute(self, rng: Random) -> None:
        self.do(ToyEngine.compute, rng)

    @rule(rng=RANDOM)
    def fork(self, rng: Random) -> None:
        self.do(ToyEngine.fork, rng)

    @rule(rng=RANDOM)
    def close_session(self, rng: Random) -> None:
        self.do(ToyEngine.close_session, rng)

    @rule(rng=RANDOM)
    def step(self, rng: Random) -> None:
        self.do(ToyEngine.step, rng)

    @rule(rng=RANDOM)
    def visit(self, rng: Random) -> None:
        self.do(ToyEngine.visit, rng)

    @rule(rng=RANDOM)
    def record(self, rng: Random) -> None:
        self.do(ToyEngine.record, rng)

    @rule(rng=RANDOM)
    def fail_soon(self, rng: Random) -> None:
        self.do(ToyEngine.fail_soon, rng)

    @rule(rng=RANDOM)
    def meanwhile(self, rng: Random) -> None:
        self.do(ToyEngine.meanwhile, rng)

    def teardown(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=int(150 * EFFORT), stateful_step_count=40, deadline=None)

OPERATIONS: dict[Callable[[ToyEngine, Random], None], int] = {
    ToyEngine.submit: 10,
    ToyEngine.cancel: 5,
    ToyEngine.pass_time: 3,
    ToyEngine.open_session: 6,
    ToyEngine.append: 8,
    ToyEngine.go_on: 16,
    ToyEngine.compute: 8,
    ToyEngine.fork: 8,
    ToyEngine.close_session: 4,
    ToyEngine.step: 50,
    ToyEngine.visit: 2,
    ToyEngine.record: 2,
    ToyEngine.fail_soon: 8,
    ToyEngine.meanwhile: 5,
}
"""And how often each is done."""


def live(seed: int, n_operations: int = 100) -> int:
    """Run an engine through operations that the seed chooses, to its end; return how many steps that took."""
    rng = Random(seed)
    engine = ToyEngine(rng)
    for operation in rng.choices(list(OPERATIONS), list(OPERATIONS.values()), k=n_operations):
        operation(engine, rng)
        engine.check()
        if engine.broken:
            break
    engine.finish()
    return engine.context.n_runs


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_long_lives(part: int) -> None:
    """The same operations by chance alone: more of them, and longer ones."""
    for number in range(int(60 * EFFORT)):
        seed = part * 10_000_000 + number
        try:
            live(seed)
        except BaseException as error:
            raise AssertionError(f"live({seed}) fails") from error
