"""The step loop over a toy model that checks every slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.engine.prefill_budget import Costs
from pyvelo.engine.queues import Inbox
from pyvelo.engine.request import Request
from pyvelo.engine.step import BlockMover
from pyvelo.errors import Cancelled, ComputeError, InternalError, ModelError
from pyvelo.kv.records import Copy, Moves
from pyvelo.outputs import StreamPiece, Usage

from .fakes import END, Bench, FakeSampler, answer, joined, text_of


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    bench = Bench()
    ended = bench.submit([1, 2, 3], 100, timeout=0)
    late, other = bench.submit([4, 5], 100, timeout=3600), bench.submit([6], 100)
    for _ in range(5):
        bench.step()
    assert (ended.finish_reason, ended.generated_ids) == ("timeout", ())
    late.submitted -= 3600  # as if so much time had passed
    bench.core.inbox.deadlines.note(late)
    bench.step()
    assert late.finish_reason == "timeout"
    assert late.generated_ids == answer([4, 5], 5)
    bench.finish(other)
    assert other.generated_ids == answer([6], 100)
    bench.assert_idle()


def test_deadlines_of_what_has_ended_are_forgotten() -> None:
    bench = Bench()
    for number in range(300):
        bench.finish(bench.submit([number + 1], 1, timeout=3600))
    assert len(bench.core.inbox.deadlines) < 100


def test_one_request_gives_the_answer() -> None:
    bench = Bench()
    request = bench.submit([5, 6, 7], 40)
    bench.finish(request)
    assert request.generated_ids == answer([5, 6, 7], 40)
    assert request.text == text_of(request.generated_ids)
    assert request.finish_reason == "length"
    bench.assert_idle()


def test_blocks_are_taken_one_by_one() -> None:
    bench = Bench()
    request = bench.submit([1] * 30, 40)
    used = []
    while not request.finished:
        bench.step()
        used.append(bench.manager.n_used)
    assert used == [1] * 3 + [2] * 32 + [3] * 4 + [0], "30 + 1 tokens in the first two steps, and so on"
    assert max(used) == bench.request([1] * 30, 40).max_stored // 32 + 1


def test_a_long_prompt_runs_in_pieces_beside_decodes() -> None:
    bench = Bench(max_batch_tokens=16)
    short = bench.submit([1, 2], 12)
    long = bench.submit(list(range(1, 60)), 3)
    bench.finish(short, long)
    assert short.generated_ids == answer([1, 2], 12)
    assert long.generated_ids == answer(range(1, 60), 3)
    assert [step.n_tokens for step in bench.context.steps[:6]] == [
        [2, 14],
        [1, 15],
        [1, 15],
        [1, 15],
        [1, 1],
        [1, 1],
    ]
    assert [step.n_outputs for step in bench.context.steps[:5]] == [1, 1, 1, 2, 2]


def test_a_prompt_of_exactly_the_budget_draws_in_its_step() -> None:
    bench = Bench(max_batch_tokens=16)
    request = bench.submit([3] * 32, 1)
    bench.finish(request)
    assert [step.n_outputs for step in bench.context.steps] == [0, 1]


def test_a_request_that_does_not_fit_waits_and_then_runs() -> None:
    bench = Bench(n_blocks=4)
    first = bench.submit([1] * 32, 33)
    second = bench.submit([2] * 64, 65)
    third = bench.submit([3], 1)
    bench.step()
    assert (bench.core.n_running, bench.core.n_waiting) == (1, 2), "first come, first served: no overtaking"
    bench.finish(first, second, third)
    assert second.generated_ids == answer([2] * 64, 65)
    bench.assert_idle()


def test_no_more_run_than_may() -> None:
    bench = Bench(max_seqs=3)
    requests = [bench.submit([i], 5) for i in range(1, 8)]
    seen = []
    while not all(request.finished for request in requests):
        bench.step()
        seen.append(len(bench.context.steps[-1].n_tokens))
    assert max(seen) == 3
    assert [request.generated_ids for request in requests] == [answer([i], 5) for i in range(1, 8)]


def test_an_end_token_ends_and_is_not_shown() -> None:
    bench = Bench()
    prompt = [5, 6, 7]
    third = answer(prompt, 3)[2]
    request = bench.submit(prompt, 10, stop_token_ids=[third])
    bench.finish(request)
    assert (request.finish_reason, request.generated_ids) == ("stop", answer(prompt, 3))
    assert request.stop_reason == third
    assert request.text == text_of(answer(prompt, 2))


@pytest.mark.parametrize("ignore", [False, True])
def test_the_models_own_end(ignore: bool) -> None:
    bench = Bench()
    third = answer([9], 3)[2]
    bench.core._output._is_end = lambda token: token in (END, third)
    request = bench.submit([9], 6, ignore_eos=ignore)
    bench.finish(request)
    assert request.finish_reason == ("length" if ignore else "stop")
    assert request.generated_ids == answer([9], 6 if ignore else 3)
    assert request.stop_reason is None


@pytest.mark.parametrize("ignore", [False, True])
def test_the_models_own_end_among_the_stop_tokens(ignore: bool) -> None:
    """As in vLLM: it has no stop reason, unless it is no end for the request."""
    bench = Bench()
    third = answer([9], 3)[2]
    bench.core._output._is_end = lambda token: token in (END, third)
    pieces: list[StreamPiece] = []
    request = bench.submit([9], 6, ignore_eos=ignore, stop_token_ids=[third], on_piece=pieces.append)
    bench.finish(request)
    assert (request.finish_reason, request.generated_ids) == ("stop", answer([9], 3))
    assert request.stop_reason == pieces[-1].stop_reason == (third if ignore else None)


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    bench = Bench()
    a, b, c, d, *_ = answer([4], 6)
    stop = f"{b}><{c}><{str(d)[0]}"
    pieces: list[StreamPiece] = []
    request = bench.submit([4], 6, on_piece=pieces.append, stop=[stop, "never"])
    bench.finish(request)
    assert request.finish_reason == "stop"
    assert request.generated_ids == (a, b, c, d)
    assert request.text == joined(pieces) == f"<{a}><"
    assert [piece.token_ids for piece in pieces] == [(a,), (b,), (c,), (d,)]
    assert [piece.stop_reason for piece in pieces] == [None, None, None, stop]


def test_stop_strings_within_the_fewest_tokens_are_text() -> None:
    """One that begins there and is complete later counts."""
    _, b, c, d, *_ = answer([4], 6)
    cases = [(f"{b}>", None, 6), (f"{b}><{c}", None, 3), (f"{c}", None, 3), (f"<{d}>", f"<{d}>", 4)]
    for stop, met, n in cases:
        for min_tokens, wanted in ((2, stop if n < 6 else None), (3, met)):
            bench = Bench()
            pieces: list[StreamPiece] = []
            request = bench.submit([4], 6, on_piece=pieces.append, stop=stop, min_tokens=min_tokens)
            bench.finish(request)
            assert request.stop_reason == wanted
            assert request.text == joined(pieces)
            whole = text_of(answer([4], 6))
            assert request.text == (whole if wanted is None else whole[: whole.index(stop)])
            assert request.n_generated == (6 if wanted is None else n)


def test_the_fewest_tokens_take_two_masks() -> None:
    """One for the first token and none for those between."""
    bench, masks = Bench(), list[bytes]()
    bench.make_sampler = lambda request: FakeSampler(masks=masks)
    request = bench.request([4], 9, min_tokens=3)
    request.going_on = b"mask"
    bench.core.inbox.submit([request])
    bench.finish(request)
    assert masks == [b"mask", b""]


def test_the_beginning_of_a_stop_string_comes_at_the_end_after_all() -> None:
    bench = Bench()
    *_, last = answer([4], 6)
    request = bench.submit([4], 6, stop=f"<{last}>...")
    bench.finish(request)
    assert (request.finish_reason, request.text) == ("length", text_of(answer([4], 6)))


def test_a_stream_has_a_piece_for_every_token() -> None:
    bench = Bench()
    pieces: list[StreamPiece] = []
    request = bench.submit([4], 5, on_piece=pieces.append)
    bench.finish(request)
    assert [piece.token_ids for piece in pieces] == [(token,) for token in answer([4], 5)]
    assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["length"]
    assert joined(pieces) == request.text


# ---- failures ----


def test_a_draw_that_fails_ends_its_request_only() -> None:
    bench = Bench()
    bench.make_sampler = lambda request: FakeSampler(status=int(request.n_prompt == 2))
    good, bad, other = bench.submit([1], 5), bench.submit([1, 2], 5), bench.submit([1, 2, 3], 5)
    bench.finish(good, bad, other)
    assert (bad.finish_reason, bad.generated_ids) == ("error", ())
    assert isinstance(bad.error, ComputeError)
    assert good.generated_ids == answer([1], 5)
    assert other.generated_ids == answer([1, 2, 3], 5)
    bench.assert_idle()


def test_a_callback_that_raises_ends_its_request_only() -> None:
    def fail(piece: StreamPiece) -> None:
        raise ZeroDivisionError("mine")

    bench = Bench()
    good, bad = bench.submit([1], 5), bench.submit([2], 5, on_piece=fail)
    bench.finish(good, bad)
    assert isinstance(bad.error, ZeroDivisionError)
    assert len(bad.generated_ids) == 1
    assert good.generated_ids == answer([1], 5)
    bench.assert_idle()


def test_a_sampler_that_cannot_be_made_ends_its_request_only() -> None:
    def make(request: Any) -> FakeSampler:
        if request.n_prompt == 2:
            raise ComputeError("no sampler")
        return FakeSampler()

    bench = Bench()
    bench.make_sampler = make
    bad, good = bench.submit([1, 2], 5), bench.submit([1], 5)
    bench.finish(good, bad)
    assert (str(bad.error), bad.finish_reason) == ("no sampler", "error")
    assert good.generated_ids == answer([1], 5)
    bench.assert_idle()


def test_when_only_requests_that_cannot_start_are_left_nothing_hangs() -> None:
    def make(request: Any) -> FakeSampler:
        raise ComputeError("no sampler")

    bench = Bench()
    bench.make_sampler = make
    requests = [bench.submit([1, 2], 5) for _ in range(20)]
    bench.finish(*requests)
    bench.assert_idle()


@pytest.mark.parametrize("where", ["before_run", "before_sample"])
def test_a_step_that_fails_ends_its_requests_and_the_engine_continues(where: str) -> None:
    bench = Bench(max_seqs=1)

    def fail() -> None:
        raise ComputeError("broken")

    inside, outside = bench.submit([1] * 30, 90), bench.submit([2], 5)
    bench.step()
    assert bench.core.n_waiting == 1, "one at a time"
    setattr(bench.context, where, fail)
    bench.step()
    assert (inside.finish_reason, str(inside.error)) == ("error", "broken")
    assert bench.manager.n_used == 0
    setattr(bench.context, where, lambda: None)
    bench.finish(outside)
    assert outside.generated_ids == answer([2], 5)
    bench.assert_idle()


def test_a_draw_that_fails_as_a_whole_leaves_prompts_in_progress_alone() -> None:
    bench = Bench(max_batch_tokens=16)

    def fail() -> None:
        bench.context.before_sample = lambda: None
        raise ComputeError("broken")

    drawing, reading = bench.submit([1], 5), bench.submit([2] * 40, 2)
    bench.context.before_sample = fail
    bench.finish(drawing, reading)
    assert (drawing.finish_reason, reading.finish_reason) == ("error", "length")
    assert reading.generated_ids == answer([2] * 40, 2)


@pytest.mark.parametrize("n_states", [0, 8])
@pytest.mark.parametrize("kind", [Cancelled, KeyboardInterrupt])
def test_a_step_that_is_cut_short_is_done_again(n_states: int, kind: type[BaseException]) -> None:
    bench = Bench(max_batch_tokens=16, n_states=n_states)
    requests = [bench.submit([1] * 40, 9), bench.submit([2], 20)]
    countdown = [3, 1, 1, 5, 2]

    def cut() -> None:
        if countdown:
            countdown[0] -= 1
            if countdown[0] == 0:
                countdown.pop(0)
                raise kind("cut short")

    bench.context.before_run = cut
    while not all(request.finished for request in requests):
        try:
            bench.step()
        except KeyboardInterrupt:
            bench.manager.audit()
    assert not countdown, [request.error for request in requests]
    assert [request.generated_ids for request in requests] == [answer([1] * 40, 9), answer([2], 20)]
    bench.assert_idle()


@pytest.mark.parametrize("kind", [Cancelled, KeyboardInterrupt])
def test_states_begin_anew_after_a_pass_whose_end_was_not_seen(kind: type[BaseException]) -> None:
    bench = Bench(max_batch_tokens=16, n_states=8)
    requests = [bench.submit([1] * 40, 9), bench.submit([2], 20)]
    run = bench.context.run

    def cut(*args: Any) -> None:
        run(*args)
        if len(bench.context.steps) in (2, 3, 7):
            raise kind("cut short")

    bench.context.run = cut  # type: ignore[method-assign]
    while not all(request.finished for request in requests):
        try:
            bench.step()
        except KeyboardInterrupt:
            bench.manager.audit()
        for request in requests:
            assert request.sequence.table is not None or request.finished or request.n_computed == 0
        assert bench.core.n_running == sum(request.sequence.table is not None for request in requests)
    assert [request.generated_ids for request in requests] == [answer([1] * 40, 9), answer([2], 20)]
    bench.assert_idle()


def test_debugging_audits_every_step() -> None:
    bench = Bench()
    request = bench.submit([1], 9)
    bench.step()
    assert request.sequence.table is not None
    request.sequence.table.reserved += 1
    with pytest.raises(InternalError):
        bench.core.step()


def test_debugging_fills_what_becomes_free() -> None:
    """A read of a free block finds nothing of its old tokens."""
    bench = Bench()
    filled: list[int] = []
    fill = bench.context.fill_blocks

    def note(blocks: Sequence[int], byte: int) -> None:
        filled.extend(blocks)
        fill(blocks, byte)

    bench.context.fill_blocks = note  # type: ignore[method-assign]
    other, request = bench.submit([2], 4), bench.submit([1] * 30, 2)
    while request.sequence.table is None:
        bench.step()
    held = list(request.sequence.table.blocks)
    bench.finish(request)
    bench.step()
    assert set(held) <= set(filled)
    bench.finish(other)


@pytest.mark.parametrize("n_states", [0, 8])
def test_an_interrupt_in_a_callback_ends_that_request_and_no_other(n_states: int) -> None:
    def interrupt(piece: StreamPiece) -> None:
        raise KeyboardInterrupt

    bench = Bench(n_states=n_states)
    before, hit, after = bench.submit([1], 5), bench.submit([2], 5, on_piece=interrupt), bench.submit([3], 5)
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.finish(before, hit, after)
    assert hit.finish_reason == "abort"
    assert before.generated_ids == answer([1], 5)
    assert after.generated_ids == answer([3], 5)
    bench.assert_idle()


# ---- cancelling ----


def test_cancelling_frees_blocks_and_keeps_the_text() -> None:
    bench = Bench()
    pieces: list[StreamPiece] = []
    running = bench.submit([1] * 30, 50, on_piece=pieces.append)
    for _ in range(5):
        bench.step()
    bench.core.inbox.cancel([running])
    bench.core.settle()
    assert running.finish_reason == "abort"
    assert running.text == joined(pieces) == text_of(answer([1] * 30, 5))
    last = replace(pieces[-1], usage=None, times=None)
    assert last == StreamPiece("", (), "abort")
    assert pieces[-1].usage == Usage(prompt_tokens=30, cached_tokens=0, completion_tokens=5)
    bench.assert_idle()


def test_cancelling_a_waiting_request() -> None:
    bench = Bench(max_seqs=1)
    running, waiting = bench.submit([1], 5), bench.submit([2], 5)
    bench.step()
    bench.core.inbox.cancel([waiting])
    bench.finish(running)
    assert (waiting.finish_reason, waiting.generated_ids) == ("abort", ())
    assert running.generated_ids == answer([1], 5)
    bench.assert_idle()


def test_cancelling_a_new_or_finished_request_is_harmless() -> None:
    bench = Bench()
    request = bench.submit([1], 1)
    bench.core.inbox.cancel([request])
    bench.step()
    assert request.finish_reason == "abort"
    done = bench.submit([1], 1)
    bench.finish(done)
    bench.core.inbox.cancel([done])
    bench.core.settle()
    assert done.finish_reason == "length"
    never = bench.request([1], 1)
    bench.core.inbox.cancel([never])
    bench.core.settle()
    assert never.finish_reason == "abort"
    bench.assert_idle()


def test_cancel_all() -> None:
    bench = Bench(max_seqs=2)
    requests = [bench.submit([i], 50) for i in range(1, 6)]
    bench.step()
    late = bench.submit([9], 1)
    bench.core.cancel_all()
    assert {request.finish_reason for request in [*requests, late]} == {"abort"}
    bench.assert_idle()


# ---- states and samplers ----


@pytest.mark.parametrize("n_states", [1, 3])
def test_each_sequence_keeps_its_recurrent_state(n_states: int) -> None:
    bench = Bench(n_states=n_states, max_seqs=n_states, max_batch_tokens=16)
    requests = [bench.submit([i] * (3 * i), 2 + i) for i in range(1, 9)]
    bench.finish(*requests)
    assert [r.generated_ids for r in requests] == [answer([i] * (3 * i), 2 + i) for i in range(1, 9)]
    assert bench.free_states == list(range(n_states))


def test_the_sampler_sees_the_prompt_where_it_matters() -> None:
    bench = Bench()
    requests = [bench.submit([7, 8], 1), bench.submit([7, 8], 1, repetition_penalty=1.5)]
    bench.finish(*requests)
    assert [sampler.prompt for sampler in bench.samplers] == [None, (7, 8)]


def test_counters() -> None:
    bench = Bench()
    requests = [bench.submit([1] * 7, 3), bench.submit([2] * 100, 2)]
    bench.finish(*requests)
    counters = bench.core.counters
    assert (counters.prompt_tokens, counters.completion_tokens) == (107, 5)
    assert (counters.ran_out, counters.stopped, counters.aborted, counters.failed) == (2, 0, 0, 0)
    assert counters.steps == len(bench.context.steps)


def test_times_of_steps() -> None:
    """Each part of a step has its counter; the prefill budget and the costs learn from forward passes."""
    bench, now = Bench(max_batch_tokens=64), [1000.0]

    def takes(seconds: float, method: Callable[..., Any] = lambda *args: None) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            now[0] += seconds
            return method(*args)

        return timed

    core, costs, stepped = bench.core, list[tuple[int, float]](), list[tuple[int, int, float]]()
    core.clock = lambda: now[0]
    core._batches.build = takes(0.5, core._batches.build)  # type: ignore[method-assign]
    bench.context.before_run, bench.context.before_sample = takes(4.0), takes(0.25)
    core.costs.computed = lambda *measured: costs.append(measured)  # type: ignore[method-assign]
    core.prefill_budget.stepped = lambda *measured: stepped.append(measured)  # type: ignore[method-assign]
    first = bench.submit([1] * 40, 9)
    bench.step()
    seconds = [bench.submit([2] * n, 1) for n in (31, 30)]
    bench.step()
    bench.step()
    others = []
    for n_prompt in (31, 30):
        others.append(bench.submit([3] * n_prompt, 1))
        bench.step()
    bench.finish(first, *seconds, *others)
    n = core.counters.steps
    assert core.counters.schedule_seconds == 0.5 * n
    assert core.counters.run_seconds == 4.0 * n
    assert core.counters.sample_seconds == 0.25 * n
    assert stepped[:4] == [(61, 4.0), (0, 4.0), (31, 4.0), (30, 4.0)]
    # the first step packs weights, and a few tokens say little
    assert costs == [(62, 4.0), (32, 4.0)]


def test_a_step_that_was_left_in_the_middle_is_in_doubt() -> None:
    bench, seen = Bench(), list[bool]()
    core = bench.core
    assert not core.in_doubt
    assert not core.step()
    assert not core.in_doubt
    bench.context.before_run = lambda: seen.append(core.in_doubt)
    request = bench.submit([1], 2)
    bench.step()
    assert seen == [True]
    assert not core.in_doubt

    def hit() -> None:
        raise KeyboardInterrupt

    bench.context.before_run = hit
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert not core.in_doubt, "the same tokens run in the next step"
    core.in_doubt = True
    core.recover(ComputeError("a defect"))
    assert not core.in_doubt
    assert request.finish_reason == "error"


def test_what_has_not_ended_is_work() -> None:
    bench = Bench(max_seqs=1)
    assert not bench.core.has_work
    first, second = bench.submit([1], 3), bench.submit([2], 1)
    assert bench.core.has_work
    assert (bench.core.n_waiting, bench.core.n_running) == (2, 0)
    bench.step()
    assert (bench.core.n_waiting, bench.core.n_running) == (1, 1)
    bench.submit([3], 1)
    assert bench.core.n_waiting == 2
    bench.finish(first, second)
    bench.step()
    assert not bench.core.has_work
    assert bench.core.n_waiting == 0


def test_cancelling_shows_what_was_held_back_for_a_stop_string() -> None:
    bench = Bench()
    tokens = answer([1], 3)
    stop = text_of(tokens)[-3:] + "#"
    pieces: list[StreamPiece] = []
    request = bench.submit([1], 9, stop=(stop,), on_piece=pieces.append)
    while request.n_generated < 3:
        bench.step()
    assert joined(pieces) == text_of(tokens)[:-3]
    bench.core.inbox.cancel([request])
    bench.core.settle()
    assert joined(pieces) == "".join(request.text_parts) == text_of(tokens)
    bench.assert_idle()


def test_a_callback_that_raises_when_its_request_is_cancelled() -> None:
    def fail(piece: StreamPiece) -> None:
        if piece.finish_reason is not None:
            raise ValueError("a listener failed")

    bench = Bench()
    request, other = bench.submit([1], 9, on_piece=fail), bench.submit([2], 3)
    bench.step()
    bench.core.inbox.cancel([request])
    bench.finish(request, other)
    assert request.finish_reason == "abort"
    assert str(request.error) == "a listener failed"
    assert other.generated_ids == answer([2], 3)
    bench.assert_idle()


class FakeMatcher:
    """Matcher that allows the token equal to its number of tokens, and nothing after two.

    length: tokens of a complete answer.
    """

    def __init__(self, length: int = -1) -> None:
        self.tokens: list[int] = []
        self.length = length

    def mask(self) -> int:
        if len(self.tokens) == 2:
            raise ComputeError("nothing is allowed")
        return len(self.tokens)

    def accept(self, token: int) -> bool:
        self.tokens.append(token)
        return len(self.tokens) == self.length


def test_a_sampler_gets_a_mask_before_every_draw() -> None:
    bench = Bench()
    told: list[int] = []

    def make(request: Request) -> FakeSampler:
        sampler = FakeSampler()
        sampler.mask = told.append  # type: ignore[attr-defined]
        return sampler

    bench.make_sampler = make
    guided, free = bench.request([1], 9), bench.submit([2], 2)
    guided.matcher = cast(Any, FakeMatcher())
    bench.core.inbox.submit([guided])
    bench.finish(guided, free)
    assert told == [0, 1]
    assert (guided.finish_reason, str(guided.error)) == ("error", "nothing is allowed")
    assert guided.generated_ids == answer([1], 2)
    assert free.generated_ids == answer([2], 2)
    bench.assert_idle()


def test_a_complete_answer_ends_with_the_text_that_was_held_back() -> None:
    """Its last token may begin a stop string."""
    bench = Bench()
    pieces: list[StreamPiece] = []
    tokens = answer([1], 2)
    request = bench.request([1], 9, on_piece=pieces.append, stop=[text_of(tokens[1:]) + "!"])
    request.matcher = cast(Any, FakeMatcher(length=2))
    bench.core.inbox.submit([request])
    bench.finish(request)
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert request.text == joined(pieces) == text_of(tokens)
    bench.assert_idle()


def test_cancel_all_ends_new_requests_and_frees_idle_sequences() -> None:
    bench = Bench()
    sequence = bench.sequence([7] * 40)
    bench.finish(bench.go_on(sequence, 2))
    assert len(bench.core.idle) == 1
    answering = bench.go_on(sequence, 2)
    bench.step()
    assert len(bench.core.idle) == 0, "the request holds the blocks"
    assert sequence.table is not None
    bench.finish(answering)
    assert len(bench.core.idle) == 1
    request = bench.submit([1], 3)
    bench.core.cancel_all()
    assert request.finish_reason == "abort"
    bench.assert_idle()


# ---- everything together ----


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_each_request_gets_the_answer_it_gets_alone(data: st.DataObject) -> None:
    """Random requests that come and go at random times, over a pool that is too small for all of them."""
    max_seqs = data.draw(st.integers(1, 6), "max_seqs")
    bench = Bench(
        n_blocks=data.draw(st.integers(4, 10), "n_blocks"),
        max_seqs=max_seqs,
        max_batch_tokens=data.draw(st.integers(max_seqs, 80), "max_batch_tokens"),
        n_states=data.draw(st.sampled_from([0, max_seqs]), "n_states"),
    )
    arrivals = data.draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(1, 90), st.integers(1, 39)), min_size=1, max_size=12
        )
    )
    cancelled = data.draw(st.dictionaries(st.integers(0, 60), st.integers(0, 11), max_size=3), "cancelled")
    requests = []
    order = []
    for number, (pause, n_prompt, n_new) in enumerate(arrivals):
        for _ in range(pause):
            bench.step()
        requests.append(bench.submit([number + 1] * n_prompt, n_new))
    for clock in range(10_000):
        victim = cancelled.get(clock)
        if victim is not None and victim < len(requests):
            bench.core.inbox.cancel([requests[victim]])
        if not bench.step():
            break
        order += [
            request for request in requests if request.sequence.table is not None and request not in order
        ]
    n_tokens = [sum(step.n_tokens) for step in bench.context.steps]
    assert max(n_tokens, default=0) <= bench.core.limits.max_batch_tokens
    assert [requests.index(request) for request in order] == sorted(map(requests.index, order))
    for number, (_, n_prompt, n_new) in enumerate(arrivals):
        request, expected = requests[number], answer([number + 1] * n_prompt, n_new)
        if request.finish_reason == "abort":
            assert request.generated_ids == expected[: request.n_generated]
        else:
            assert (request.finish_reason, request.generated_ids) == ("length", expected)
    bench.assert_idle()


def test_a_running_request_advances_in_every_step() -> None:
    bench = Bench(n_blocks=12, max_seqs=4, max_batch_tokens=8)
    requests = [bench.submit([i] * 20, 30) for i in range(1, 7)]
    while not all(request.finished for request in requests):
        decoding = [(r, r.n_generated) for r in requests if r.n_generated and not r.finished]
        bench.step()
        assert all(request.n_generated == before + 1 for request, before in decoding)


def test_costs_learn_from_blocks_that_move_either_way() -> None:
    bench, costs = Bench(n_swap_blocks=4), Costs()
    mover = BlockMover(cast(Any, bench.context), bench.manager, costs, iter([1.0, 1.5, 2.0, 2.5]).__next__)
    mover.move(Moves([Copy(0, 0), Copy(1, 1)], [], []))
    assert costs._per_block == 0.25
    mover.move(Moves([], [Copy(0, 2)], []))
    assert costs._per_block > 0.25


def test_a_file_that_changed_ends_the_step_s_requests() -> None:
    bench = Bench()
    request = bench.submit([1, 2], 5)
    bench.step()

    def check_files() -> None:
        raise ModelError("the file has changed")

    bench.core._check_files = check_files
    bench.step()
    assert request.finish_reason == "error"
    assert str(request.error) == "the file has changed"
    assert len(bench.context.steps) == 1, "no forward pass over other weights"
    bench.assert_idle()


def test_requests_in_host_memory_are_counted() -> None:
    bench = Bench(n_blocks=7, block_size=8, n_swap_blocks=10)
    bench.core.costs.favour_swap = lambda n_blocks, n_tokens: True  # type: ignore[method-assign]
    requests = [bench.submit([n] * 12, 30) for n in (1, 2)]
    seen = set()
    while not all(request.finished for request in requests):
        bench.step()
        n_swapped = sum(request.sequence.swapped is not None for request in requests)
        assert bench.core.queues.swapped == n_swapped
        seen.add(n_swapped)
    assert seen == {0, 1}
    waiting = bench.submit([3], 1)
    assert bench.core.queues.swapped == 0
    bench.finish(waiting)


def test_a_deadline_is_over_at_its_very_moment() -> None:
    now = [10.0]
    inbox = Inbox(lambda: now[0])
    request = Bench().request([1], 5, timeout=5.0)
    inbox.submit([request])
    assert list(inbox.arrivals()) == [request]
    assert list(inbox.to_end()) == []
    now[0] = 15.0
    assert list(inbox.to_end()) == [(request, "timeout")]


def test_a_block_that_stays_free_is_filled_once() -> None:
    bench = Bench()
    filled: list[int] = []
    bench.context.fill_blocks = lambda blocks, byte: filled.extend(blocks)  # type: ignore[method-assign]
    bench.finish(bench.submit([2], 6))
    assert len(filled) <= bench.manager.n_blocks + 1, "all at first, then the block of the request"
