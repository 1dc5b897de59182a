"""Prefill beside streams: a stream does not wait, and the prompt advances."""

from __future__ import annotations

import itertools
import random
from statistics import mean

import pytest

from pyvelo.engine.prefill_budget import COMFORT, FEWEST, LOOK_AGAIN, ROWS, PrefillBudget

from .fakes import Bench, answer

ALONE = 0.030


def step(prefill_budget: PrefillBudget, per_token: float) -> tuple[int, float]:
    """A step of a machine where a token of a prompt takes so long; what it fed, and how long it took."""
    n_tokens = prefill_budget.tokens(8, 8, 1)
    seconds = ALONE + n_tokens * per_token
    prefill_budget.stepped(n_tokens, seconds)
    return n_tokens, seconds


@pytest.mark.parametrize("per_token", [0.0, 1e-6, 1e-4, 1e-3, 1e-1])
def test_steps_take_less_than_twice_as_long(per_token: float) -> None:
    prefill_budget = PrefillBudget()
    steps = [step(prefill_budget, per_token) for _ in range(500)][2:]
    fewest = ALONE + FEWEST * per_token
    assert max(seconds for _, seconds in steps) <= max(1.75 * ALONE, fewest)
    fed = sum(n for n, _ in steps)
    assert fed >= FEWEST * 480, "the prompt gets on"
    if 1e-4 <= per_token <= 1e-3:
        assert fed * per_token >= 0.6 * ALONE * 480, "and takes what it may"


def test_the_constant_cost_of_a_chunk_differs_from_its_tokens_cost() -> None:
    """After a long context any chunk takes half of a step: its tokens are nearly free."""
    prefill_budget, fed = PrefillBudget(), []
    for _ in range(500):
        n_tokens = prefill_budget.tokens(8, 8, 1)
        seconds = ALONE + (0.5 * ALONE + n_tokens * 5e-4 if n_tokens else 0.0)
        prefill_budget.stepped(n_tokens, seconds)
        fed.append(n_tokens)
        assert seconds <= 1.75 * ALONE
    assert mean(fed[100:]) >= 10, "of twelve that fit"


def test_a_prompt_that_gets_slower_gets_less() -> None:
    prefill_budget = PrefillBudget()
    for number in range(3000):
        per_token = 1e-4 * (1 + number / 500)
        _, seconds = step(prefill_budget, per_token)
        assert number < 2 or seconds <= 1.8 * ALONE


def test_now_and_then_a_step_shows_what_it_takes_without() -> None:
    prefill_budget = PrefillBudget()
    assert prefill_budget.tokens(8, 8, 1) == 0, "nothing is known"
    fed = [step(prefill_budget, 1e-3)[0] for _ in range(6 * LOOK_AGAIN)]
    zeros = [number for number, n in enumerate(fed) if n == 0]
    between = [b - a - 1 for a, b in itertools.pairwise(zeros)]
    assert between == [1, 2, 4, 8, 16, 32, *[LOOK_AGAIN] * (len(between) - 6)]
    assert len(between) > 8


def test_a_slow_first_step_is_soon_forgotten() -> None:
    prefill_budget = PrefillBudget()
    prefill_budget.stepped(0, 100 * ALONE)  # weights were read from the disk
    steps = [step(prefill_budget, 1e-3) for _ in range(100)]
    assert max(seconds for _, seconds in steps[3:]) <= 1.8 * ALONE


def test_a_step_that_is_slow_once_does_not_make_room_for_prompts() -> None:
    prefill_budget = PrefillBudget()
    for _ in range(300):
        step(prefill_budget, 1e-3)
    prefill_budget.stepped(0, 5 * ALONE)
    assert max(step(prefill_budget, 1e-3)[1] for _ in range(100)) <= 1.8 * ALONE


def test_steps_that_became_slower_are_soon_known() -> None:
    prefill_budget = PrefillBudget()
    for _ in range(300):
        step(prefill_budget, 1e-3)
    for _ in range(60):  # twice as many decode
        n_tokens = prefill_budget.tokens(8, 8, 1)
        seconds = 2 * ALONE + n_tokens * 1e-3
        prefill_budget.stepped(n_tokens, seconds)
    assert 2.5 * ALONE <= seconds <= 3.6 * ALONE


def test_steps_of_uneven_length_cost_a_prompt_nothing() -> None:
    shares = []
    for seed in range(6):
        prefill_budget, draw = PrefillBudget(), random.Random(seed)
        alone = [ALONE * draw.lognormvariate(0, 0.12) for _ in range(2000)]
        taken = []
        for own in alone:
            n_tokens = prefill_budget.tokens(8, 8, 1)
            seconds = own * (1 + n_tokens * 1e-3 / ALONE)
            prefill_budget.stepped(n_tokens, seconds)
            taken.append(seconds)
        shares.append(mean(taken) / mean(alone))
        assert sorted(taken)[1980] < 2 * sorted(alone)[1980]
    assert mean(shares) >= 1.6, "it takes what it may"


def test_steps_of_uneven_length_are_seldom_looked_at_without_prompts() -> None:
    """A surprising step is soon checked; if the check does not confirm it, nothing changes."""
    for seed in range(6):
        prefill_budget, draw, looks = PrefillBudget(), random.Random(seed), 0
        for _ in range(2000):
            n_tokens = prefill_budget.tokens(8, 8, 1)
            prefill_budget.stepped(n_tokens, (ALONE + n_tokens * 1e-3) * draw.lognormvariate(0, 0.4))
            looks += n_tokens == 0
        assert looks <= 2000 // 10


