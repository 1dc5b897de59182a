"""Requests, one for each sample of a prompt, and sequences: sequences that are held between two answers."""

from __future__ import annotations

import math
from array import array
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from pyvelo.engine.detokenizer import Detokenizer
from pyvelo.grammar.matcher import GrammarMatcher
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes
from pyvelo.outputs import FinishReason, RequestTimes, StreamPiece, TokenLogprob, Usage
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.native import Sampler

__all__ = ["PRIORITY_PLACES", "IdleSequences", "ParentRequest", "Request", "Sequence"]


class Sequence:
    """What goes on from answer to answer. While a request runs on it, `request` holds its blocks.

    A sequence at rest gives its blocks up before anything that runs does; then they are moved to host memory,
    or computed again, as far as they are no hit. Once it is `dropped`, a request that still arrives for it is
    cancelled.
    """

    __slots__ = ("dropped", "hashes", "request", "swapped", "table", "tokens")

    def __init__(self, tokens: Iterable[int], block_size: int, salt: str = "") -> None:
        self.tokens = array("i", tokens)
        self.hashes = BlockHashes(self.tokens, block_size, salt.encode("utf-8", "surrogatepass"))
        self.table: BlockTable | None = None
        self.swapped: SwappedBlocks | None = None
        self.request: Request | None = None
        self.dropped = False

    def fork(self, tokens: Iterable[int], n_common: int) -> Sequence:
        """Return a sequence of `tokens` that shares its first `n_common` block hashes, but no blocks."""
        twin = Sequence(tokens, self.hashes.block_size)
        twin.hashes = self.hashes.fork(twin.tokens, n_common)
        return twin

    @property
    def computed(self) -> bool:
        """Whether all is there but for the last token, which is computed for its logits."""
        return self.table is not None and self.table.n_tokens >= len(self.tokens) - 1

    @property
    def busy(self) -> bool:
        """Whether a request runs on it, or waits to."""
        return self.request is not None and not self.request.finished


class IdleSequences:
    """The sequences at rest that hold blocks, the longest at rest first."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Lets `twin`, whose tokens begin as those of the sequence, share what the sequence holds here."""
        if sequence.table is not None:
            self._put(twin, self._manager.fork(sequence.table, twin.hashes))

    def lend(self, sequence: Sequence) -> None:
        """A request runs on the sequence now, and has its table."""
        sequence.table = None
        self._sequences.pop(id(sequence), None)

    def take_back(self, sequence: Sequence, table: BlockTable) -> None:
        """The request has ended: what it stored stays."""
        self._manager.park(table)
        self._put(sequence, table)

    def evict(self, sequence: Sequence, swapped: SwappedBlocks | None) -> None:
        """It gave its blocks up; K and V are in host memory or lost, but for what is still a hit."""
        self.lend(sequence)
        if sequence.request is not None and sequence.busy:
            sequence.request.swapped = swapped
        else:
            sequence.swapped = swapped

    def forget(self, sequence: Sequence) -> None:
        """Gives back what the sequence holds, here and in host memory."""
        if sequence.table is not None:
            self._manager.free(sequence.table)
            self.lend(sequence)
        swapped = self.take_swapped(sequence)
        if swapped is not None:
            self._manager.free_swapped(swapped)

    def take_swapped(self, sequence: Sequence) -> SwappedBlocks | None:
        """Take from the sequence what it has in host memory; None if the pool was cleared since."""
        swapped, sequence.swapped = sequence.swapped, None
        return swapped if swapped is not None and self._manager.has_swapped(swapped) else None

    def clear(self) -> None:
        """Forget all after the pool was cleared; sequences keep their tokens."""
        for sequence in self._sequences.values():
            sequence.table = None
        self._sequences.clear()

    def _put(self, sequence: Sequence, table: BlockTable) -> None:
        sequence.table = table
        self._sequences[id(sequence)] = sequence


PRIORITY_PLACES = 64


class ParentRequest:
    """What the samples of one prompt have in common; times are in seconds of the core's clock."""

    __slots__ = ("end", "first_token", "n_cached", "n_generated", "n_open", "request_id")

    def __init__(self, n_samples: int = 1, request_id: str = "") -> None:
        self.request_id = request_id
        self.n_open = n_samples  # samples that have not ended
        self.n_generated = 0  # tokens of all samples
        self.n_cached: int | None = None  # tokens of the prompt that the first sample to start found cached
        self.first_token: float | None = None
        self.end = 0.0  # of the last sample that has ended

    def ended(self, now: float) -> None:
        """Count a sample that has ended."""
        self.n_open -= 1
        self.end = now


