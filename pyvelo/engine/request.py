"""Sequences of tokens, the requests that run on them with their states, and the text of their tokens."""

from __future__ import annotations

import codecs
import math
from array import array
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from pyvelo.grammar.matcher import GrammarMatcher
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes
from pyvelo.outputs import FinishReason, RequestTimes, StreamPiece, TokenLogprob, Usage
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.native import Adapter, Sampler

__all__ = [
    "ARRIVALS_PER_PRIORITY",
    "Detokenizer",
    "ParentRequest",
    "Request",
    "RequestStatus",
    "Sequence",
    "StopFilter",
]


class Sequence:
    """Tokens, their block hashes, and the blocks that store their K and V.

    The only owner of its block table. It has a table while a request runs on it. The sequence of a session or
    a beam outlives its requests and keeps the table between them, until the blocks are needed (`evict`).

    table: blocks in the pool; None: it has none.
    swapped: blocks in host memory; None: it has none. After the pool was cleared, these blocks are invalid.
    request: the latest request of a session or a beam.
    closed: no request may run on it any more.
    """

    __slots__ = ("adapter", "closed", "hashes", "request", "salt", "swapped", "table", "tokens")

    def __init__(
        self, tokens: Iterable[int], block_size: int, salt: str = "", adapter: Adapter | None = None
    ) -> None:
        self.tokens, self.salt, self.adapter = array("i", tokens), salt, adapter
        extra = (b"" if adapter is None else adapter.key) + salt.encode(
            "utf-8", "surrogatepass"
        )  # kv/extra.py
        self.hashes = BlockHashes(self.tokens, block_size, extra)
        self.table: BlockTable | None = None
        self.swapped: SwappedBlocks | None = None
        self.request: Request | None = None
        self.closed = False

    def fork(self, tokens: Iterable[int], n_common: int) -> Sequence:
        """Return a sequence of `tokens` that shares its first `n_common` block hashes, but no blocks."""
        twin = Sequence(tokens, self.hashes.block_size, self.salt, self.adapter)
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

ARRIVALS_PER_PRIORITY = 64
"""Arrivals that a difference of one in `priority` counts as much as."""