def test_one_cheap_looking_step_does_not_let_the_next_take_long() -> None:
    prefill_budget = PrefillBudget()
    for _ in range(200):
        step(prefill_budget, 1e-3)
    prefill_budget.stepped(20, 2.5 * ALONE)  # something else kept the machine busy
    assert step(prefill_budget, 1e-3)[1] <= 1.8 * ALONE


def test_a_step_that_seems_free_does_not_let_the_next_take_everything() -> None:
    prefill_budget = PrefillBudget()
    for _ in range(200):
        step(prefill_budget, 1e-3)
    usual = step(prefill_budget, 1e-3)[0]
    for n_free in range(1, 6):
        n_tokens = prefill_budget.tokens(8, 8, 1)
        # the step without prompts was measured while the machine was busy
        prefill_budget.stepped(n_tokens, ALONE)
        assert prefill_budget.tokens(8, 8, 1) <= usual * 1.35**n_free + 1


@pytest.mark.parametrize("n_decodes", [1, 8, 30, 31, 33, 64])
def test_a_step_ends_with_a_group_of_rows(n_decodes: int) -> None:
    prefill_budget, group = PrefillBudget(), 0.5 * ALONE
    alone = group * -(-n_decodes // ROWS)
    pieces = []
    for _ in range(400):
        n_tokens = prefill_budget.tokens(n_decodes, n_decodes, 1)
        seconds = group * -(-(n_decodes + n_tokens) // ROWS)
        prefill_budget.stepped(n_tokens, seconds)
        pieces.append(n_tokens)
    assert all((n_decodes + n) % ROWS == 0 or n - (n_decodes + n) % ROWS < FEWEST for n in pieces if n)
    longest = group * -(-(n_decodes + max(pieces)) // ROWS)
    assert longest <= max(2 * alone, COMFORT), "where one more group is too long, what is comfortable"


@pytest.mark.parametrize(("alone", "n_waiting", "expected"), [
    (0.030, 1, 0.030 * 1.7),
    (0.030, 8, 0.060),
    (0.030, 16, 0.090),
    (0.030, 400, COMFORT),
    (0.120, 400, 0.120 * 1.7),
])  # fmt: skip
def test_many_waiting_requests_raise_the_budget_up_to_comfort(
    alone: float, n_waiting: int, expected: float
) -> None:
    prefill_budget, per_token = PrefillBudget(), 1e-5
    longest = 0.0
    for _ in range(200):
        n_tokens = prefill_budget.tokens(8, 8, n_waiting)
        seconds = alone + n_tokens * per_token
        prefill_budget.stepped(n_tokens, seconds)
        longest = max(longest, seconds)
    assert longest == pytest.approx(expected, rel=0.02)


def test_only_steps_that_decode_count() -> None:
    bench = Bench()
    bench.submit([1] * 40, 3)
    bench.step()
    assert bench.core.prefill_budget._since == 0
    bench.submit([2] * 40, 3)
    bench.step()
    assert bench.core.prefill_budget._since == 1


def test_the_budget_depends_on_decodes_streams_and_waiting_prompts() -> None:
    told = []

    def tokens(n_decodes: int, n_streaming: int, n_waiting: int) -> int:
        told.append((n_decodes, n_streaming, n_waiting))
        return 5

    bench = Bench(n_blocks=32)
    bench.core.prefill_budget.tokens = tokens  # type: ignore[method-assign]
    talking = [bench.submit([1, 2, 3], 30, on_piece=lambda piece: None), bench.submit([4, 5], 30)]
    bench.step()
    assert told == [], "nobody listens yet"
    prompts = [bench.submit([number] * 20, 2) for number in (7, 8, 9)]
    bench.step()
    bench.step()
    assert told == [(2, 1, 3)] * 2, "one of the prompts has begun, two wait"
    bench.finish(*talking, *prompts)


@pytest.mark.parametrize("listened_to", [True, False])
def test_only_a_stream_slows_a_prompt_down(listened_to: bool) -> None:
    bench = Bench(n_blocks=32)
    bench.core.prefill_budget.tokens = lambda *_: 5  # type: ignore[method-assign]
    talking = bench.submit([1, 2, 3], 30, on_piece=(lambda piece: None) if listened_to else None)
    bench.step()
    prompts = [bench.submit([7] * 20, 2), bench.submit([8] * 20, 2, priority=-1)]
    bench.context.steps.clear()
    bench.finish(*prompts)
    mixed = [sum(step.n_tokens) - 1 for step in bench.context.steps]
    assert (max(mixed) <= 5 + 2) == listened_to
    assert (len(mixed) >= 40 // 5) == listened_to
    bench.finish(talking)
    assert talking.generated_ids == answer([1, 2, 3], 30)


def test_a_step_without_prompts_still_decodes() -> None:
    bench = Bench()
    bench.core.prefill_budget.tokens = lambda *_: 0  # type: ignore[method-assign]
    talking = bench.submit([1, 2, 3], 10, on_piece=lambda piece: None)
    bench.step()
    other = bench.submit([4] * 40, 3)
    bench.finish(talking)
    assert other.n_computed == 0
    bench.finish(other)
    assert other.generated_ids == answer([4] * 40, 3)
