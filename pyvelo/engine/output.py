"""Sampling of tokens from logits, their text and logprobs, and the outputs of finished requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from pyvelo.engine.queues import ActiveRequests
from pyvelo.engine.request import Request
from pyvelo.engine.scheduler import Chunk
from pyvelo.engine.stats import Counters
from pyvelo.errors import ComputeError
from pyvelo.kv.manager import BlockManager
from pyvelo.memory.budget import Limits
from pyvelo.outputs import Completion, FinishReason, RequestOutput, TokenLogprob, raise_first_error

if TYPE_CHECKING:
    from pyvelo.native import Context, Sampler

__all__ = [
    "Batch",
    "OutputProcessor",
    "Scored",
    "Submission",
    "new_sampler",
    "outputs_of",
    "score_prompts",
    "score_rows",
]


class Scored(NamedTuple):
    """Tokens of a prompt from `first` on, whose rows of logits, from `row` on, score the next tokens."""

    request: Request
    first: int
    row: int
    n_tokens: int


def score_rows(outputs: NDArray[np.int8], first: int, row: int, chunk: Chunk) -> Scored:
    """Request the logits of all tokens of a chunk that are not scored yet, except the prompt's last.

    Args:
        outputs: int8 [tokens of the step], set for these tokens.
        first: the chunk's first token in the step.
        row: the next row of logits.
    """
    request, start = chunk.request, chunk.request.n_computed
    begin = max(start, len(request.prompt_logprobs))
    n = max(0, start + chunk.n_tokens - chunk.last - begin)
    at = first + begin - start
    outputs[at : at + n] = 1
    return Scored(request, begin, row, n)


class Batch(NamedTuple):
    """Sizes of a step, the requests that sample from `rows` of the logits, and the prompts to score.

    rows: int32 [n], one for each request of `drawing`.
    """

    n_tokens: int
    n_seqs: int
    rows: NDArray[np.int32]
    drawing: list[Request]
    scored: list[Scored]


class OutputProcessor:
    """Sampler of the tokens of a step, which appends them to their requests.

    Args:
        is_end: whether the model ends answers with a token.
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
        """Sample a token for each row of logits, then for the held samples of computed prompts."""
        joined = self._draw_rows(batch.rows, batch.drawing)
        if joined:
            rows, followers = zip(*joined, strict=True)
            self._draw_rows(np.array(rows, np.int32), list(followers))
        self._active.drop_left()

    def _draw_rows(self, rows: NDArray[np.int32], requests: list[Request]) -> list[tuple[int, Request]]:
        """Sample and append tokens. Return the held samples that start, each with its row of logits."""
        for request in requests:
            if (request.matcher is not None or request.params.min_tokens) and not request.finished:
                self._mask(request)
        if any(request.finished for request in requests):  # scoring its prompt or its mask failed
            left = [number for number, request in enumerate(requests) if not request.finished]
            rows, requests = rows[left], [requests[number] for number in left]
        samplers = [request.sampler for request in requests if request.sampler is not None]
        try:
            tokens, statuses = self._context.sample(rows, samplers)
            logprobs = logprobs_of(self._context, rows, tokens, requests)
        except Exception as error:
            self._active.fail(requests, error)
            return []
        except BaseException:  # a sampler cannot draw a token again
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
            except BaseException as error:  # raised when the other requests have their tokens
                self._active.end(request, "abort")
                interrupted = interrupted or error
        if interrupted is not None:
            raise interrupted
        return joined

    def _mask(self, request: Request) -> None:
        """Give the sampler the mask of the tokens that may come next; an error ends the request."""
        try:
            bits = mask_of(request)
            if bits is not None and request.sampler is not None:
                request.sampler.mask(bits)
        except Exception as error:
            self._active.fail([request], error)

    def _fork(self, request: Request) -> list[Request]:
        """Start the held samples of its prompt, or queue them if the batch is full. Return the started."""
        joined: list[Request] = []
        while request.followers:  # after an interrupt the others start when the request ends
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
                self._active.equip(follower, request)
                joined.append(follower)
            except Exception as error:
                self._active.fail([follower], error)
            except BaseException:
                self._active.end(follower, "abort")
                raise
        return joined

    def _accept(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        """Append a token, stream its text, and end the request if it is finished."""
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
        text, reason = append_token(request, token, self._is_end(token))
        if request.on_piece is not None:
            request.on_piece(request.piece(text, (token,), reason, logprob, self._clock()))
        if reason is not None:
            self._active.end(request, reason)


def append_token(request: Request, token: int, is_end: bool) -> tuple[str, FinishReason | None]:
    """Append a token. Return the text that it adds, and the finish reason if it ends the request.

    is_end: the model ends answers with this token.
    """
    request.tokens.append(token)
    request.n_generated += 1
    request.parent.n_generated += 1
    reason: FinishReason | None = None
    complete = request.matcher is not None and request.matcher.accept(token)
    is_end = is_end and not request.params.ignore_eos
    may_stop = request.n_generated > request.params.min_tokens
    if is_end or token in request.stop_ids:
        text, reason = request.detokenizer.finish(may_stop), "stop"
        request.stop_reason = None if is_end else token
    else:
        text = request.detokenizer.push(token, may_stop)
        if complete:
            text += request.detokenizer.finish(may_stop)
            reason = "stop"
        elif request.n_generated >= request.max_new:
            text += request.detokenizer.finish(may_stop)
            reason = "length"
        if request.detokenizer.stop is not None:
            reason, request.stop_reason = "stop", request.detokenizer.stop
    if text:
        request.text_parts.append(text)
    return text, reason


def mask_of(request: Request) -> bytes | None:
    """Return the mask of the tokens that may come next, a bit each; b"": all tokens; None: as before.

    Before `min_tokens` tokens none may end the answer, unless the grammar allows no other.
    """
    too_few = request.n_generated < request.params.min_tokens
    allowed = None if request.matcher is None else request.matcher.mask()
    if allowed is None:
        if too_few:
            return request.going_on if request.n_generated == 0 else None
        return b"" if request.n_generated == request.params.min_tokens else None
    if not too_few:
        return allowed
    bits = np.frombuffer(allowed, np.uint8, len(request.going_on))
    left = bits & np.frombuffer(request.going_on, np.uint8)
    return left.tobytes() if left.any() else allowed


def logprobs_of(
    context: Context, rows: NDArray[np.int32], tokens: NDArray[np.int32], requests: Sequence[Request]
) -> dict[int, TokenLogprob]:
    """Return the logprobs of sampled tokens by id of the request.

    rows, tokens: int32 [n], rows of logits and the tokens that were sampled from them; -1: none.
    """
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
    """Store the logprobs of prompt tokens; call `fail` for requests whose logprobs cannot be computed."""
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
        # by position: another sample may have stored them before
        request.prompt_logprobs[first : first + n] = [
            TokenLogprob(token, logprob, _named(*best)) for token, logprob, *best in named
        ]


def _named(ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """Pair tokens with their logprobs, without the entries -1 of rows with few possible tokens."""
    return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if token >= 0)


def new_sampler(make: Callable[..., Sampler], request: Request) -> Sampler:
    """Return a sampler with the parameters of a request; make: `Sampler` of the model."""
    params = request.params
    return make(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=request.seed,
        logit_bias=params.logit_bias,
    )


@dataclass(frozen=True)
class Submission:
    """One prompt and its requests, one for each sample; its output has the `n` best."""

    prompt: str | None
    requests: tuple[Request, ...]
    n: int

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    def output(self) -> RequestOutput:
        """Return the output; every request must be finished."""
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
        """Return the `n` likeliest samples, failed ones last; in their order if all are wanted."""
        if len(self.requests) == self.n:
            return self.requests
        ranked = sorted(self.requests, key=lambda request: (request.error is not None, -request.mean_logprob))
        return ranked[: self.n]


def outputs_of(submissions: Iterable[Submission], return_errors: bool = False) -> list[RequestOutput]:
    """Return the outputs of ended requests; raise the first error unless `return_errors`."""
    outputs = [submission.output() for submission in submissions]
    if not return_errors:
        raise_first_error(outputs)
    return outputs


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
