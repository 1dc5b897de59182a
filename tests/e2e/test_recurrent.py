"""LLM on models with recurrent layers: states of running sequences, and snapshots of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from pyvelo.engine.engine import Engine

from .conftest import MakeModel

PROMPTS = [[3 + (7 * i + j) % 250 for j in range(5 + 13 * i)] for i in range(7)]
LONG = [3 + (j * j + 5 * j) % 250 for j in range(141)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ARCHS = ("lfm2", "granitehybrid", "qwen35", "mamba2")
"""Short convolutions, Mamba 2 and gated delta nets beside attention, and Mamba 2 alone."""


def small(make_model: MakeModel, arch: str, kind: str = "f32") -> Path:
    return make_model("--arch", arch, "--layers", "2", "--embd", "128", "--head-dim", "32", "--type", kind)


# quantized too: AMX multiplies quantized weights, and here activations have three dimensions
@pytest.fixture(scope="module", params=[(arch, "f32") for arch in ARCHS] + [("lfm2", "q8_0")])
def model(make_model: MakeModel, request: pytest.FixtureRequest) -> Path:
    return small(make_model, *request.param)


@pytest.fixture(scope="module", params=ARCHS)
def exact(make_model: MakeModel, request: pytest.FixtureRequest) -> Path:
    """A model whose answers are compared bit by bit."""
    return small(make_model, request.param)


Answer = Callable[[Sequence[int]], tuple[int, ...]]


@pytest.fixture(scope="module")
def alone(exact: Path) -> Iterator[Answer]:
    """Return what a prompt gets without a cache."""
    with LLM(exact, n_ctx=512, n_threads=1, deterministic=True, prefix_cache=False) as llm:
        yield lambda prompt: llm.generate(list(prompt), GREEDY)[0].token_ids


def opened(path: Path, **settings: Any) -> LLM:
    return LLM(path, **{"n_ctx": 512, "n_threads": 1, "deterministic": True, **settings})


def assert_idle(llm: LLM) -> None:
    engine: Engine = llm._engine
    states = engine.core._states
    assert states is not None
    assert sorted(states.free) == list(range(engine.limits.max_seqs)), "every state was given back"
    assert llm.stats().blocks_used == 0
    engine.core.manager.audit()


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, n_ctx=512, max_num_seqs=3, max_batch_tokens=40, n_threads=1) as made:
        yield made
        assert_idle(made)


@pytest.fixture
def each_alone(model: Path, request: pytest.FixtureRequest) -> list[tuple[int, ...]]:
    """What each prompt gets when nothing else was ever run."""
    answers = []
    for prompt in PROMPTS:
        with LLM(model, n_ctx=512, max_num_seqs=1, n_threads=1) as llm:
            answers.append(llm.generate(prompt, params_of(request))[0].token_ids)
    return answers


def params_of(request: pytest.FixtureRequest) -> SamplingParams:
    """How many rows a step has decides how products with quantized weights round: answers begin alike."""
    return replace(GREEDY, max_tokens=4) if "model4" in request.node.name else GREEDY


def test_states_are_counted(llm: LLM) -> None:
    assert llm._engine.context.info.n_states == 3
    assert llm.stats().state_bytes > 0
    assert llm.info.state_bytes >= llm.stats().state_bytes / 3


def test_more_sequences_than_states(
    llm: LLM, each_alone: list[tuple[int, ...]], request: pytest.FixtureRequest
) -> None:
    """Prompts run in pieces, sequences come and go, states are used again."""
    assert [output.token_ids for output in llm.generate(PROMPTS, params_of(request))] == each_alone


def test_a_cancelled_one_leaves_nothing_in_its_state(
    llm: LLM, each_alone: list[tuple[int, ...]], request: pytest.FixtureRequest
) -> None:
    for prompt in PROMPTS[:4]:
        pieces = llm.stream(prompt, GREEDY)
        next(pieces)
        pieces.close()
    outputs = llm.generate(PROMPTS[3:5], params_of(request))
    assert [output.token_ids for output in outputs] == each_alone[3:5]


def test_the_next_turn_computes_its_new_tokens(exact: Path, alone: Answer) -> None:
    with opened(exact) as llm:
        first = llm.generate(LONG, GREEDY)[0]
        again = llm.generate(LONG, GREEDY)[0]
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 128)
        turn = [*LONG, *first.token_ids, *range(3, 20)]
        second = llm.generate(turn, GREEDY)[0]
        assert second.usage.cached_tokens == 128
        third = llm.generate([*turn, *second.token_ids, 9], GREEDY)[0]
        assert third.usage.cached_tokens == 160
        assert first.token_ids == again.token_ids == alone(LONG)
        assert second.token_ids == alone(turn)
        assert third.token_ids == alone([*turn, *second.token_ids, 9])
        assert_idle(llm)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sessions_forks_samples_and_beams(exact: Path, alone: Answer, prefix_cache: bool) -> None:
    with opened(exact, prefix_cache=prefix_cache) as llm:
        session = llm.session(LONG[:50])
        first = session.generate(GREEDY)
        session.append([5, 6])
        fork = session.fork()
        fork.append([7] * 40)
        twin = fork.fork()
        second, third, fourth = session.generate(GREEDY), fork.generate(GREEDY), twin.generate(GREEDY)
        so_far = [*LONG[:50], *first.token_ids, 5, 6]
        assert first.token_ids == alone(LONG[:50])
        assert second.token_ids == alone(so_far)
        assert third.token_ids == fourth.token_ids == alone([*so_far, *[7] * 40])
        assert second.usage.cached_tokens >= len(so_far) - 2
        assert fourth.usage.cached_tokens == len(so_far) + 39
        for each in (session, fork, twin):
            each.close()
        samples = llm.generate(LONG, replace(GREEDY, n=3))[0]
        assert {completion.token_ids for completion in samples.outputs} == {alone(LONG)}
        beams = llm.beam_search(LONG, BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))
        assert beams[0].token_ids == alone(LONG)
        wide = llm.beam_search(LONG, BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
        assert len({completion.token_ids for completion in wide[0].outputs}) == 4
        assert_idle(llm)


@pytest.mark.parametrize("swap", [False, True])
def test_preempted_sequences_go_on_with_their_states(
    exact: Path, alone: Answer, swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VELO_DEBUG", "1")
    prompts = [[*LONG[:40], *(n + 3 for n in prompt)] for prompt in PROMPTS[:5]]
    with opened(exact) as llm:
        size, has_cache = llm.geometry.block_bytes, bool(llm._engine.model.layers)
    settings = {"n_ctx": 256, "kv_cache_bytes": 8 * size, "swap_bytes": 400 * size * swap}
    with opened(exact, max_num_seqs=4, **settings) as llm:
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=90))
        stats = llm.stats()
        assert_idle(llm)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids[:12] == alone(prompt)
    # sequences of recurrent layers alone hold too few blocks to be preempted
    assert (stats.preemptions > 0) == has_cache
    assert (stats.swaps > 0) == (swap and has_cache)


def test_async_streams_share_snapshots(exact: Path, alone: Answer) -> None:
    async def ask() -> None:
        async with AsyncLLM(exact, n_ctx=512, n_threads=1, deterministic=True) as llm:
            prompts = [[*LONG, 3 + n] for n in range(6)]
            await llm.generate(prompts[0], GREEDY)
            outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts))
            assert [output[0].token_ids for output in outputs] == [alone(prompt) for prompt in prompts]
            assert all(output[0].usage.cached_tokens == 128 for output in outputs)

    asyncio.run(ask())


def test_cancelled_steps_spoil_no_state(exact: Path, alone: Answer) -> None:
    """A step that is cut short leaves cells of upstream's memory in the middle of a move."""
    prompts = [[*prompt, 3 + n] for n, prompt in enumerate(PROMPTS)]
    with opened(exact, max_num_seqs=3, max_batch_tokens=40) as llm:
        core, context = llm._engine.core, llm._engine.context
        call_run, steps = core._call_run, itertools.count(1)

        def cut(run: Callable[[], None]) -> None:
            if next(steps) % 3:
                call_run(run)
                return
            done = threading.Event()

            def cancel() -> None:
                while not done.is_set():
                    context.cancel()

            thread = threading.Thread(target=cancel)
            thread.start()
            try:
                call_run(run)
            finally:
                done.set()
                thread.join()

        core._call_run = cut
        outputs = llm.generate(prompts, [replace(GREEDY, max_tokens=3 + n) for n in range(len(prompts))])
        core._call_run = call_run
        again = llm.generate(prompts, GREEDY)
        for n, (prompt, first, second) in enumerate(zip(prompts, outputs, again, strict=True)):
            assert first.token_ids == alone(prompt)[: 3 + n]
            assert second.token_ids == alone(prompt)
        assert_idle(llm)