class Request:
    """A sequence: its tokens, how many of them are computed, and what became of it.

    Tokens are those of the prompt and, behind them, those generated. The last one generated is known before
    it is computed, so that of `tokens` the first `n_computed` have their K and V in the pool.

    With a `sequence` it goes on from what that holds, and leaves there what it stores. One of `max_new` = 0
    tokens only computes.
    """

    __slots__ = (
        "arrival",
        "detokenizer",
        "echo",
        "error",
        "finish_reason",
        "followers",
        "going_on",
        "hashes",
        "held",
        "index",
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
        "stop_ids",
        "stop_reason",
        "submitted",
        "swapped",
        "table",
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
        self.parent = parent or ParentRequest()
        self.sequence = sequence
        sequence = sequence or Sequence(prompt, block_size, params.cache_salt)
        self.tokens = sequence.tokens
        self.hashes = sequence.hashes
        self.n_prompt = len(prompt)
        self.n_generated = 0  # a sequence may have grown since
        self.n_computed = 0
        self.n_cached: int | None = None  # of those that were there when it first started
        self.arrival = 0  # its number in the order of arrival
        self.submitted = 0.0  # when its time began, by the core's clock; 0: not yet
        self.followers: list[Request] = []  # samples of the same prompt, which start where it was computed
        self.held = False  # it is a follower
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
        self.echo = echo  # what the text begins with
        # of the most likely tokens, how many are to be named with each; None: nothing is asked
        self.n_logprobs = 0 if params.logprobs is None and params.best_of is not None else params.logprobs
        self.matcher = matcher
        self.going_on = going_on  # a bit for each token that ends no answer, where `min_tokens` are asked for
        self.logprobs: list[TokenLogprob] = []  # of what was generated
        # of the prompt, from its second token on, as far as they are known; samples have one list
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # what ended it, as in `Completion`
        self.error: Exception | None = None
        self.swapped: SwappedBlocks | None = None  # where its K and V are while it waits after giving way
        # held while it runs
        self.table: BlockTable | None = None
        self.sampler: Sampler | None = None
        self.state = 0  # recurrent state, where the model has them

    @property
    def max_stored(self) -> int:
        """Tokens whose K and V it may come to store: the last one generated is never computed."""
        return self.n_prompt + max(1, self.max_new) - 1

    @property
    def max_cached(self) -> int | None:
        """Tokens that may be taken from a cache, which has no logits; None: all."""
        return len(self.prompt_logprobs) if self.scores else None

    @property
    def scores(self) -> bool:
        """Whether logits of its prompt are to come yet: from its token `len(prompt_logprobs)` on."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.n_prompt - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of the schedule: the lower runs first and is preempted last.

        It is the order of arrival; one more in `priority` counts as PRIORITY_PLACES arrivals: none starves.
        """
        return self.arrival + PRIORITY_PLACES * self.params.priority, self.arrival

    @property
    def mean_logprob(self) -> float:
        """Of a generated token, where logprobs were asked for; -inf where none was generated."""
        given = [token.logprob for token in self.logprobs]
        return sum(given) / len(given) if given else -math.inf

    def accept(self, token: int, is_end: bool) -> tuple[str, FinishReason | None]:
        """Appends a token; returns the text that it adds, and why the answer ends where it does."""
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
        """Return the tokens that may come next, a bit for each (b"": all); None: those that might before.

        While `min_tokens` are not generated no token may end the answer, unless its grammar allows no other.
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
        """Return what a listener gets. The last piece of all samples has usage and times, which end `now`."""
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
        """Times of all samples of the prompt, which have ended at `end`."""
        return RequestTimes(self.submitted, self.parent.first_token, end)

    @property
    def scored_prompt(self) -> tuple[TokenLogprob | None, ...] | None:
        """Of each token of the prompt how likely it was, where that was asked for and is known."""
        if self.params.prompt_logprobs is None or self.scores:
            return None
        return (None, *self.prompt_logprobs)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.n_prompt])

    @property
    def generated_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.n_prompt : self.n_prompt + self.n_generated])

    @property
    def text(self) -> str:
        """What was generated so far, as far as it may be shown, behind the prompt where it is echoed."""
        return self.echo + "".join(self.text_parts)
