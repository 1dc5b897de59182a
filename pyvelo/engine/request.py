"""Sequences of tokens and the requests that run on them, with their states."""

from __future__ import annotations

import math
from array import array
from collections import abc
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from pyvelo.engine.detokenizer import Detokenizer
from pyvelo.grammar.matcher import GrammarMatcher
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes
from pyvelo.outputs import FinishReason, RequestTimes, StreamPiece, TokenLogprob, Usage
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.native import Sampler

__all__ = ["PRIORITY_PLACES", "ParentRequest", "Request", "RequestStatus", "Sequence"]


class Sequence:
    """Tokens, their block hashes, and the blocks that store their K and V.

    The only owner of its block table. It has a table while a request runs on it. The sequence of a session or
    a beam outlives its requests and keeps the table between them, until the blocks are needed (`evict`).

    table: blocks in the pool; None: it has none.
    swapped: blocks in host memory; None: it has none. After the pool was cleared, these blocks are invalid.
    request: the latest request of a session or a beam.
    closed: no request may run on it any more.
    """

    __slots__ = ("closed", "hashes", "request", "swapped", "table", "tokens")

    def __init__(self, tokens: Iterable[int], block_size: int, salt: str = "") -> None:
        self.tokens = array("i", tokens)
        self.hashes = BlockHashes(self.tokens, block_size, salt.encode("utf-8", "surrogatepass"))
        self.table: BlockTable | None = None
        self.swapped: SwappedBlocks | None = None
        self.request: Request | None = None
        self.closed = False

    def fork(self, tokens: Iterable[int], n_common: int) -> Sequence:
        """Return a sequence of `tokens` that shares its first `n_common` block hashes, but no blocks."""
        twin = Sequence(tokens, self.hashes.block_size)
        twin.hashes = self.hashes.fork(twin.tokens, n_common)
        return twin

    @property
    def computed(self) -> bool:
        """Whether K and V of all tokens but the last are in the pool; the last is computed for its logits."""
        return self.table is not None and self.table.n_tokens >= len(self.tokens) - 1

    @property
    def busy(self) -> bool:
        """Whether a request runs on it or waits to run."""
        return self.request is not None and not self.request.finished


class RequestStatus(IntEnum):
    """State of a request. `ActiveRequests` changes it; other threads see the end last.

    NEW: submitted or not, not seen by the scheduler.
    HELD: a sample that waits until another sample has computed the prompt.
    WAITING: queued, never run.
    RUNNING: its sequence has a block table, and it takes part in steps.
    PREEMPTED: queued again after its blocks were swapped out or freed.
    FINISHED_...: ended, see `FinishReason`.
    """

    NEW = 0
    HELD = 1
    WAITING = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH = 6
    FINISHED_ABORTED = 7
    FINISHED_TIMEOUT = 8
    FINISHED_ERROR = 9

    @staticmethod
    def finished(reason: FinishReason) -> RequestStatus:
        """Return the status of a request that ended for this reason."""
        return _FINISHED[reason]


_FINISHED: dict[FinishReason, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH,
    "abort": RequestStatus.FINISHED_ABORTED,
    "timeout": RequestStatus.FINISHED_TIMEOUT,
    "error": RequestStatus.FINISHED_ERROR,
}
_REASONS = {status: reason for reason, status in _FINISHED.items()}
_FIRST_FINISHED = RequestStatus.FINISHED_STOPPED

PRIORITY_PLACES = 64
"""Arrivals that a difference of one in `priority` counts as much as."""


class ParentRequest:
    """State that the samples of one prompt share. Times are in seconds of the engine's clock.

    batch_id: the id that the caller gave to several prompts; None: this is the only one.
    aborted: the samples shall end.
    n_open: samples that have not ended.
    n_generated: tokens of all samples.
    n_cached: tokens of the prompt that were a prefix hit of the first sample that started.
    first_token: time of the first token of any sample; end: of the end of the latest sample that ended.
    """

    __slots__ = (
        *("__weakref__", "aborted", "batch_id", "end", "first_token"),
        *("n_cached", "n_generated", "n_open", "request_id"),
    )

    def __init__(self, n_samples: int = 1, request_id: str = "", batch_id: str | None = None) -> None:
        self.request_id = request_id
        self.batch_id = batch_id
        self.aborted = False
        self.n_open = n_samples
        self.n_generated = 0
        self.n_cached: int | None = None
        self.first_token: float | None = None
        self.end = 0.0

    def ended(self, now: float) -> None:
        """Count a sample that has ended."""
        self.n_open -= 1
        self.end = now


