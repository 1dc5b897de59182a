"""Beam search over sequences that fork: beams share the blocks of their common prefix."""

from __future__ import annotations

import heapq
import math
from collections import abc
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from pyvelo.engine.engine import Engine
from pyvelo.engine.input_processor import Prompt, new_request_id, tokens_of
from pyvelo.engine.output import Submission, outputs_of
from pyvelo.engine.request import Sequence
from pyvelo.errors import Cancelled, RequestError, shown
from pyvelo.outputs import Completion, RequestOutput, RequestTimes, TokenLogprob, Usage
from pyvelo.sampling import BeamSearchParams

__all__ = ["search"]

MAX_BEST = 1024
"""Most likely tokens that a request can name."""

N_ENDS = 8
"""Likeliest tokens that may end an answer."""


class _Answer(NamedTuple):
    """An answer or its start; `logprob` is the sum over its tokens."""

    logprob: float
    tokens: tuple[TokenLogprob, ...]
    stopped: bool = False
    stop_reason: int | None = None  # as in `Completion`

    def score(self, length_penalty: float, n_tokens: int | None = None) -> float:
        """Return the score; n_tokens: of a longer answer with the same logprob."""
        return self.logprob / math.pow(n_tokens or len(self.tokens), length_penalty)


class _Step(NamedTuple):
    """A beam with one more token, and the number of the beam that it continues."""

    answer: _Answer
    parent: int


