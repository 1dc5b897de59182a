"""The simulated engine agrees with published results of paged attention, and gives every answer."""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.engine.prefill_budget import PrefillBudget
from pyvelo.errors import ConfigError
from pyvelo.simulate.contiguous import Reserved, Streams, Unified, layouts, simulate_contiguous
from pyvelo.simulate.engine import POLICIES, Setup, StepCosts, simulate
from pyvelo.simulate.metrics import Outcome
from pyvelo.simulate.workload import Job, WorkloadSpec, draw_jobs, jobs_of_trace, parse_lengths
from pyvelo.trace.blockmap import summarize
from pyvelo.trace.format import read_trace

TOKEN_BYTES = 114_688
SLOTS = 18_432


def setup_of(block_size: int = 32, n_slots: int = SLOTS, **settings: object) -> Setup:
    usual = {"n_ctx": 2048, "block_bytes": block_size * TOKEN_BYTES}
    return Setup(n_blocks=n_slots // block_size, block_size=block_size, **{**usual, **settings})  # type: ignore[arg-type]


def chats(seed: int, n_requests: int = 200) -> list[Job]:
    """Return requests with the mean lengths that Kwon et al. report for ShareGPT: prompts of 161 tokens,
    answers of 338. The distribution is ours: exponential.
    """
    prompt, answer = parse_lengths("exponential:161"), parse_lengths("exponential:338")
    return draw_jobs(WorkloadSpec(n_requests, 1.0, prompt, answer, 1024, seed=seed), 2048)


# ---- the three claims: Kwon et al., Efficient Memory Management for Large Language Model Serving with
# PagedAttention (SOSP 2023), and the announcement of vLLM (June 2023) ----


@functools.cache
def over_pages(seed: int, block_size: int) -> Outcome:
    return simulate(setup_of(block_size), chats(seed))


@functools.cache
def without_masks(seed: int) -> list[Outcome]:
    """Return the outcomes over the contiguous layouts except the unified buffer."""
    jobs, setup = chats(seed), setup_of()
    return [simulate_contiguous(setup, jobs, layout) for layout in layouts(setup, jobs)[:3]]


SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
def test_reservation_wastes_60_to_80_percent(seed: int) -> None:
    for outcome in without_masks(seed):
        assert 0.60 < outcome.waste < 0.80, outcome


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_pages_waste_less_than_4_percent(seed: int, block_size: int) -> None:
    outcome = over_pages(seed, block_size)
    assert 0 < outcome.waste < 0.04, outcome


def test_sharing_saves_55_percent_for_16_samples_of_a_long_prompt() -> None:
    """By hand: 46 full blocks of the prompt are shared, all later blocks are not."""
    shared = simulate(setup_of(n_slots=1 << 16), [Job(0, 1500, 200, 200, samples=16)])
    alone = -(-(1500 + 199) // 32)
    assert shared.peak_running == 16
    assert shared.peak_slots == 32 * (46 + 16 * (alone - 46))
    assert 1 - shared.peak_slots / (32 * 16 * alone) > 0.55
    assert shared.saved > 0.55
    assert simulate(setup_of(), [Job(0, 1500, 200, 200)] * 3).saved == 0


def test_pages_run_more_at_once_than_any_contiguous_layout_without_masks() -> None:
    paged = over_pages(0, 32)
    for outcome in without_masks(0):
        assert outcome.peak_running < paged.peak_running / 2
        assert outcome.seconds > paged.seconds
        assert outcome.ttft_p99 > paged.ttft_p99


# ---- any workload ----

Works = st.lists(
    st.builds(
        Job,
        time=st.just(0.0),
        n_prompt=st.integers(1, 120),
        n_answer=st.integers(1, 40),
        max_tokens=st.integers(40, 60),
        samples=st.integers(1, 3),
    ),
    min_size=1,
    max_size=12,
)


def arranged(jobs: list[Job], gaps: list[float]) -> list[Job]:
    """Return jobs with arrival times. Every third starts like the one before it."""
    placed: list[Job] = []
    for index, job in enumerate(jobs):
        time = (placed[-1].time if placed else 0.0) + gaps[index % len(gaps)]
        like = index - 1 if index % 3 == 2 else None
        n_shared = min(job.n_prompt, jobs[index - 1].n_prompt) if like is not None else 0
        placed.append(replace(job, time=time, like=like, n_shared=n_shared))
    return placed


def check_times(outcome: Outcome, jobs: list[Job]) -> None:
    n_tokens = sum(job.n_answer * job.samples for job in jobs)
    assert outcome.tokens_per_second * outcome.seconds == pytest.approx(n_tokens), "all requests are answered"
    assert outcome.seconds >= jobs[-1].time
    assert 0 < outcome.ttft_p50 <= outcome.ttft_p99
    assert 0 <= outcome.tbt_p50 <= outcome.tbt_p99
    assert outcome.refused == 0


@settings(max_examples=25, deadline=None)
@given(
    jobs=Works,
    gaps=st.lists(st.floats(0, 3), min_size=1, max_size=4),
    block_size=st.integers(1, 40),
    n_slots=st.integers(220, 500),
    n_swap=st.integers(0, 6),
    policy=st.sampled_from(POLICIES),
    prefix_cache=st.booleans(),
)
def test_every_answer_is_given_with_any_pool(
    jobs: list[Job],
    gaps: list[float],
    block_size: int,
    n_slots: int,
    n_swap: int,
    policy: str,
    prefix_cache: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The real manager is audited after each step. The metrics agree with the trace."""
    placed = arranged(jobs, gaps)
    setup = setup_of(
        block_size,
        n_slots,
        n_ctx=220,
        n_swap_blocks=n_swap,
        policy=policy,
        prefix_cache=prefix_cache,
        max_seqs=8,
        max_batch_tokens=64,
    )
    if not all(setup.fits(job) for job in placed):
        return
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    outcome = simulate(setup, placed, audit=True, record=path)
    assert outcome == simulate(setup, placed)
    check_times(outcome, placed)
    assert outcome.peak_slots <= setup.n_slots
    assert outcome.peak_running <= 8
    if policy == "recompute" or n_swap == 0:
        assert outcome.swaps == 0
    summary = summarize(read_trace(path))
    assert (summary.preemptions, summary.swaps) == (outcome.preemptions, outcome.swaps)
    assert summary.finished == summary.requests == sum(job.samples for job in placed)
    if not prefix_cache:
        assert outcome.hit_rate == 0
    replayed = jobs_of_trace(read_trace(path))
    assert sorted((job.n_prompt, job.n_answer) for job in replayed) == sorted(
        (job.n_prompt, job.n_answer) for job in placed for _ in range(job.samples)
    )


@settings(max_examples=25, deadline=None)
@given(jobs=Works, gaps=st.lists(st.floats(0, 3), min_size=1, max_size=4), n_slots=st.integers(220, 700))
def test_contiguous_layouts_give_every_answer_too(jobs: list[Job], gaps: list[float], n_slots: int) -> None:
    placed = arranged(jobs, gaps)
    setup = setup_of(1, n_slots, n_ctx=220, max_seqs=8, max_batch_tokens=64)
    for layout in layouts(setup, placed):
        outcome = simulate_contiguous(setup, placed, layout)
        check_times(outcome, placed)
        assert layout.held == 0
        assert outcome.peak_slots <= n_slots
        assert (outcome.hit_rate, outcome.saved, outcome.swaps) == (0, 0, 0)
        assert layout.name.startswith("unified") or outcome.preemptions == 0


def test_a_recomputed_sequence_in_a_unified_buffer_need_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count()

    def none(*_: object) -> int:
        assert next(calls) < 1000, "no progress"
        return 0

    monkeypatch.setattr(PrefillBudget, "tokens", none)
    setup = setup_of(1, 100, n_ctx=90, max_batch_tokens=8)
    jobs = [Job(0, 4, 60, 60), Job(0, 4, 60, 60)]
    (layout,) = (made for made in layouts(setup, jobs) if made.name.startswith("unified"))
    outcome = simulate_contiguous(setup, jobs, layout)
    assert outcome.preemptions > 0
    assert layout.held == 0


def test_one_sequence_alone_takes_the_time_of_its_steps() -> None:
    """A prompt of 100 tokens in two chunks, then three tokens: by hand, for pages and contiguous layouts."""
    costs = StepCosts(step=1, prompt=0.1, decode=0.5, prompt_read=0.001, decode_read=0.01)
    setup = setup_of(n_slots=256, n_ctx=200, max_batch_tokens=64, max_seqs=4, costs=costs)
    jobs = [Job(2.0, 100, 3, 9)]
    first = (1 + 64 * (0.1 + 0.001 * 32)) + (1 + 36 * (0.1 + 0.001 * 82))
    between = [1 + 0.5 + 0.01 * 101, 1 + 0.5 + 0.01 * 102]
    outcomes = [simulate(setup, jobs)]
    outcomes += [simulate_contiguous(setup, jobs, layout) for layout in layouts(setup, jobs)[:3]]
    for outcome in outcomes:
        assert outcome.ttft_p50 == pytest.approx(first)
        assert outcome.seconds == pytest.approx(2.0 + first + sum(between))
        assert outcome.tbt_p50 == pytest.approx(sum(between) / 2)
    assert outcomes[0].peak_slots == 128
    # the second chunk fills the fourth block by 4 tokens, answers by one each; the last one is not stored
    held = [(64, 64), (128, 100), (128, 101), (128, 102)]
    seconds = [1 + 64 * (0.1 + 0.001 * 32), 1 + 36 * (0.1 + 0.001 * 82), *between]
    stored = sum(s * n for s, (_, n) in zip(seconds, held, strict=True))
    slots = sum(s * n for s, (n, _) in zip(seconds, held, strict=True))
    assert outcomes[0].waste == pytest.approx(1 - stored / slots)


def test_masked_cells_cost_time_in_a_unified_buffer() -> None:
    costs = StepCosts(step=0, prompt=1.0, decode=1.0, prompt_read=0, decode_read=1.0, masked=0.5)
    one = costs.seconds(np.array([1, 1], np.int32), np.array([10, 20], np.int32))
    assert one == 2 + 30
    assert costs.seconds(np.array([1, 1], np.int32), np.array([10, 20], np.int32), 256) == one + 0.5 * (
        246 + 236
    )


def test_the_policy_decides_what_happens_to_preempted_sequences() -> None:
    """The policy "auto" recomputes if swaps are slow, and swaps if they are fast. The others are fixed."""
    jobs = [Job(0.0, 200, 150, 150) for _ in range(8)]
    dear, cheap = StepCosts(move=1e-6), StepCosts(move=1e-12)

    @functools.cache
    def ran(policy: str, costs: StepCosts) -> Outcome:
        setup = setup_of(n_slots=1536, n_swap_blocks=64, policy=policy, costs=costs)
        return simulate(setup, jobs, audit=True)

    for costs in (dear, cheap):
        assert ran("recompute", costs).swaps == 0 < ran("recompute", costs).preemptions
        assert ran("swap", costs).swaps == ran("swap", costs).preemptions > 0
    assert ran("auto", cheap).swaps == ran("auto", cheap).preemptions
    assert ran("auto", dear).swaps <= 1, "once, to measure the cost"
    assert ran("recompute", dear).seconds < ran("swap", dear).seconds


def test_shared_prefixes_are_hits_and_save_time() -> None:
    jobs = [Job(0.0, 640, 20, 20), *(Job(5.0 + i, 640, 20, 20, 1, 0, 600) for i in range(9))]
    shared = simulate(setup_of(), jobs)
    apart = simulate(setup_of(prefix_cache=False), jobs)
    assert shared.hit_rate == pytest.approx(9 * 600 / 6400, rel=0.01)
    assert apart.hit_rate == 0
    assert shared.ttft_p50 < apart.ttft_p50 / 4


def test_a_request_that_cannot_fit_is_refused() -> None:
    setup = setup_of(n_slots=512, n_ctx=600)
    jobs = [Job(0, 400, 50, 50), Job(0, 400, 50, 150), Job(0, 580, 30, 30)]
    assert simulate(setup, jobs).refused == 2
    assert [simulate_contiguous(setup, jobs, layout).refused for layout in layouts(setup, jobs)] == [
        3,
        2,
        1,
        2,
    ]
    assert simulate_contiguous(setup, jobs[:1], Streams(512, 600, 2)).refused == 1
    nothing = simulate(setup, jobs[2:])
    assert (nothing.peak_running, nothing.seconds, nothing.tokens_per_second) == (0, 0, 0)


def test_gaps_that_are_too_small_are_not_used() -> None:
    """The first and the third sequence end. The fourth fits into both gaps together, but into neither."""
    sizes = {40: 40, 30: 30, 35: 35, 50: 50}
    layout = Reserved("pieces", 105, 200, lambda job: sizes[job.n_prompt])
    jobs = [Job(0, 40, 1, 1), Job(0, 30, 60, 60), Job(0, 35, 1, 1), Job(0, 50, 1, 1)]
    outcome = simulate_contiguous(setup_of(1, 105, n_ctx=200, max_batch_tokens=512), jobs, layout)
    assert (outcome.peak_running, outcome.peak_slots) == (3, 105), "the fourth sequence waited for the second"
    assert outcome.ttft_p99 > 60 * StepCosts().decode


def test_the_unified_buffer_runs_n_parallel_sequences() -> None:
    jobs = [Job(0.0, 50, 5, 5)] * 6
    assert simulate_contiguous(setup_of(), jobs, Unified(SLOTS, 2048, 4)).peak_running == 4
    assert [layout.name for layout in layouts(setup_of(), jobs, 4)[2:]] == ["streams: 4", "unified: 4"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_blocks": 0},
        {"block_size": 0},
        {"n_ctx": 0},
        {"max_seqs": 0},
        {"max_batch_tokens": -1},
        {"n_blocks": 1 << 26},
        {"n_swap_blocks": 1 << 40},
        {"max_batch_tokens": 1 << 40},
        {"policy": "always"},
        {"max_seqs": 1 << 20, "max_batch_tokens": 1 << 20, "n_ctx": 1 << 20},
    ],
)
def test_invalid_setups_raise(wrong: dict[str, object]) -> None:
    good = {"n_blocks": 576, "block_size": 32, "block_bytes": 32, "n_ctx": 2048}
    with pytest.raises(ConfigError):
        Setup(**{**good, **wrong})  # type: ignore[arg-type]


def test_invalid_costs_raise() -> None:
    for wrong in ({"step": -1.0}, {"decode": float("nan")}, {"step": 0.0, "decode": 0.0}):
        with pytest.raises(ConfigError):
            StepCosts(**wrong)
    with pytest.raises(ConfigError):
        Streams(512, 600, 0)


def test_outcomes_do_not_depend_on_recording(tmp_path: Path) -> None:
    jobs = chats(5, 20)
    assert asdict(simulate(setup_of(), jobs)) == asdict(
        simulate(setup_of(), jobs, record=tmp_path / "run.trace")
    )
