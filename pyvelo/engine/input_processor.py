"""Checks of prompts and parameters, their conversion to tokens and requests, and samplers of requests."""

from __future__ import annotations

import operator
import random
import weakref
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from secrets import token_hex
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pyvelo.chat.conversation import ChatPrompt
from pyvelo.engine import input_errors
from pyvelo.engine.interrupts import InterruptGuard
from pyvelo.engine.output import Submission
from pyvelo.engine.request import Detokenizer, ParentRequest, Request, Sequence
from pyvelo.errors import RequestError, VeloError, shown
from pyvelo.grammar.compiler import GrammarCompiler
from pyvelo.grammar.matcher import GrammarMatcher
from pyvelo.kv.prefix import BlockLayout
from pyvelo.memory.budget import PoolSize
from pyvelo.outputs import StreamPiece
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.native import Adapter, Model

__all__ = [
    "Asked",
    "AskedOfAll",
    "InputProcessor",
    "Prompt",
    "for_each",
    "items_of",
    "listed",
    "new_request_id",
    "tokens_of",
]


@dataclass(frozen=True)
class Asked:
    """Start of the timeout (None: the submission), seed and id of a request; name of its prompt in errors."""

    time: float | None
    seed: int
    parent: ParentRequest
    prompt: str = "the prompt"


AskedOfAll = list[tuple[SamplingParams, Asked]]
"""Parameters, and start, seed and id, of each prompt of a call."""


