"""Answers that follow a grammar, a JSON schema or a regular expression: which tokens may come next.

The grammars are llguidance's (the extra `guide`), whose limits bound what compiling and each token may take.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyvelo.errors import ComputeError, ConfigError, RequestError, one_line

if TYPE_CHECKING:
    from pyvelo.native import Model
    from pyvelo.sampling import SamplingParams

__all__ = ["Guide", "Guides"]

# between the parts of JSON: a space, or a new line and its indentation; without an end to it, small models
# write blanks until their tokens run out
_WHITESPACE = r" ?|\n[ \t]{0,32}"

MAX_FORCED = 256  # bytes


class Guide:
    """Of one answer: follows it token by token."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self) -> bytes:
        """The tokens that may come next: bit t % 8 of byte t // 8 for token t.

        Raises ComputeError where the grammar has become too complex to follow.
        """
        bits: bytes = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token: int) -> bool:
        """The token comes next; whether the answer is complete, so that nothing can follow.

        Raises ComputeError as `mask` does.
        """
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def copy(self) -> Guide:
        """Another one that stands where this one does."""
        return Guide(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ComputeError(f"what the answer must follow cannot be followed: {_error(self._matcher)}")


class Guides:
    """Compiles for one model, whose vocabulary is handed over with the first guide. Thread-safe."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._last: tuple[tuple[str, str], Guide] | None = None  # many prompts often share one

    def compile(self, params: SamplingParams) -> Guide | None:
        """The guide to copy for each answer; None where answers are free.

        Raises RequestError where grammar, schema or expression are wrong or too complex, ConfigError where
        llguidance is not installed.
        """
        wanted = [
            (name, make, getattr(params, name))
            for name, make in _SOURCES.items()
            if getattr(params, name) is not None
        ]
        if not wanted:
            return None
        name, make, source = wanted[0]
        known = self._last
        if known is None or known[0] != (name, source):
            known = self._last = ((name, source), self._made(name, make, source))
        return known[1]

    def _made(self, name: str, make: Callable[[str], str], source: str) -> Guide:
        from llguidance import LLMatcher

        try:
            grammar = make(source)
        except Exception as error:  # whatever a converter finds wrong
            raise RequestError(f"{name}: {one_line(str(error))}") from error
        matcher = LLMatcher(self._ready(), grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{name}: {_error(matcher)}")
        return Guide(matcher)

    def _ready(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(self._model)
            return self._tokenizer


def check_installed() -> None:
    """ConfigError where llguidance is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ConfigError(
            "grammars, JSON schemas and regular expressions need llguidance: pip install pyvelo[guide]"
        ) from None


def _error(matcher: Any) -> str:
    """Without the state behind it."""
    return one_line(str(matcher.get_error()).partition("\n<state>")[0])


class _Vocabulary:
    """A model's vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, model: Model, ends: list[int]) -> None:
        n_tokens = model.vocab.n_tokens
        plain = [model.token_bytes(token) for token in range(n_tokens)]
        self._model = model
        self.special_token_ids = [token for token, text in enumerate(plain) if not text]
        self.tokens = plain
        for token in self.special_token_ids:
            self.tokens[token] = model.token_bytes(token, special=True)
        self.eos_token_id = ends[0]
        self._ids = {text: token for token, text in enumerate(plain) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of what a grammar leaves no choice about; their bytes must be those of the text.

        Those of its beginning will do. It is asked at every token, so all of a long one would take too long.
        """
        wanted = (text.encode() if isinstance(text, str) else text)[:MAX_FORCED]
        try:
            tokens = self._model.tokenize(wanted.decode(), add_special=False)
        except UnicodeDecodeError:
            return self._longest_first(wanted)
        # some tokenizers put a space in front
        same = b"".join(self.tokens[token] for token in tokens) == wanted
        return tokens if same else self._longest_first(wanted)

    def _longest_first(self, text: bytes) -> list[int]:
        tokens: list[int] = []
        at = 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            token = next((self._ids[part] for n in sizes if (part := text[at : at + n]) in self._ids), None)
            if token is None:
                break  # llguidance cuts the rest as it can
            tokens.append(token)
            at += len(self.tokens[token])
        return tokens


def _tokenizer_of(model: Model) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    n_tokens = model.vocab.n_tokens
    ends = [token for token in range(n_tokens) if model.is_end(token)]
    if not ends:
        raise RequestError("this model has no token that ends an answer, and so none for a grammar's end")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(model, ends)), n_vocab=n_tokens, eos_token=ends)


def _from_grammar(source: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    return str(LLMatcher.grammar_from_lark(any_to_lark(source)))


def _from_schema(schema: str) -> str:
    from llguidance import LLMatcher

    wanted = json.loads(schema)
    # of two that come to the same, the one that can take options
    wanted = {} if wanted is True else wanted
    options: Any = {"whitespace_pattern": _WHITESPACE} if isinstance(wanted, dict) else None
    return str(LLMatcher.grammar_from_json_schema(wanted, defaults=options))


def _from_regex(regex: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(regex))


_SOURCES: dict[str, Callable[[str], str]] = {
    "grammar": _from_grammar,
    "json_schema": _from_schema,
    "regex": _from_regex,
}