class ParentRequest:
    """State that the samples of one prompt share. Times are in seconds of the engine's clock.

    batch_id: the id that the caller gave to several prompts; None: this is the only one.
    aborted: the samples shall end; n_open: samples that have not ended.
    n_generated: tokens of all samples.
    n_cached: tokens of the prompt that were not computed when the first sample started.
    n_host, n_loaded: cached tokens that were in host memory, and in the KV store, not in the pool.
    first_token: time of the first token of any sample; end: of the end of the latest sample that ended.
    n_preempted: of its samples.
    n_blocks, peak_blocks, block_seconds: blocks of its samples, each counted, if `BlockMeter` runs.
    """

    __slots__ = (
        *("__weakref__", "aborted", "batch_id", "block_seconds", "end", "first_token", "n_blocks"),
        *("n_cached", "n_generated", "n_host", "n_loaded", "n_open", "n_preempted", "peak_blocks"),
        "request_id",
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
        self.n_preempted = self.n_host = self.n_loaded = self.n_blocks = self.peak_blocks = 0
        self.block_seconds = 0.0

    def ended(self, now: float) -> None:
        """Count a sample that has ended."""
        self.n_open -= 1
        self.end = now


_utf8 = codecs.getincrementaldecoder("utf-8")


class StopFilter:
    """Filter that passes text up to the first stop string.

    Text that may become a stop string is held back. The stop string that is complete first counts, the
    longest if there are several, so the result does not depend on how the text is cut. A stop string that is
    complete before the text may stop is text.
    """

    __slots__ = ("_held", "_stops", "stop")

    def __init__(self, stops: abc.Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None  # the stop string that was found

    def push(self, text: str, may_stop: bool = True) -> str:
        """Return the text that can be shown now; nothing more once `stop` is set."""
        if self.stop is not None:
            return ""
        n_held = len(self._held)
        text = self._held + text
        first = self._first_stop(text, n_held) if may_stop else None
        if first is not None:
            begin, self.stop = first
            self._held = ""
            return text[:begin]
        safe = len(text) - self._beginning(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str, n_before: int) -> tuple[int, str] | None:
        """Return the start and the stop string that ends first after `n_before` characters."""
        found = []
        for stop in self._stops:
            at = text.find(stop, max(0, n_before - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        return min(found)[1:] if found else None

    def _beginning(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class Detokenizer:
    """Decoder from tokens to text, with stop strings.

    Bytes that are not UTF-8 become U+FFFD, as `bytes.decode("utf-8", "replace")` of all bytes gives.

    Args:
        token_bytes: returns the bytes of a token.
    """

    __slots__ = ("_decode", "_stops", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], stops: abc.Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decode = _utf8("replace").decode
        self._stops = StopFilter(stops) if stops else None

    @property
    def stop(self) -> str | None:
        """Stop string that was found."""
        return None if self._stops is None else self._stops.stop

    def push(self, token: int, may_stop: bool = True) -> str:
        """Return the text that the token completes; may_stop: a stop string that it completes counts."""
        text = self._decode(self._token_bytes(token))
        return self._stops.push(text, may_stop) if self._stops is not None else text

    def finish(self, may_stop: bool = True) -> str:
        """Return the rest of the text, after the last token."""
        rest = self._decode(b"", True)
        return self._stops.push(rest, may_stop) + self._stops.flush() if self._stops is not None else rest


@dataclass(slots=True, eq=False)
class Request:
    """One sample of a prompt: its parameters, its status and its output.

    The tokens of `sequence` are the prompt, then the generated tokens. K and V of the first `n_computed` are
    in the pool. The last generated token is known before it is computed.

    max_new: tokens to generate; 0: compute the prompt only.
    keeps_blocks: its sequence keeps its blocks when it ends.
    echo: text before the output.
    going_on: mask of the tokens that end no answer, a bit each; needed if `min_tokens` is set.
    """

    sequence: Sequence
    params: SamplingParams
    _: KW_ONLY
    max_new: int
    seed: int
    detokenizer: Detokenizer
    keeps_blocks: bool = False
    index: int = 0
    on_piece: Callable[[StreamPiece], None] | None = None
    matcher: GrammarMatcher | None = None
    echo: str = ""
    parent: ParentRequest = field(default_factory=ParentRequest)
    going_on: bytes = b""

    status: RequestStatus = RequestStatus.NEW
    arrival: int = 0  # its `number`, or the one of the first beam of its search
    submitted: float = 0.0  # start of its timeout, by the engine's clock; 0: not submitted
    followers: list[Request] = field(default_factory=list)  # held samples, see `hold`
    on_end: Callable[[Request], None] | None = None  # must not raise
    error: Exception | None = None
    stop_reason: int | str | None = None  # as in `Completion`
    sampler: Sampler | None = None  # from its first start to its end
    recurrent_state: int = -1  # index while it runs, if the model has recurrent states
    n_generated: int = 0
    n_computed: int = 0
    n_cached: int | None = None  # prefix hit of its first start, in tokens
    opened: bool = False  # a piece was made
    text_parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the generated tokens
    # of the prompt from its second token on, as far as computed; all samples share one list
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    number: int = field(init=False)  # in the order of arrival
    tokens: array[int] = field(init=False)
    hashes: BlockHashes = field(init=False)
    n_prompt: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    n_logprobs: int | None = field(init=False)  # most likely tokens to name for each token; None: no logprobs

    def __post_init__(self) -> None:
        params = self.params
        self.tokens, self.hashes = self.sequence.tokens, self.sequence.hashes
        self.n_prompt = len(self.tokens)
        self.stop_ids = frozenset(params.stop_token_ids or ())
        self.n_logprobs = 0 if params.logprobs is None and params.best_of is not None else params.logprobs

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

        The order of arrival. One more in `priority` counts as ARRIVALS_PER_PRIORITY arrivals: none starves.
        """
        return self.arrival + ARRIVALS_PER_PRIORITY * self.params.priority, self.arrival

    @property
    def mean_logprob(self) -> float:
        """Mean over the generated tokens; -inf if there is none. Needs logprobs."""
        given = [token.logprob for token in self.logprobs]
        return sum(given) / len(given) if given else -math.inf

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
        usage, times = (self.usage, self.times(now)) if self.parent.n_open == 1 else (None, None)
        why = reason, self.index, logprob, scored, self.stop_reason
        return StreamPiece(text, tokens, *why, name, usage, times)

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
