"""Prompt tokens are scored once each, with any chunks and any preemption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.engine.output import Scored, score_prompts
from pyvelo.engine.request import Request
from pyvelo.engine.scheduler import schedule
from pyvelo.errors import ComputeError
from pyvelo.memory.budget import SCORED_TOKENS
from pyvelo.outputs import StreamPiece, TokenLogprob

from .fakes import Bench, answer, next_token
from .test_samples import group

PROMPT = [7 * i % 90 + 1 for i in range(150)]


def scores(prompt: Sequence[int]) -> list[float]:
    """What the toy model makes of every token but the first, alone."""
    said = [next_token(prompt[:at]) for at in range(1, len(prompt))]
    return [-(t + (0 if t == s else s)) / 100 for t, s in zip(prompt[1:], said, strict=True)]


def check(request: Request) -> None:
    prompt = list(request.prompt_ids)
    assert [token.token_id for token in request.prompt_logprobs] == prompt[1:]
    assert [token.logprob for token in request.prompt_logprobs] == pytest.approx(scores(prompt))
    assert request.scored_prompt == (None, *request.prompt_logprobs)


def n_outputs(bench: Bench) -> int:
    return sum(step.n_outputs for step in bench.context.steps)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("max_batch_tokens", [16, 65, 512])
def test_every_token_is_scored_once_however_the_prompt_is_cut(max_batch_tokens: int, share: bool) -> None:
    bench = Bench(max_batch_tokens=max_batch_tokens, share=share)
    requests = [
        bench.submit(PROMPT, 3, prompt_logprobs=2),
        bench.submit(PROMPT, 3),
        bench.submit([5], 3, prompt_logprobs=0),
        bench.submit(PROMPT[:70], 3, prompt_logprobs=0),
    ]
    bench.finish(*requests)
    for request in requests:
        assert request.generated_ids == answer(request.prompt_ids, 3)
    for request in (requests[0], requests[2], requests[3]):
        check(request)
    assert requests[1].prompt_logprobs == []
    assert requests[1].scored_prompt is None
    assert all(token.top == ((0, 0.0), (1, -0.01)) for token in requests[0].prompt_logprobs)
    assert n_outputs(bench) == 149 + 69 + 4 * 3
    assert max(step.n_outputs for step in bench.context.steps) <= bench.core.limits.max_outputs
    bench.assert_idle()


def test_a_step_has_so_many_rows_and_each_request_advances() -> None:
    bench = Bench(max_batch_tokens=512, n_blocks=32)
    requests = [bench.submit([i, *PROMPT], 1, prompt_logprobs=0) for i in range(1, 4)]
    bench.step()
    assert bench.context.steps[0].n_tokens == [SCORED_TOKENS + 1, 1, 1]
    bench.finish(*requests)
    for request in requests:
        check(request)
    assert max(step.n_outputs for step in bench.context.steps) == SCORED_TOKENS + 3


def test_logits_are_not_in_the_cache_but_what_was_computed_for_them_is() -> None:
    bench = Bench()
    first = bench.submit(PROMPT, 1)
    bench.finish(first)
    second = bench.submit(PROMPT, 1, prompt_logprobs=0)
    bench.finish(second)
    assert second.n_cached == 0
    check(second)
    bench = Bench()
    bench.finish(bench.submit(PROMPT, 1, prompt_logprobs=0))
    third = bench.submit(PROMPT, 1)
    bench.finish(third)
    assert third.n_cached == 128, "its four full blocks"


def test_samples_have_the_same_and_compute_it_once() -> None:
    bench = Bench(n_blocks=64)
    requests = group(bench, 4, PROMPT, prompt_logprobs=1)
    for request in requests:
        request.prompt_logprobs = requests[0].prompt_logprobs
    bench.finish(*requests)
    for request in requests:
        check(request)
        assert request.generated_ids == answer(PROMPT, 6)
    assert n_outputs(bench) == 149 + 1 + 4 * 5, "those who join draw from the row that is there"


@pytest.mark.parametrize("max_batch_tokens", [64, 1000])
def test_samples_that_cannot_share_blocks_share_what_is_known(max_batch_tokens: int) -> None:
    bench = Bench(n_blocks=64, n_states=8, max_batch_tokens=max_batch_tokens)
    requests = [bench.request(PROMPT, 6, prompt_logprobs=1) for _ in range(3)]
    for request in requests:
        request.prompt_logprobs = requests[0].prompt_logprobs
    bench.core.inbox.submit(requests)
    bench.finish(*requests)
    for request in requests:
        check(request)
        assert request.generated_ids == answer(PROMPT, 6)
    bench.assert_idle()


def test_a_sample_goes_on_where_the_first_one_was_cancelled() -> None:
    bench = Bench(max_batch_tokens=32)
    requests = group(bench, 2, PROMPT, prompt_logprobs=0)
    requests[1].prompt_logprobs = requests[0].prompt_logprobs
    for _ in range(2):
        bench.step()
    bench.core.inbox.cancel(requests[:1])
    bench.finish(*requests)
    assert requests[1].generated_ids == answer(PROMPT, 6)
    check(requests[1])
    assert n_outputs(bench) == 149 + 6


def test_one_that_cannot_be_scored_fails_alone() -> None:
    bench = Bench()
    score = bench.context.logprobs

    def fail_once(rows: Any, tokens: Any, k: int) -> tuple[Any, Any, Any]:
        if k == 3:
            raise ComputeError("a NaN")
        return score(rows, tokens, k)

    bench.context.logprobs = fail_once  # type: ignore[method-assign]
    requests = [bench.submit([i, *range(1, 9)], 4, prompt_logprobs=i) for i in (2, 3, 4)]
    # its logits are computed, too
    bench.context.rows_scored = set()
    bench.context.sample = _without_check(bench)  # type: ignore[method-assign]
    bench.finish(*requests)
    assert [str(request.error) for request in requests] == ["None", "a NaN", "None"]
    for request in (requests[0], requests[2]):
        check(request)
        assert request.generated_ids == answer(request.prompt_ids, 4)
    assert requests[1].scored_prompt is None
    bench.assert_idle()


def _without_check(bench: Bench) -> Any:
    sample = bench.context.sample

    def drawn(rows: Any, samplers: Any) -> Any:
        bench.context.rows_scored |= set(range(len(bench.context.drawn))) - set(rows.tolist())
        return sample(rows, samplers)

    return drawn


def test_the_first_piece_of_a_stream_brings_them() -> None:
    bench = Bench()
    pieces: list[StreamPiece] = []
    request = bench.submit(PROMPT, 3, pieces.append, prompt_logprobs=0)
    bench.finish(request)
    assert [piece.prompt_logprobs for piece in pieces] == [request.scored_prompt, None, None]


def test_an_interrupted_step_scores_nothing_twice() -> None:
    bench = Bench(max_batch_tokens=40)
    request = bench.submit(PROMPT, 2, prompt_logprobs=0)
    score, calls = bench.context.logprobs, []

    def interrupted(rows: Any, tokens: Any, k: int) -> tuple[Any, Any, Any]:
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(rows, tokens, k)

    bench.context.logprobs = interrupted  # type: ignore[method-assign]
    bench.step()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.finish(request)
    check(request)
    assert request.generated_ids == answer(PROMPT, 2)


@settings(max_examples=60, deadline=None)
@given(
    n_blocks=st.integers(6, 14),
    max_batch_tokens=st.sampled_from([8, 24, 100]),
    share=st.booleans(),
    n_swap_blocks=st.sampled_from([0, 40]),
    n_states=st.sampled_from([0, 0, 4]),
    jobs=st.lists(
        st.tuples(
            st.integers(0, 2),  # which beginning
            st.integers(1, 34),  # tokens
            st.integers(1, 14),  # answer
            st.sampled_from([None, 0, 2]),
            st.integers(0, 1),  # priority
            st.integers(0, 6),  # steps before the next comes
        ),
        min_size=1,
        max_size=7,
    ),
)
def test_scores_survive_everything(
    n_blocks: int,
    max_batch_tokens: int,
    share: bool,
    n_swap_blocks: int,
    n_states: int,
    jobs: list[tuple[int, int, int, int | None, int, int]],
) -> None:
    bench = Bench(
        n_blocks=n_blocks,
        block_size=8,
        max_seqs=4,
        max_batch_tokens=max_batch_tokens,
        share=share,
        n_swap_blocks=n_swap_blocks,
        n_states=n_states,
    )
    requests = []
    for beginning, n_prompt, n_new, asked, priority, pause in jobs:
        prompt = [beginning * 100 + i % 13 + 1 for i in range(n_prompt)]
        requests.append(bench.submit(prompt, n_new, prompt_logprobs=asked, priority=priority))
        for _ in range(pause):
            bench.step()
    bench.finish(*requests)
    n_scored = 0
    for request, job in zip(requests, jobs, strict=True):
        assert request.generated_ids == answer(request.prompt_ids, job[2])
        if job[3] is not None:
            check(request)
            n_scored += job[1] - 1
    assert n_outputs(bench) == n_scored + sum(job[2] for job in jobs), "none twice, none for nothing"
    bench.assert_idle()


def test_a_chunk_that_scores_nothing_stops_no_other_one() -> None:
    """Its tokens were scored before a preemption, and are only computed again."""
    bench = Bench()
    again, other = (bench.request(PROMPT[:9], 3, prompt_logprobs=0) for _ in range(2))
    bench.context.drawn = [next_token(PROMPT[:at]) for at in range(1, 9)]
    pieces = [Scored(again, 4, 0, 0), Scored(other, 0, 0, 8)]
    score_prompts(cast(Any, bench.context), pieces, lambda requests, error: pytest.fail(str(error)))
    assert not again.prompt_logprobs
    check(other)


def test_tokens_that_are_computed_again_are_not_scored_again() -> None:
    """A chunk that ends long before the scored tokens do has no rows, and moves no row of others."""
    bench = Bench(n_blocks=16, block_size=8, max_batch_tokens=16)
    again, other = bench.request(PROMPT[:40], 3, prompt_logprobs=0), bench.request([5], 3)
    again.prompt_logprobs = [TokenLogprob(token, 0.0, ()) for token in PROMPT[1:30]]
    for arrival, request in enumerate((again, other)):
        request.arrival = arrival
    plan = schedule([again, other], [], bench.manager, bench.core.limits)
    bench.manager.commit(plan.allocation)
    batch = bench.core._batches.build(plan)
    assert [chunk.n_tokens for chunk in plan.chunks] == [15, 1] or plan.chunks[0].n_tokens == 16
    assert [piece.n_tokens for piece in batch.scored] == [0]
    assert not bench.core._arrays.outputs[: plan.chunks[0].n_tokens].any()


def test_a_chunk_that_ends_with_the_scored_tokens_leaves_all_rows_to_others() -> None:
    tokens = list(range(1, 601))
    bench = Bench(n_blocks=64, n_states=2, max_batch_tokens=700)
    again, other = (bench.request(tokens, 3, prompt_logprobs=0) for _ in range(2))
    again.prompt_logprobs = [TokenLogprob(token, 0.0, ()) for token in tokens[1:513]]  # up to a snapshot
    other.arrival = 1
    plan = schedule([again, other], [], bench.manager, bench.core.limits)
    assert [chunk.n_tokens for chunk in plan.chunks] == [512, SCORED_TOKENS + 1]


def test_an_entry_of_few_possible_tokens_names_no_token_that_is_missing() -> None:
    bench = Bench()
    request = bench.request([5, 6], 1, prompt_logprobs=3)

    class Few:
        def logprobs(self, rows: Any, tokens: Any, k: int) -> tuple[Any, Any, Any]:
            return np.array([-1.0]), np.array([[6, -1, -1]]), np.array([[-1.0, 0.0, 0.0]])

    score_prompts(cast(Any, Few()), [Scored(request, 0, 0, 1)], lambda *_: None)
    assert request.prompt_logprobs[0].top == ((6, -1.0),)


def test_a_sample_that_scores_less_keeps_what_another_has_scored() -> None:
    """Two samples share the logprobs of their prompt, and one of them computes fewer tokens in the step."""
    bench = Bench()
    first, second = (bench.request(PROMPT[:9], 3, prompt_logprobs=0) for _ in range(2))
    second.prompt_logprobs = first.prompt_logprobs
    bench.context.drawn = [next_token(PROMPT[:at]) for at in (*range(1, 9), *range(1, 5))]
    pieces = [Scored(first, 0, 0, 8), Scored(second, 0, 8, 4)]
    score_prompts(cast(Any, bench.context), pieces, lambda requests, error: pytest.fail(str(error)))
    check(first)