class InputProcessor:
    """Maker of requests for one model and one size of pool. Thread-safe."""

    def __init__(
        self,
        model: Model,
        pool: PoolSize,
        layout: BlockLayout,
        seed: int | None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.clock = clock
        self._model = model
        self._pool = pool
        self._layout = layout
        self._n_vocab = model.vocab.n_tokens
        self._compiler = GrammarCompiler(model)
        self._token_bytes = cache(model.token_bytes)
        self._shown_bytes = cache(partial(model.token_bytes, special=True))
        self._seeds = random.Random(seed)
        self.parents: set[weakref.ref[ParentRequest]] = set()
        self.find_lora: input_errors.FindLora | None = None  # once an adapter was loaded

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_piece: Callable[[StreamPiece], None] | None = None,
        asked: Asked | None = None,
    ) -> Submission:
        """Check a prompt and make its requests, one for each sample.

        Args:
            on_piece: called with each piece of the stream.
            asked: time, seed and id; None: the timeout starts when the requests are submitted.

        Raises:
            RequestError, OutOfBlocks: the requests could never run.
        """
        self._check_params(params)
        n_samples = params.best_of or params.n
        if on_piece is not None and n_samples > params.n:
            raise RequestError("best_of: the best samples are known at the end, so they cannot stream")
        name = "the prompt" if asked is None else asked.prompt
        tokens = tokens_of(self._model, prompt, name=name, one="stream" if on_piece is not None else "")
        max_new = self.max_new(len(tokens), params.max_tokens, name)
        text = prompt if isinstance(prompt, str) else prompt.text if isinstance(prompt, ChatPrompt) else None
        make = self._maker(params, asked)
        echo = self._echo(params, tokens, text)
        adapter, size = self._adapter(params.lora), self._layout.block_size
        sequences = (Sequence(tokens, size, params.cache_salt, adapter) for _ in range(n_samples))
        requests = tuple(
            make(sequence, index, max_new=max_new, on_piece=on_piece, echo=echo)
            for index, sequence in enumerate(sequences)
        )
        for request in requests:
            request.prompt_logprobs = requests[0].prompt_logprobs  # one list, filled by any sample
        requests[0].hold(requests[1:])
        return Submission(text, requests, params.n)

    def go_on(
        self,
        sequence: Sequence,
        params: SamplingParams,
        on_piece: Callable[[StreamPiece], None] | None = None,
        asked: Asked | None = None,
    ) -> Submission:
        """Make the request that continues a session's sequence, as `prepare`."""
        self._check_params(params)
        input_errors.check_continuation(sequence, params, self.find_lora)
        max_new = self.max_new(len(sequence.tokens), params.max_tokens, "the session")
        echo = self._echo(params, sequence.tokens, None)
        make = self._maker(params, asked)
        request = make(sequence, max_new=max_new, on_piece=on_piece, keeps_blocks=True, echo=echo)
        return Submission(None, (request,), 1)

    def compute(self, sequence: Sequence, priority: int = 0) -> Submission:
        """Make a request that computes the tokens of a session's sequence and generates none."""
        make = self._maker(SamplingParams(temperature=0.0, priority=priority), None)
        self.check_room(len(sequence.tokens))
        return Submission(None, (make(sequence, max_new=0, keeps_blocks=True),), 1)

    def sequence(self, prompt: Prompt, salt: str, lora: str | None = None) -> Sequence:
        """Return the sequence of a session's prompt, which may be empty."""
        SamplingParams(cache_salt=salt, lora=lora)  # checks them
        listed = isinstance(prompt, Sized) and not isinstance(prompt, (str, bytes, Mapping))
        empty = listed and items_of(prompt) == []
        tokens = () if empty else self.tokens(prompt)
        self.check_room(len(tokens))
        return Sequence(tokens, self._layout.block_size, salt, self._adapter(lora))

    def _adapter(self, name: str | None) -> Adapter | None:
        return input_errors.find_adapter(self.find_lora, name) if self.find_lora or name else None

    def check_room(self, n_tokens: int, name: str = "the prompt") -> None:
        """Raise RequestError or OutOfBlocks if a sequence of `n_tokens` has no room for another token."""
        self.max_new(n_tokens, 1, name)

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether context and pool have room for another token of a sequence."""
        try:
            self.check_room(len(sequence.tokens))
        except VeloError:
            return False
        return True

    def text_of(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens without control tokens; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self._token_bytes, ())
        return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.finish()

    def _echo(self, params: SamplingParams, tokens: abc.Sequence[int], text: str | None) -> str:
        """Return the text before the output."""
        if not params.echo:
            return ""
        if text is None:
            special = not params.skip_special_tokens
            text = self._model.detokenize(list(tokens), special=special).decode("utf-8", "replace")
        return text

    def ask(self, params: SamplingParams, request_id: str | None = None, *, timed: bool = True) -> Asked:
        """Draw the seed and the id of a request (unless given), before requests are prepared in any order.

        Args:
            timed: its timeout starts now; False: when it is submitted.

        Raises:
            RequestError: the id is not a string of 1 to 256 characters.
        """
        if request_id is None:
            request_id = new_request_id()
        else:
            input_errors.check_id(request_id)
        return self._ask(params, ParentRequest(request_id=request_id), timed)

    def ask_all(
        self,
        n: int,
        params: SamplingParams | abc.Sequence[SamplingParams] | None,
        request_id: str | None = None,
    ) -> AskedOfAll:
        """Return the parameters of each of `n` prompts, and `ask` for each.

        Args:
            request_id: of several prompts, request i has the id "request_id-i".

        Raises:
            RequestError: the numbers of prompts and parameters differ, or the id is invalid.
        """
        each = for_each(params, n)
        if n == 1:
            return [(each[0], self.ask(each[0], request_id))]
        if request_id is not None:
            input_errors.check_id(request_id)
        asked = []
        for number, param in enumerate(each):
            name = new_request_id() if request_id is None else f"{request_id}-{number}"
            parent = ParentRequest(request_id=name, batch_id=request_id)
            asked.append((param, self._ask(param, parent, True, f"prompts[{number}]")))
        return asked

    def _ask(
        self, params: SamplingParams, parent: ParentRequest, timed: bool, prompt: str = "the prompt"
    ) -> Asked:
        seed = params.seed if isinstance(params, SamplingParams) else None  # `prepare` refuses the others
        seed = self._seeds.getrandbits(64) if seed is None else seed
        self.parents.add(weakref.ref(parent, self.parents.discard))  # a C call, see `Finalizer`
        return Asked(self.clock() if timed else None, seed, parent, prompt)

    def prepare_all(self, prompts: abc.Sequence[Prompt], asked: AskedOfAll) -> list[Submission]:
        """Check prompts and make their requests, as `prepare`."""
        given = zip(prompts, asked, strict=True)
        return [self.prepare(prompt, params, asked=ask) for prompt, (params, ask) in given]

    def compiling(self, params: SamplingParams) -> Future[GrammarMatcher] | None:
        """Start to compile the grammar of a request, if it has one; cancel the future to stop waiting."""
        if not isinstance(params, SamplingParams) or not _has_grammar(params):
            return None  # `prepare` refuses other parameters
        return self._compiler.begin(params)

    def close(self) -> None:
        """Stop waiting for grammars that compile."""
        self._compiler.close()

    def _maker(self, params: SamplingParams, asked: Asked | None) -> Callable[..., Request]:
        ask = asked or self.ask(params, timed=False)
        begun = self.clock()
        matcher = self._matcher(params, ask.time) if _has_grammar(params) else None
        ask.parent.n_open = params.best_of or params.n
        token_bytes = self._token_bytes if params.skip_special_tokens else self._shown_bytes
        going_on = self._going_on(params)

        def make(sequence: Sequence, index: int = 0, **others: Any) -> Request:
            return Request(
                sequence,
                params,
                seed=(ask.seed + index) % (1 << 64),
                detokenizer=Detokenizer(token_bytes, cast("tuple[str, ...]", params.stop)),
                going_on=going_on,
                index=index,
                matcher=matcher.copy() if matcher is not None else None,
                parent=ask.parent,
                submitted=ask.time or (begun if matcher is not None and matcher.late else 0.0),
                **others,
            )

        return make

    def _matcher(self, params: SamplingParams, asked: float | None) -> GrammarMatcher | None:
        """Return the matcher of the grammar; wait for it up to the deadline of the request, or to Ctrl+C."""
        waited = 0.0 if asked is None else self.clock() - asked
        left = None if params.timeout is None else max(0.0, params.timeout - waited)
        with InterruptGuard() as guard:  # a session's call is in one, too
            return self._compiler.compile(params, left, guard.raise_hit)

    def _going_on(self, params: SamplingParams) -> bytes:
        """Return a mask of the tokens that end no answer, if `min_tokens` needs it."""
        if not params.min_tokens:
            return b""
        bits = np.ones(self._n_vocab, np.uint8)
        bits[list(params.stop_token_ids or ())] = 0
        if not params.ignore_eos:
            bits[[*self._model.end_tokens]] = 0
        return np.packbits(bits, bitorder="little").tobytes()

    def tokens(self, prompt: Prompt) -> abc.Sequence[int]:
        """Return the token ids of a prompt; raise RequestError if it is invalid or empty."""
        return tokens_of(self._model, prompt)

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise input_errors.wrong_params(params)
        for name, n in {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}.items():
            if (n or 0) > self._n_vocab:
                raise RequestError(f"{name}={n}: the vocabulary has {self._n_vocab} tokens")
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias)

    def check_ids(self, name: str, tokens: Iterable[int] | None) -> None:
        """Raise RequestError if one of the tokens is not in the vocabulary."""
        wrong = next((token for token in tokens or () if token >= self._n_vocab), None)
        if wrong is not None:
            raise RequestError(f"{name}: token {wrong} does not exist, ids go up to {self._n_vocab - 1}")

    def max_new(self, n_prompt: int, max_tokens: int | None, name: str = "the prompt") -> int:
        """Return the tokens to generate at most: `max_tokens`, as far as context and pool have room.

        Raises:
            RequestError, OutOfBlocks: there is no room for one token.
        """
        n_ctx = self._pool.n_ctx
        if n_prompt >= n_ctx:
            raise input_errors.no_room(n_prompt, n_ctx, self._model.info.n_ctx_train, name)
        room = n_ctx - n_prompt
        max_new = min(room, self._pool.n_tokens - n_prompt + 1 if max_tokens is None else max_tokens)
        needed = n_prompt + max(1, max_new) - 1
        blocks, total, size = self._layout.peak_blocks(needed), self._pool.n_blocks, self._layout.block_size
        if blocks > total:
            needed_blocks = f"{blocks} blocks of {size} tokens"
            raise input_errors.no_blocks(n_prompt, max(1, max_new), needed_blocks, total)
        return max_new


def _has_grammar(params: SamplingParams) -> bool:
    return not (params.grammar is params.json_schema is params.regex is None)


def new_request_id() -> str:
    """Return a unique request id."""
    return token_hex(8)


def for_each(params: SamplingParams | abc.Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
    """Return `n` parameters: the same for all, or one for each."""
    if params is None:
        return [SamplingParams()] * n
    if isinstance(params, SamplingParams):
        return [params] * n
    given = None if isinstance(params, (str, bytes, Mapping)) else items_of(params)
    if given is None:
        raise input_errors.wrong_params(params, many=True)
    for number, each in enumerate(given):
        if not isinstance(each, SamplingParams):
            raise input_errors.wrong_params(each, f"params[{number}]")
    if len(given) != n:
        raise RequestError(f"{len(given)} SamplingParams for {n} prompts: give one, or one for each")
    return given


Prompt = str | abc.Sequence[int]


def tokens_of(model: Model, prompt: Prompt, *, name: str = "the prompt", one: str = "") -> abc.Sequence[int]:
    """Return the token ids of a prompt; raise RequestError with its `name` if it is invalid or empty.

    one: name of a call that takes one prompt, for the error.
    """
    n_vocab = model.vocab.n_tokens
    if isinstance(prompt, str):
        tokens: list[int] | None = model.tokenize(prompt)
    else:
        items = items_of(prompt)
        try:
            tokens = None if items is None else [operator.index(token) for token in items]
        except TypeError:
            tokens = None
        if tokens is None or isinstance(prompt, (bytes, Mapping)) or bool in map(type, items or ()):
            raise input_errors.no_prompt(prompt, items, name, one)
        wrong = next((token for token in tokens if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise RequestError(f"{name}: token {shown(wrong)} does not exist: ids go from 0 to {n_vocab - 1}")
    if not tokens:
        raise RequestError(f"{name} has no tokens; give at least one")
    return tokens


def listed(prompts: Prompt | abc.Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list; a string or a list of numbers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = None if isinstance(prompts, (bytes, Mapping)) else items_of(prompts)
    if items is None:
        raise input_errors.no_prompt(prompts, items, "the prompt")
    one = bool(items) and not any(isinstance(item, str) or hasattr(item, "__len__") for item in items)
    return [cast("list[int]", items)] if one else cast("list[Prompt]", items)


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a value; None if it has none, as an array without an axis."""
    try:
        return list(value)
    except TypeError:
        return None