@dataclass
class _Search:
    """State of the search for one prompt: beams, their sequences, and complete answers, the best first."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    n_most: int  # tokens of an answer
    sequences: list[Sequence]
    beams: list[_Answer] = field(default_factory=lambda: [_Answer(0.0, ())])
    ended: list[_Answer] = field(default_factory=list)
    arrival: int = 0
    n_cached: int = 0
    times: RequestTimes = field(default_factory=lambda: RequestTimes(0.0, None, 0.0))


def search(
    engine: Engine, prompts: abc.Sequence[Prompt], params: BeamSearchParams | None
) -> Generator[abc.Sequence[Submission], None, list[RequestOutput]]:
    """Search as `LLM.beam_search` does; yield the requests of each step of all searches."""
    params = BeamSearchParams() if params is None else params
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"{shown(params)} are not parameters of a beam search: give a BeamSearchParams")
    engine.processor.check_ids("stop_token_ids", params.stop_token_ids)
    names = ["the prompt"] if len(prompts) == 1 else [f"prompts[{i}]" for i in range(len(prompts))]
    searches = [_begin(engine, prompt, params, name) for prompt, name in zip(prompts, names, strict=True)]
    try:
        while active := [search for search in searches if search.beams]:
            yield from _advance(engine, active, params)
    finally:
        for sequence in chain.from_iterable(search.sequences for search in searches):
            engine.loop.release(sequence)
    return [_output(engine, search) for search in searches]


def _begin(engine: Engine, prompt: Prompt, params: BeamSearchParams, name: str) -> _Search:
    """Return the search for a prompt; name: of the prompt in errors."""
    tokens = tokens_of(engine.model, prompt, name=name)
    n_most = engine.processor.max_new(len(tokens), params.max_tokens, name)
    sequence = engine.processor.sequence(tokens, params.cache_salt, params.lora)
    return _Search(prompt, tuple(tokens), n_most, [sequence])


def _advance(
    engine: Engine, searches: abc.Sequence[_Search], params: BeamSearchParams
) -> Generator[abc.Sequence[Submission], None, None]:
    """Add a token to each beam of each search."""
    n_best = (
        params.beam_width + N_ENDS + len(tuple(params.stop_token_ids or ()))
    )  # so many of one beam may be taken
    settings = params.step(min(n_best, MAX_BEST, engine.model.vocab.n_tokens))
    given = [
        [engine.processor.go_on(sequence, settings) for sequence in search.sequences] for search in searches
    ]
    for search, submissions in zip(searches, given, strict=True):
        for submission in submissions:  # in the order of the first step
            submission.requests[0].arrival = search.arrival
    yield [*chain.from_iterable(given)]
    if any(output.finish_reason == "abort" for output in outputs_of(chain.from_iterable(given))):
        engine.check_open()
        raise Cancelled("the beam search was cancelled")
    for search, submissions in zip(searches, given, strict=True):
        _note_start(search, submissions[0])
        search.times = replace(search.times, end=submissions[-1].output().times.end)
        nearest = [submission.requests[0].logprobs[0].top for submission in submissions]
        steps = _choose(search, nearest, params, engine.model.is_end)
        _extend(engine, search, steps)


def _note_start(search: _Search, submission: Submission) -> None:
    if not search.arrival:
        search.arrival = submission.requests[0].arrival
        search.n_cached = submission.requests[0].n_cached or 0
        search.times = submission.output().times


def _choose(
    search: _Search,
    nearest: abc.Sequence[tuple[tuple[int, float], ...]],
    params: BeamSearchParams,
    is_end: Callable[[int], bool],
) -> list[_Step]:
    """Return the beams to continue; add complete ones to the ended answers.

    nearest: the likeliest next tokens of each beam, with their logprobs.
    """
    steps: list[_Step] = []
    n_ended = 0
    for minus_total, number, token, logprob in _likeliest(search.beams, nearest):
        ends = is_end(token) and not params.ignore_eos
        stopped = ends or token in (params.stop_token_ids or ())
        tokens = (*search.beams[number].tokens, TokenLogprob(token, logprob))
        answer = _Answer(-minus_total, tokens, stopped, token if stopped and not ends else None)
        if not stopped and len(tokens) < search.n_most:
            steps.append(_Step(answer, number))
        elif n_ended < params.beam_width:  # all have the same length, so later ones score lower
            search.ended.append(answer)
            n_ended += 1
        if len(steps) == params.beam_width or (n_ended == params.beam_width and len(tokens) == search.n_most):
            break
    search.ended.sort(key=lambda answer: -answer.score(params.length_penalty))
    del search.ended[params.beam_width :]
    return steps if _may_improve(search, steps, params) else []


def _likeliest(
    beams: abc.Sequence[_Answer], nearest: abc.Sequence[tuple[tuple[int, float], ...]]
) -> Iterator[tuple[float, int, int, float]]:
    """Yield beams with one more token, the likeliest first; merged, because few of them are read.

    Yields:
        Minus the logprob of all tokens, the number of the beam, the token and its logprob.
    """

    def of_beam(number: int) -> Iterator[tuple[float, int, int, float]]:
        before = beams[number].logprob
        return ((-(before + logprob), number, token, logprob) for token, logprob in nearest[number])

    return heapq.merge(*map(of_beam, range(len(beams))))


def _may_improve(search: _Search, steps: abc.Sequence[_Step], params: BeamSearchParams) -> bool:
    """Return whether a beam could still score higher than the worst ended answer."""
    if not steps or len(search.ended) < params.beam_width:
        return True
    # more tokens make an answer less likely: the bound is the same logprob at the best length
    penalty, best = params.length_penalty, steps[0].answer
    most = max(best.score(penalty, n) for n in (len(best.tokens) + 1, search.n_most))
    return most > search.ended[-1].score(penalty)


def _extend(engine: Engine, search: _Search, steps: abc.Sequence[_Step]) -> None:
    """Replace the sequences of the old beams by forks, one for each new beam."""
    old = search.sequences
    new = [_fork(old[step.parent], step.answer.tokens[-1].token_id) for step in steps]
    with engine.loop.visit() as core:
        for step, sequence in zip(steps, new, strict=True):
            core.idle.fork(old[step.parent], sequence)
        for sequence in old:
            core.idle.free(sequence)
    search.sequences, search.beams = new, [step.answer for step in steps]


def _fork(sequence: Sequence, token: int) -> Sequence:
    """Return a fork with another last token: the sampled one is replaced."""
    n_common = len(sequence.tokens) - 1
    return sequence.fork([*sequence.tokens[:n_common], token], n_common)


def _output(engine: Engine, search: _Search) -> RequestOutput:
    completions = tuple(
        Completion(
            index=index,
            text=engine.processor.text_of(
                [t.token_id for t in answer.tokens][: -1 if answer.stopped else None]
            ),
            token_ids=tuple(token.token_id for token in answer.tokens),
            finish_reason="stop" if answer.stopped else "length",
            logprobs=answer.tokens,
            stop_reason=answer.stop_reason,
        )
        for index, answer in enumerate(search.ended)
    )
    generated = sum(len(answer.tokens) for answer in search.ended)
    return RequestOutput(
        prompt=search.prompt if isinstance(search.prompt, str) else None,
        prompt_token_ids=search.prompt_ids,
        outputs=completions,
        usage=Usage(len(search.prompt_ids), search.n_cached, generated),
        times=search.times,
        request_id=new_request_id(),
    )
