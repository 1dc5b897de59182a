"""Parameters of sampling, of the end of a request, and of beam searches."""

from __future__ import annotations

import json
import logging
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

from pyvelo.errors import RequestError, one_line, shown
from pyvelo.keywords import check_fields

__all__ = ["MAX_CHARACTERS", "BeamSearchParams", "LazyGrammar", "SamplingParams", "chat_params"]

_log = logging.getLogger("pyvelo")

_MAX_TOKEN = (1 << 31) - 1
MAX_CHARACTERS = 1 << 17
"""Length of a grammar, a schema or an expression. The slowest of this length compile for 1 to 2 seconds."""
_LEAST = 2.0**-126
"""Smallest 32-bit float above 0 with full precision; the sampler computes with 32-bit floats."""


class LazyGrammar(str):
    """GBNF that an answer follows from a word on, which begins it; before, any text may come.

    words: the first of them counts.
    think, ends: marks that begin and end reasoning, in which words do not count; "": there is none.
    thinks: the answer begins within reasoning.
    """

    words: tuple[str, ...]
    think: str
    ends: tuple[str, ...]
    thinks: bool

    def __new__(
        cls,
        source: str,
        words: Iterable[str] = (),
        think: str = "",
        ends: Iterable[str] = (),
        thinks: bool = False,
    ) -> LazyGrammar:
        self = super().__new__(cls, source)
        self.words, self.think, self.ends, self.thinks = tuple(words), think, tuple(ends), thinks
        return self

    @property
    def marks(self) -> tuple[object, ...]:
        """All but the source."""
        return self.words, self.think, self.ends, self.thinks


@check_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request.

    A wrong value raises RequestError with the value and the valid range; a wrong name raises ArgumentError.

    max_tokens: most tokens to generate; None: until context or pool is full. An answer ends at the end of the
        context. Tokens that fit in the context but not in the pool raise OutOfBlocks at submission.
    n: samples of the same prompt; sample i of a seeded request samples with seed + i.
    best_of: generate so many samples and return the n with the highest mean logprob, the best first; not for
        streams.
    min_tokens: tokens to generate before the answer may end: until then end tokens and `stop_token_ids` are
        not sampled, and stop strings do not count. A complete grammar ends the answer anyway.
    temperature: 0 takes the most likely token; 1 leaves the model's distribution as it is.
    top_k: sample from the k most likely tokens; 0 or -1: from all.
    top_p: sample from the most likely tokens that together have this probability; 1: from all.
    min_p: exclude tokens less likely than this share of the most likely one; 0: none.
    repetition_penalty: divides the logits of tokens in prompt and output; 1: off.
    presence_penalty: subtracted once from the logit of each token in the output; 0: off.
    frequency_penalty: subtracted for each occurrence of a token in the output; 0: off.
    stop: strings that end the answer, excluded from the text; None: none.
    stop_token_ids: tokens that end the answer, in addition to the model's end tokens; None: none.
    ignore_eos: continue after the model's end tokens.
    skip_special_tokens: exclude control tokens from the text; False: include their names, which stop strings
        may match. The end token is never in the text.
    seed: 0 to 2**64-1; None: another one for each request.
    logprobs: number of most likely tokens to return with their logprobs, beside the logprob of each generated
        token; up to 1024.
    prompt_logprobs: the same for the tokens of the prompt. Its prefill has smaller chunks and no prefix hit.
    echo: start the text with the prompt. A prompt of token ids is shown as their text. In a chat the prompt
        is the template's text, in a session all text so far. `token_ids` and `stop` refer to the answer only.
    logit_bias: added to the logit of a token; -inf bans it.
    grammar, json_schema, regex: at most one; the answer follows it. A grammar in GBNF or Lark; a schema, as
        text or as the result of json.loads; a regular expression. They need the extra `grammar`.
    priority: lower values run first and are preempted last, as in vLLM. A difference of one counts as much as
        64 arrivals, so no request starves.
    timeout: seconds from the call after which the request ends with its text so far and the finish reason
        "timeout"; checked between two steps.
    cache_salt: requests share prefixes only with requests of the same salt. With a salt for each tenant, no
        tenant can learn another's prompts from response times.
    lora: name of a loaded adapter; None: the engine's default, if it has one; "": the model without adapter.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | bool | None = field(default=None, hash=False)
    regex: str | None = None
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    lora: str | None = None

    def __post_init__(self) -> None:
        put = self._put
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1, _MAX_TOKEN, "; None: no limit"))
        most = _MAX_TOKEN if self.max_tokens is None else self.max_tokens
        hint = "" if self.max_tokens is None else f"; max_tokens is {most}"
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, most, hint))
        put("n", _integer("n", self.n, 1, 1024))
        if self.best_of is not None:
            put("best_of", _integer("best_of", self.best_of, self.n, 1024, f"; n is {self.n}"))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name), 0, 1024, "; None: none"))
        put("temperature", _number("temperature", self.temperature, 0.0, 1e6))
        put("top_k", max(0, _integer("top_k", self.top_k, -1, _MAX_TOKEN, "; 0 or -1 turns it off")))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, "; 1 turns it off", above=True))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0, "; 0 turns it off"))
        penalty = _number(
            "repetition_penalty", self.repetition_penalty, 0.0, 1e6, "; 1 turns it off", above=True
        )
        put("repetition_penalty", penalty)
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put("stop", _strings(self.stop))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={shown(getattr(self, name))}: give True or False")
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, 0, (1 << 64) - 1))
        if self.logit_bias is not None:
            put("logit_bias", _bias(self.logit_bias))
        if self.json_schema is not None:
            put("json_schema", _schema(self.json_schema))
        self._check_grammars()
        put("priority", _integer("priority", self.priority, -1_000_000, 1_000_000))
        if self.timeout is not None:
            put("timeout", _number("timeout", self.timeout, 0.0, 1e9, "; None: no limit"))
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt={shown(self.cache_salt)}: give a string")
        if self.lora is not None and not isinstance(self.lora, str):
            raise RequestError(f"lora={shown(self.lora)}: give the name of an adapter, or None")

    def _check_grammars(self) -> None:
        given = [name for name in ("grammar", "json_schema", "regex") if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"{' and '.join(given)}: an answer can follow only one")
        for name in given:
            text = getattr(self, name)
            if not isinstance(text, str):
                raise RequestError(f"{name}={shown(text)}: give text of up to {MAX_CHARACTERS} characters")
            if len(text) > MAX_CHARACTERS:
                raise RequestError(f"{name} has {len(text)} characters: give up to {MAX_CHARACTERS}")

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@check_fields
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Settings of a beam search.

    A wrong value raises RequestError with the value and the valid range; a wrong name raises ArgumentError.

    beam_width: number of beams, and of answers.
    max_tokens: most tokens of an answer.
    length_penalty: the score of an answer of n tokens and probability p is ln(p) / n**length_penalty; 0
        prefers short answers, larger values long ones.
    stop_token_ids, ignore_eos, priority, cache_salt, lora: as in `SamplingParams`.
    """

    beam_width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    stop_token_ids: Iterable[int] | None = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    lora: str | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("beam_width", _integer("beam_width", self.beam_width, 1, 256))
        put("max_tokens", _integer("max_tokens", self.max_tokens, 1, _MAX_TOKEN))
        put("length_penalty", _number("length_penalty", self.length_penalty, -16.0, 16.0))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        self.step(0)  # checks the rest

    def step(self, n_best: int) -> SamplingParams:
        """Return the parameters of a request for a beam's next token, with the `n_best` likeliest tokens."""
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=n_best,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            cache_salt=self.cache_salt,
            lora=self.lora,
        )


