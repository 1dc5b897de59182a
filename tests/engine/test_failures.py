"""Errors in the middle of a step: what they leave behind goes on, ends or is computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pyvelo.engine.request import Request
from pyvelo.errors import ComputeError, InternalError
from pyvelo.grammar.matcher import GrammarMatcher
from pyvelo.kv.records import Event

from .fakes import Bench, FakeSampler, answer
from .test_samples import group


def once(error: BaseException, call: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that does what `call` does, and raises behind it the first time."""
    errors = [error]

    def function(*args: Any) -> Any:
        result = call(*args) if call is not None else None
        if errors:
            raise errors.pop()
        return result

    return function


@pytest.mark.parametrize("name", ["sample", "logprobs"])
def test_no_sampler_draws_a_token_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_batch_tokens=16)
    *drawing, reading = (bench.submit(prompt, 5, logprobs=0) for prompt in ([1], [2], [3] * 40))
    n_drawn: list[int] = []
    sample = bench.context.sample

    def count(rows: Any, samplers: Sequence[FakeSampler]) -> Any:
        n_drawn.extend(map(id, samplers))
        return sample(rows, samplers)

    monkeypatch.setattr(bench.context, "sample", count)
    monkeypatch.setattr(bench.context, name, once(KeyboardInterrupt(), getattr(bench.context, name)))
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    assert len(n_drawn) == 2
    assert [request.finish_reason for request in drawing] == ["abort"] * 2
    bench.finish(reading)
    assert reading.generated_ids == answer([3] * 40, 5)
    bench.assert_idle()


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
def test_samples_start_although_one_of_them_cannot(failing: int, error: BaseException) -> None:
    def make(request: Request) -> FakeSampler:
        if request is requests[failing]:
            raise error
        return FakeSampler()

    bench = Bench()
    bench.make_sampler = make
    requests = group(bench, 4)
    try:
        bench.step()
    except KeyboardInterrupt:
        bench.manager.audit()
    bench.finish(*requests)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert requests[failing].finish_reason == ("abort" if interrupted else "error")
    for request in requests:
        wanted = answer(request.prompt_ids, 6)
        assert request.generated_ids == (wanted if request.finish_reason == "length" else ())
    assert sum(request.finish_reason == "length" for request in requests) == (2 if interrupted else 3)
    bench.assert_idle()


def test_a_session_whose_token_was_lost_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between the forward pass and the token leaves all tokens computed: there is none to feed."""
    bench = Bench()
    sequence = bench.sequence(range(1, 65))
    monkeypatch.setattr(bench.manager, "advance", once(ZeroDivisionError(), bench.manager.advance))
    request, other = bench.go_on(sequence), bench.submit([1])
    bench.finish(request, other)
    assert (request.finish_reason, request.generated_ids) == ("error", ())
    assert other.generated_ids == answer([1], 4)
    request, other = bench.go_on(sequence), bench.submit([2])
    bench.finish(request, other)
    assert request.generated_ids == answer(range(1, 65), 4)
    assert other.generated_ids == answer([2], 4)
    bench.core.inbox.release(sequence)
    bench.core.settle()
    bench.assert_idle()


@pytest.mark.parametrize("kind", ["stored", "hit", "evicted", "duplicate", "copied", "swapped", "reset"])
@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_an_observer_that_fails_leaves_no_block_half_moved(kind: str, error: BaseException) -> None:
    """Its error is raised when the core looks into its inbox next."""
    bench = Bench(n_blocks=6, block_size=8, n_swap_blocks=3, max_batch_tokens=16)
    errors: list[BaseException] = []

    def fail(event: Event) -> None:
        if event.kind == kind and not errors:
            errors.append(error)
            raise error

    bench.manager.set_observer(fail)
    prompts = [[1] * 16, [1] * 20, [2] * 16, [2] * 16, [1] * 9 + [3] * 9]
    requests = [bench.submit(prompt, 12) for prompt in prompts * 2]
    raised: list[BaseException] = []

    def survive(call: Callable[[], object]) -> None:
        try:
            call()
        except (ZeroDivisionError, KeyboardInterrupt) as error:
            raised.append(error)

    while not all(request.finished for request in requests):
        if bench.core.counters.steps == 20:
            bench.manager.reset()
        survive(bench.step)
        bench.manager.audit()
    survive(bench.core.settle)
    assert raised == errors == [error]
    assert [request.generated_ids for request in requests] == [answer(prompt, 12) for prompt in prompts * 2]
    bench.assert_idle()


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_recovery_ends_every_request_before_it_fails_again(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    running, waiting = bench.submit([2] * 40), bench.submit([3] * 40)
    bench.step()
    monkeypatch.setattr(bench.manager, "clear", once(error, bench.manager.clear))
    with pytest.raises(type(error)):
        bench.core.recover(InternalError("broken"))
    assert [str(request.error) for request in (running, waiting)] == ["broken"] * 2
    assert running.finish_reason == waiting.finish_reason == "error"
    bench.assert_idle()


def test_a_request_whose_prompt_cannot_be_scored_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matcher(GrammarMatcher):
        def mask(self) -> bytes:
            raise ComputeError("no token can come next")

    bench = Bench()
    request = bench.request([2] * 10, prompt_logprobs=1)
    request.matcher, ended = Matcher(None), list[Request]()
    request.on_end = ended.append
    bench.core.inbox.submit([request])
    monkeypatch.setattr(bench.context, "logprobs", once(ComputeError("not finite")))
    bench.step()
    assert (ended, str(request.error)) == ([request], "not finite")
    assert (request.parent.n_open, bench.core.counters.failed) == (0, 1)
    bench.assert_idle()


class Arrivals(deque[Request]):
    """Queue to which another thread appends a request when it is read first."""

    def __init__(self, late: Request) -> None:
        super().__init__()
        self.late = [late]

    def __iter__(self) -> Iterator[Request]:
        yield from list(super().__iter__())
        self.extend(self._taken())

    def popleft(self) -> Request:
        request = super().popleft()
        self.extend(self._taken())
        return request

    def _taken(self) -> list[Request]:
        late, self.late = self.late, []
        return late


def test_a_request_that_arrives_within_a_recovery_is_not_lost() -> None:
    bench = Bench()
    late = bench.request([3] * 40)
    bench.core.inbox._arrivals = Arrivals(late)
    failed = bench.submit([2] * 40)
    bench.core.recover(InternalError("broken"))
    assert failed.finish_reason == "error"
    bench.finish(late)
    bench.assert_idle()


def test_samples_arrive_together_although_another_thread_recovers() -> None:
    bench = Bench()
    samples = [bench.request([2] * 40) for _ in range(3)]
    samples[0].hold(samples[1:])

    def recovered() -> Iterator[Request]:
        yield samples[0]
        bench.core.recover(InternalError("broken"))
        yield from samples[1:]

    bench.core.inbox.submit(recovered())
    bench.finish(*samples)
    assert [sample.generated_ids for sample in samples] == [answer([2] * 40, 4)] * 3
    bench.assert_idle()