class Request:
    """One sample of a prompt: its parameters, its status and its output.

    `tokens` are the prompt and the generated tokens. K and V of the first `n_computed` are in the pool. The
    last generated token is known before it is computed.

    Args:
        prompt: token ids; those of `sequence`, if one is given.
        max_new: tokens to generate; 0: compute the prompt only.
        sequence: sequence to continue, which keeps its blocks when the request ends; None: a new one.
        matcher: grammar that the output follows.
        echo: text before the output.
        going_on: mask of the tokens that end no answer, a bit each; needed if `min_tokens` is set.
    """

    __slots__ = (
        "arrival",
        "detokenizer",
        "echo",
        "error",
        "followers",
        "going_on",
        "hashes",
        "index",
        "keeps_blocks",
        "logprobs",
        "matcher",
        "max_new",
        "n_cached",
        "n_computed",
        "n_generated",
        "n_logprobs",
        "n_prompt",
        "on_end",
        "on_piece",
        "opened",
        "params",
        "parent",
        "prompt_logprobs",
        "sampler",
        "seed",
        "sequence",
        "state",
        "status",
        "stop_ids",
        "stop_reason",
        "submitted",
        "text_parts",
        "tokens",
    )

    def __init__(
        self,
        prompt: abc.Sequence[int],
        params: SamplingParams,
        *,
        max_new: int,
        seed: int,
        detokenizer: Detokenizer,
        block_size: int,
        index: int = 0,
        on_piece: Callable[[StreamPiece], None] | None = None,
        sequence: Sequence | None = None,
        matcher: GrammarMatcher | None = None,
        echo: str = "",
        parent: ParentRequest | None = None,
        going_on: bytes = b"",
    ) -> None:
        self.status = RequestStatus.NEW
        self.parent = parent or ParentRequest()
        self.keeps_blocks = sequence is not None
        self.sequence = sequence or Sequence(prompt, block_size, params.cache_salt)
        self.tokens = self.sequence.tokens
        self.hashes = self.sequence.hashes
        self.n_prompt = len(prompt)
        self.n_generated = 0
        self.n_computed = 0
        self.n_cached: int | None = None  # prefix hit of its first start, in tokens
        self.arrival = 0  # number in the order of arrival
        self.submitted = 0.0  # start of its timeout, by the engine's clock; 0: not submitted
        self.followers: list[Request] = []  # held samples, which start when its prompt is computed
        self.params = params
        self.max_new = max_new
        self.seed = seed
        self.index = index
        self.stop_ids = frozenset(params.stop_token_ids)
        self.detokenizer = detokenizer
        self.on_piece = on_piece
        self.opened = False  # a piece was made
        self.on_end: Callable[[Request], None] | None = None  # must not raise
        self.text_parts: list[str] = []
        self.echo = echo
        # number of most likely tokens to name for each token; None: no logprobs
        self.n_logprobs = 0 if params.logprobs is None and params.best_of is not None else params.logprobs
        self.matcher = matcher
        self.going_on = going_on
        self.logprobs: list[TokenLogprob] = []  # of the generated tokens
        # of the prompt from its second token on, as far as computed; all samples share one list
        self.prompt_logprobs: list[TokenLogprob] = []
        self.stop_reason: int | str | None = None  # as in `Completion`
        self.error: Exception | None = None
        self.sampler: Sampler | None = None  # from its first start to its end
        self.state = 0  # recurrent state while it runs, if the model has them

    def hold(self, samples: Iterable[Request]) -> None:
        """Hold other samples of the prompt until this one has computed it."""
        self.followers = list(samples)
        for sample in self.followers:
            sample.status = RequestStatus.HELD

    @property
    def finished(self) -> bool:
        return self.status >= _FIRST_FINISHED

    @property
    def finish_reason(self) -> FinishReason | None:
        return _REASONS.get(self.status)

    @property
    def max_stored(self) -> int:
        """Most tokens whose K and V it can store: the last generated token is never computed."""
        return self.n_prompt + max(1, self.max_new) - 1

    @property
    def max_cached(self) -> int | None:
        """Most tokens of a prefix hit, because the cache has no logits; None: no limit."""
        return len(self.prompt_logprobs) if self.scores else None

    @property
    def scores(self) -> bool:
        """Whether it needs logits of its prompt, from token `len(prompt_logprobs)` on."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.n_prompt - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of the schedule: lower ranks run first and are preempted last.

        The order of arrival; one more in `priority` counts as PRIORITY_PLACES arrivals, so none starves.
        """
        return self.arrival + PRIORITY_PLACES * self.params.priority, self.arrival

    @property
    def mean_logprob(self) -> float:
        """Mean over the generated tokens; -inf if there is none. Needs logprobs."""
        given = [token.logprob for token in self.logprobs]
        return sum(given) / len(given) if given else -math.inf

    def accept(self, token: int, is_end: bool) -> tuple[str, FinishReason | None]:
        """Append a token. Return the text that it adds, and the finish reason if it ends the request."""
        self.tokens.append(token)
        self.n_generated += 1
        self.parent.n_generated += 1
        reason: FinishReason | None = None
        complete = self.matcher is not None and self.matcher.accept(token)
        is_end = is_end and not self.params.ignore_eos
        may_stop = self.n_generated > self.params.min_tokens
        if is_end or token in self.stop_ids:
            text, reason = self.detokenizer.finish(may_stop), "stop"
            self.stop_reason = None if is_end else token
        else:
            text = self.detokenizer.push(token, may_stop)
            if complete:
                text += self.detokenizer.finish(may_stop)
                reason = "stop"
            elif self.n_generated >= self.max_new:
                text += self.detokenizer.finish(may_stop)
                reason = "length"
            if self.detokenizer.stop is not None:
                reason, self.stop_reason = "stop", self.detokenizer.stop
        if text:
            self.text_parts.append(text)
        return text, reason

    def mask(self) -> bytes | None:
        """Return the mask of the tokens that may come next, a bit each; b"": all tokens; None: as before.

        Before `min_tokens` tokens none may end the answer, unless the grammar allows no other.
        """
        too_few = self.n_generated < self.params.min_tokens
        if self.matcher is None:
            if too_few:
                return self.going_on if self.n_generated == 0 else None
            return b"" if self.n_generated == self.params.min_tokens else None
        allowed = self.matcher.mask()
        if not too_few:
            return allowed
        bits = np.frombuffer(allowed, np.uint8, len(self.going_on))
        left = bits & np.frombuffer(self.going_on, np.uint8)
        return left.tobytes() if left.any() else allowed

    def piece(
        self,
        text: str,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        logprob: TokenLogprob | None,
        now: float,
    ) -> StreamPiece:
        """Return a piece of the stream. The last piece of all samples has usage, and times that end `now`."""
        scored = None
        if not self.opened:
            self.opened = True
            text, scored = self.echo + text, self.scored_prompt
        name = self.parent.request_id
        if reason is None:
            return StreamPiece(text, tokens, None, self.index, logprob, scored, None, name)
        last = self.parent.n_open == 1
        return StreamPiece(
            text,
            tokens,
            reason,
            self.index,
            logprob,
            scored,
            self.stop_reason,
            name,
            self.usage if last else None,
            self.times(now) if last else None,
        )

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and of all its samples so far."""
        parent = self.parent
        return Usage(self.n_prompt, parent.n_cached or 0, parent.n_generated)

    def times(self, end: float) -> RequestTimes:
        """Return the times of all samples of the prompt, which ended at `end`."""
        return RequestTimes(self.submitted, self.parent.first_token, end)

    @property
    def scored_prompt(self) -> tuple[TokenLogprob | None, ...] | None:
        """Logprobs of the prompt, as in `RequestOutput`; None if not requested or not complete."""
        if self.params.prompt_logprobs is None or self.scores:
            return None
        return (None, *self.prompt_logprobs)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.n_prompt])

    @property
    def generated_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.n_prompt : self.n_prompt + self.n_generated])

    @property
    def text(self) -> str:
        """Output so far, without held back text, after the prompt if `echo` is set."""
        return self.echo + "".join(self.text_parts)