def _integer(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise RequestError(f"{name}={shown(value)}: give an integer from {low} to {high}{hint}")
    return number


def _number(name: str, value: Any, low: float, high: float, hint: str = "", *, above: bool = False) -> float:
    """Return the value as a number between `low` and `high`, as a 32-bit float has it: too small a one is 0.

    Args:
        above: exclude `low`.

    Raises:
        RequestError: the value is not such a number.
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number or a fraction
        number = math.nan
    if abs(number) < _LEAST and number != 0:
        number, hint = 0.0, f"{hint}; below {_LEAST:.4g} a 32-bit float is 0 or loses precision"
    if not low <= number <= high or (above and number == low):
        bound = f"above {low:g} and up to" if above else f"from {low:g} to"
        raise RequestError(f"{name}={shown(value)}: give a number {bound} {high:g}{hint}")
    return number


def _strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    try:
        strings = (value,) if isinstance(value, (str, Mapping)) else tuple(value)
    except TypeError:
        strings = (None,)
    if not all(isinstance(string, str) and string for string in strings):
        raise RequestError(f"stop={shown(value)}: give a string or several, none of them empty")
    return strings


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    try:
        tokens = None if isinstance(value, (str, bytes, Mapping)) else tuple(value)
    except TypeError:
        tokens = None
    if tokens is None:
        raise RequestError(f"stop_token_ids={shown(value)}: give a list of token ids")
    return tuple(_integer("stop_token_ids", token, 0, _MAX_TOKEN) for token in tokens)


def _schema(value: Any) -> str:
    """As text, which is plain data and can be compared."""
    try:
        if not isinstance(value, str):
            return json.dumps(value)
        json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"json_schema={shown(value)}: give a schema that is JSON: {one_line(str(error))}"
        ) from None
    return value


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias={shown(value)}: give a dictionary from token ids to numbers")
    bias = {}
    for token, number in value.items():
        name = f"logit_bias[{shown(token)}]"
        banned = isinstance(number, Real) and number == -math.inf
        key = _integer("a token of logit_bias", token, 0, _MAX_TOKEN)
        bias[key] = -math.inf if banned else _number(name, number, -1e6, 1e6, ", or -inf")
    return bias


_OF_MODEL = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def chat_params(metadata: Mapping[str, str]) -> SamplingParams:
    """Return the parameters of a chat for which the caller gives none.

    An answer ends where the model ends it, or when the context is full. Temperature, top_k, top_p, min_p and
    repetition_penalty are what llama.cpp reads from the keys `general.sampling.*` of the model's file. Values
    that the file lacks, or that cannot be used, are temperature=0.7, top_p=0.95 and the defaults.

    Args:
        metadata: of the GGUF, as text.
    """
    params = SamplingParams(max_tokens=None, temperature=0.7, top_p=0.95)
    for key, name in _OF_MODEL.items():
        text = metadata.get(f"general.sampling.{key}")
        if text is None:
            continue
        try:
            number = 0.0 if float(text) < 0.0 else float(text)  # llama.cpp takes those below 0 as off, too
            value: Any = int(number) if name == "top_k" else min(number, 1.0) if name == "top_p" else number
            params = replace(params, **{name: value})
        except (ValueError, OverflowError) as error:
            _log.warning("general.sampling.%s of the model's file is ignored: %s", key, error)
    return params
