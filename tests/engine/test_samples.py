"""Several samples of one prompt: it is computed once, and they fork where it ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pyvelo.engine.output import Submission
from pyvelo.engine.request import Request
from pyvelo.outputs import TokenLogprob

from .fakes import Bench, FakeSampler, answer

PROMPT = [5 * i % 70 + 1 for i in range(45)]


def group(bench: Bench, n: int, prompt: list[int] = PROMPT, max_new: int = 6, **params: Any) -> list[Request]:
    """What InputProcessor makes of n=..., submitted."""
    requests = [bench.request(prompt, max_new, **params) for _ in range(n)]
    requests[0].hold(requests[1:])
    bench.core.inbox.submit(requests)
    return requests


def fed(bench: Bench) -> int:
    return sum(sum(step.n_tokens) for step in bench.context.steps)


@pytest.mark.parametrize("share", [True, False])
def test_the_prompt_is_computed_once(share: bool) -> None:
    bench = Bench(share=share)
    requests = group(bench, 5)
    bench.finish(*requests)
    assert [request.generated_ids for request in requests] == [answer(PROMPT, 6)] * 5
    assert fed(bench) == len(PROMPT) + 5 * 5
    assert [request.n_cached for request in requests] == [0, 45, 45, 45, 45]
    bench.assert_idle()


def test_they_share_blocks_until_they_write() -> None:
    bench = Bench(n_blocks=32)
    requests = group(bench, 5)
    while not requests[0].n_generated:
        bench.step()
    assert bench.manager.n_used == 2
    bench.step()
    assert bench.manager.n_used == 1 + 5
    assert bench.context.n_copies == 4
    bench.finish(*requests)


def test_logprobs_go_to_the_samples_that_requested_them() -> None:
    bench = Bench()
    shown: list[object] = []
    first = bench.submit(PROMPT, 3, logprobs=2, on_piece=lambda piece: shown.append(piece.logprob))
    second = bench.submit([1], 3)
    third = bench.submit([2], 3, logprobs=0)
    bench.finish(first, second, third)
    for request, n in ((first, 2), (third, 0)):
        assert [token.token_id for token in request.logprobs] == list(request.generated_ids)
        assert [token.logprob for token in request.logprobs] == [-t / 100 for t in request.generated_ids]
        assert all(token.top == tuple((i, -i / 100) for i in range(n)) for token in request.logprobs)
    assert shown == first.logprobs
    assert second.logprobs == []


def test_a_token_that_cannot_be_drawn_has_no_logprob() -> None:
    bench = Bench()
    bench.make_sampler = lambda request: FakeSampler(status=int(request.tokens[0] == 1))
    failing, other = bench.submit([1], 3, logprobs=1), bench.submit([2], 3, logprobs=1)
    bench.finish(failing, other)
    assert failing.error is not None
    assert failing.logprobs == []
    assert len(other.logprobs) == 3


@pytest.mark.parametrize("n_prompt", [1, 31, 32, 33, 64])
def test_prompts_of_every_length(n_prompt: int) -> None:
    bench = Bench(n_blocks=32)
    prompt = PROMPT[:1] * n_prompt
    requests = group(bench, 3, prompt, 40)
    bench.finish(*requests)
    assert [request.generated_ids for request in requests] == [answer(prompt, 40)] * 3
    bench.assert_idle()


def test_a_single_token_each() -> None:
    bench = Bench()
    requests = group(bench, 4, max_new=1)
    bench.finish(*requests)
    assert [request.generated_ids for request in requests] == [answer(PROMPT, 1)] * 4
    assert fed(bench) == len(PROMPT)
    bench.assert_idle()


def test_a_sample_without_a_place_waits() -> None:
    bench = Bench(max_seqs=2)
    requests = group(bench, 5)
    assert bench.core.n_waiting == 5
    bench.finish(*requests)
    assert [request.generated_ids for request in requests] == [answer(PROMPT, 6)] * 5
    bench.assert_idle()


def test_a_small_pool() -> None:
    bench = Bench(n_blocks=5)
    requests = group(bench, 6, max_new=60)
    bench.finish(*requests)
    assert [request.generated_ids for request in requests] == [answer(PROMPT, 60)] * 6
    bench.assert_idle()


def test_the_first_is_cancelled_before_its_prompt_is_computed() -> None:
    bench = Bench(max_batch_tokens=16)
    requests = group(bench, 3)
    bench.step()
    bench.core.inbox.cancel([requests[0], requests[1]])
    bench.finish(*requests)
    assert [request.finish_reason for request in requests] == ["abort", "abort", "length"]
    assert requests[2].generated_ids == answer(PROMPT, 6)
    bench.assert_idle()


def test_the_first_fails_and_the_others_do_not() -> None:
    bench = Bench()
    made = iter([FakeSampler(status=1), FakeSampler(), FakeSampler()])
    bench.make_sampler = lambda request: next(made)
    requests = group(bench, 3)
    bench.finish(*requests)
    assert [request.finish_reason for request in requests] == ["error", "length", "length"]
    assert requests[2].generated_ids == answer(PROMPT, 6)
    bench.assert_idle()


def test_cancel_all_ends_held_samples() -> None:
    bench = Bench(max_batch_tokens=16)
    requests = group(bench, 4)
    bench.step()
    bench.core.cancel_all()
    assert all(request.finish_reason == "abort" for request in requests)
    bench.assert_idle()


def test_a_sampler_that_cannot_be_made_ends_its_sample_only() -> None:
    bench = Bench()
    made = iter([FakeSampler(), None, FakeSampler()])

    def make(request: Request) -> FakeSampler:
        sampler = next(made)
        if sampler is None:
            raise ValueError("no sampler")
        return sampler

    bench.make_sampler = make
    requests = group(bench, 3)
    bench.finish(*requests)
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert requests[1].error is not None
    assert requests[1].error.__traceback__ is None, "its frames would keep the requests alive"
    bench.assert_idle()


def test_samples_behind_a_cancelled_one_start_with_the_others() -> None:
    bench = Bench()
    requests = group(bench, 4)
    bench.core.inbox.cancel([requests[1]])
    while not requests[0].n_generated:
        bench.step()
    assert [request.n_generated for request in requests] == [1, 0, 1, 1]
    bench.finish(*requests)
    assert [request.finish_reason for request in requests] == ["length", "abort", "length", "length"]
    bench.assert_idle()


def test_a_request_has_ended_with_the_last_of_its_samples() -> None:
    bench = Bench()
    first, second = bench.submit([1], 1), bench.submit([2], 3)
    both = Submission(None, (first, second), 2)
    bench.finish(first)
    assert not both.finished
    bench.finish(second)
    assert both.finished


def test_samples_that_compete_are_compared_by_their_mean_logprob() -> None:
    bench = Bench()
    request, plain = bench.request(PROMPT, 2, best_of=2), bench.request(PROMPT, 2)
    assert (request.n_logprobs, plain.n_logprobs) == (0, None)
    assert request.mean_logprob == -math.inf
    request.logprobs = [TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)]
    assert request.mean_logprob == -1.5


def test_the_likeliest_samples_come_first_and_failed_ones_last() -> None:
    bench = Bench()
    samples = [bench.submit([number], 1) for number in (1, 2, 3)]
    bench.finish(*samples)
    for sample, logprob in zip(samples, (-0.1, -3.0, -2.0), strict=True):
        sample.logprobs = [TokenLogprob(1, logprob)]
    samples[0].error = ValueError("no text")
    for n, order in ((2, [3, 2]), (1, [3]), (3, [1, 2, 3])):
        outputs = Submission(None, tuple(samples), n).output().outputs
        assert [each.token_ids for each in outputs] == [answer([number], 1) for number in order]


def test_a_step_of_priority_is_worth_64_arrivals() -> None:
    bench = Bench()
    later, low = bench.request([1]), bench.request([2], priority=1)
    later.arrival, low.arrival = 64, 0
    assert low.rank < later.rank
    later.arrival = 63
    assert later.rank < low.rank
    later.arrival = 65
    assert low.rank < later.rank


def test_samples_held_by_their_prompt_count_as_waiting() -> None:
    bench = Bench(max_batch_tokens=16)
    requests = group(bench, 4)
    bench.step()
    assert (bench.core.n_running, bench.core.n_waiting) == (1, 3)
    bench.finish(*requests)
    assert (bench.core.n_running, bench.core.n_waiting) == (0, 0)
