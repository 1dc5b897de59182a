"""From logits to answers: tokens are drawn and accepted, logprobs noted, outputs made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from pyvelo.engine.batch import Batch, Scored
from pyvelo.engine.queues import ActiveRequests, Counters
from pyvelo.engine.request import Request
from pyvelo.errors import ComputeError
from pyvelo.kv.manager import BlockManager
from pyvelo.memory.budget import Limits
from pyvelo.outputs import Completion, FinishReason, RequestOutput, TokenLogprob

if TYPE_CHECKING:
    from pyvelo.native import Context

__all__ = ["OutputProcessor", "Submission", "score_prompts"]


class OutputProcessor:
    """Draws tokens from the logits of a step, and accepts them: text, stop conditions, other samples.

    `is_end` tells the tokens that end an answer.
    """

    def __init__(
        self,
        context: Context,
        manager: BlockManager,
        active: ActiveRequests,
        limits: Limits,
        counters: Counters,
        is_end: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self._context = context
        self._manager = manager
        self._active = active
        self._limits = limits
        self._counters = counters
        self._is_end = is_end
        self._clock = clock

    def draw(self, batch: Batch) -> None:
        """A token for every row of logits; then for samples that start at a prompt that is computed now."""
        joined = self._draw_rows(batch.rows, batch.drawing)
        if joined:
            rows, followers = zip(*joined, strict=True)
            self._draw_rows(np.array(rows, np.int32), list(followers))
        self._active.drop_left()

    def _draw_rows(self, rows: NDArray[np.int32], requests: list[Request]) -> list[tuple[int, Request]]:
        """Draws and accepts; returns who joined at one of these rows."""
        for request in requests:
            if request.matcher is not None or request.params.min_tokens:
                self._mask(request)
        if any(request.finished for request in requests):  # its prompt or its matcher failed
            left = [number for number, request in enumerate(requests) if not request.finished]
            rows, requests = rows[left], [requests[number] for number in left]
        samplers = [request.sampler for request in requests if request.sampler is not None]
        try:
            tokens, statuses = self._context.sample(rows, samplers)
            logprobs = logprobs_of(self._context, rows, tokens, requests)
        except Exception as error:
            self._active.fail(requests, error)
            return []
        except BaseException:  # samplers that have drawn a token cannot draw it again
            for request in requests:
                self._active.end(request, "abort")
            raise
        joined: list[tuple[int, Request]] = []
        interrupted: BaseException | None = None
        drawn = zip(requests, rows.tolist(), tokens.tolist(), statuses.tolist(), strict=True)
        for request, row, token, status in drawn:
            try:
                if status:
                    raise ComputeError("no token can be drawn: the logits are not finite, or all are banned")
                self._active.advance(request, len(request.tokens))
                joined += [(row, follower) for follower in self._fork(request)]
                self._accept(request, token, logprobs.get(id(request)))
            except Exception as error:
                self._active.fail([request], error)
            except BaseException as error:  # not before the others have their tokens
                self._active.end(request, "abort")
                interrupted = interrupted or error
        if interrupted is not None:
            raise interrupted
        return joined

    def _mask(self, request: Request) -> None:
        """Tell a sampler which tokens may come next; where that fails the request does."""
        try:
            bits = request.mask()
            if bits is not None and request.sampler is not None:
                request.sampler.mask(bits)
        except Exception as error:
            self._active.fail([request], error)

    def _fork(self, request: Request) -> list[Request]:
        """Lets the other samples of its prompt start beside it; who finds no place waits."""
        joined: list[Request] = []
        while request.followers:  # after an interrupt the rest starts when the request ends
            follower = request.followers.pop(0)
            if follower.finished:
                continue
            table = request.sequence.table
            if table is None or len(self._active.running) >= self._limits.max_seqs:
                self._active.wait(follower)
                continue
            try:
                self._active.start(follower, self._manager.fork(table, follower.hashes))
                # the last token of the prompt counts as computed when a token is drawn after it
                self._active.advance(follower, follower.n_prompt - 1)
                self._active.equip(follower)
                joined.append(follower)
            except Exception as error:
                self._active.fail([follower], error)
            except BaseException:
                self._active.end(follower, "abort")
                raise
        return joined

    def _accept(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        """Appends a token, shows its text, and ends the request where it is due."""
        if request.max_new == 0:
            self._active.end(request, "length")
            return
        if request.n_computed == request.n_prompt:
            self._counters.prompt_tokens += request.n_prompt
        self._counters.completion_tokens += 1
        if logprob is not None:
            request.logprobs.append(logprob)
        if request.parent.first_token is None:
            request.parent.first_token = self._clock()
        text, reason = request.accept(token, self._is_end(token))
        if request.on_piece is not None:
            now = 0.0 if reason is None else self._clock()
            request.on_piece(request.piece(text, (token,), reason, logprob, now))
        if reason is not None:
            self._active.end(request, reason)


def logprobs_of(
    context: Context, rows: NDArray[np.int32], tokens: NDArray[np.int32], requests: Sequence[Request]
) -> dict[int, TokenLogprob]:
    """By id of the request. rows, tokens: int32 [n], which logits, what was drawn from them; -1: nothing."""
    wanted = [
        (place, request, request.n_logprobs)
        for place, request in enumerate(requests)
        if request.n_logprobs is not None and tokens[place] >= 0
    ]
    if not wanted:
        return {}
    places = [place for place, _, _ in wanted]
    most = max(n for _, _, n in wanted)
    chosen, top_tokens, top = context.logprobs(rows[places], tokens[places], most)
    named = zip(wanted, chosen.tolist(), top_tokens.tolist(), top.tolist(), strict=True)
    return {
        id(request): TokenLogprob(int(tokens[place]), logprob, _named(ids[:n], logprobs[:n]))
        for (place, request, n), logprob, ids, logprobs in named
    }


def score_prompts(
    context: Context, pieces: Iterable[Scored], fail: Callable[[list[Request], Exception], None]
) -> None:
    """Notes how likely the tokens of prompts were; `fail` is told whose are not."""
    for request, first, row, n in pieces:
        if not n:
            continue
        tokens = np.array(request.tokens[first + 1 : first + 1 + n], np.int32)
        rows = np.arange(row, row + n, dtype=np.int32)
        try:
            logprobs, ids, top = context.logprobs(rows, tokens, request.params.prompt_logprobs or 0)
        except Exception as error:
            fail([request], error)
            continue
        named = zip(tokens.tolist(), logprobs.tolist(), ids.tolist(), top.tolist(), strict=True)
        # to where they belong: another sample may have put them there before
        request.prompt_logprobs[first : first + n] = [
            TokenLogprob(token, logprob, _named(*best)) for token, logprob, *best in named
        ]


def _named(ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """Without those that stand for nothing, as where the model gives few tokens a chance."""
    return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if token >= 0)


@dataclass(frozen=True)
class Submission:
    """One prompt and the requests that answer it, one for each sample, of which the `n` best are given."""

    prompt: str | None
    requests: tuple[Request, ...]
    n: int

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    def output(self) -> RequestOutput:
        """The answer; every request must be finished."""
        first = self.requests[0]
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=first.prompt_ids,
            outputs=tuple(_completion(request, index) for index, request in enumerate(self._best())),
            usage=first.usage,
            times=first.times(first.parent.end),
            prompt_logprobs=first.scored_prompt,
            request_id=first.parent.request_id,
        )

    def _best(self) -> Sequence[Request]:
        """The likeliest first, those that failed last; all, in their order, where all are wanted."""
        if len(self.requests) == self.n:
            return self.requests
        ranked = sorted(self.requests, key=lambda request: (request.error is not None, -request.mean_logprob))
        return ranked[: self.n]


def _completion(request: Request, index: int) -> Completion:
    return Completion(
        index=index,
        text=request.text,
        token_ids=request.generated_ids,
        finish_reason=cast(FinishReason, request.finish_reason),
        error=request.error,
        logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
        stop_reason=request.stop_reason,
    )
