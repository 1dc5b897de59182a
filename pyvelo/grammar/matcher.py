"""Answers that follow a grammar, a JSON schema or a regular expression: which tokens may come next.

llguidance (the extra `grammar`) follows them. GBNF is translated for it here.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvelo.errors import ClosedError, ComputeError, ConfigError, RequestError, one_line, shown
from pyvelo.grammar.lark import to_lark
from pyvelo.grammar.limits import (
    check_lark,
    check_schema,
    check_size,
    parser_limits,
    start_deep,
)

if TYPE_CHECKING:
    from pyvelo.native import Model
    from pyvelo.sampling import SamplingParams

__all__ = ["GrammarCompiler", "GrammarMatcher", "check_installed"]

_Key = tuple[str, str]

# between the parts of JSON: a space, or a new line and its indentation; without an end to it, small models
# write blanks until their tokens run out
_WHITESPACE = r" ?|\n[ \t]{0,32}"

_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|[?!]*start\b[^:\n]*:(?!:=))")
_GBNF = re.compile(r"(?:\s|#[^\r\n]*|//[^\r\n]*)*[A-Za-z0-9_-]+[ \t]*::=")

MAX_FORCED = 256  # bytes

MAX_KEPT = 64
"""Compiled grammars of a model that are kept."""

MAX_KEPT_CHARACTERS = 1 << 21
"""Characters of their sources, to which their sizes are about proportional."""

MAX_COMPILING = 2
"""Grammars that compile at once."""


class GrammarMatcher:
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

    def copy(self) -> GrammarMatcher:
        """Another one that stands where this one does."""
        return GrammarMatcher(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ComputeError(f"what the answer must follow cannot be followed: {_error(self._matcher)}")


class _LateMatcher(GrammarMatcher):
    """Of a request whose time was up before its grammar was compiled; lets no token pass."""

    def __init__(self) -> None:
        super().__init__(None)

    def mask(self) -> bytes:
        raise ComputeError("the time was up before the grammar was compiled")

    def copy(self) -> GrammarMatcher:
        return self


class GrammarCompiler:
    """Compiles grammars for one model and keeps them. Thread-safe.

    A grammar compiles in a thread of its own, so that callers can stop waiting. Equal grammars that are asked
    for at the same time compile once. The vocabulary is handed over with the first.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(MAX_COMPILING)
        self._tokenizing = threading.Lock()
        self._tokenizer: Any = None
        self._kept: OrderedDict[_Key, GrammarMatcher] = OrderedDict()  # the least recently used first
        self._n_characters = 0
        self._waiting: dict[_Key, list[Future[GrammarMatcher]]] = {}  # for what is compiled
        self._closed = False

    def compile(self, params: SamplingParams, seconds: float | None = None) -> GrammarMatcher | None:
        """Return the matcher to copy for each answer; None if answers are free.

        Args:
            params: may name a grammar, a schema or an expression.
            seconds: time to wait; after it a matcher is returned that lets no token pass.

        Raises:
            RequestError: grammar, schema or expression are wrong, or beyond a limit.
            ConfigError: llguidance is not installed.
            ClosedError: the compiler was closed.
            OutOfMemory: there is no room for a thread.
        """
        future = self.begin(params)
        if future is None:
            return None
        try:
            return future.result(seconds)
        except TooLate:
            return _LateMatcher()
        finally:
            future.cancel()

    def begin(self, params: SamplingParams) -> Future[GrammarMatcher] | None:
        """Return what will have the matcher, or raise, as `compile` does; cancel it to stop waiting."""
        given = [(name, getattr(params, name)) for name in _SOURCES if getattr(params, name) is not None]
        if not given:
            return None
        check_installed()
        key, future = given[0], Future[GrammarMatcher]()
        with self._lock:
            if self._closed:
                raise ClosedError("this engine was closed")
            if key in self._kept:
                self._kept.move_to_end(key)
                future.set_result(self._kept[key])
            elif key in self._waiting:
                self._waiting[key].append(future)
            else:
                start_deep(partial(self._run, key), "pyvelo-grammar")
                self._waiting[key] = [future]
        return future

    def close(self) -> None:
        """Let nobody wait any more. What compiles ends by itself, soon."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._kept.clear()
        for futures in waiting.values():
            _tell(futures, ClosedError("this engine was closed"))

    def _run(self, key: _Key) -> None:
        with self._slots:
            with self._lock:
                if all(future.cancelled() for future in self._waiting.get(key, ())):
                    self._waiting.pop(key, None)
                    return
            outcome: GrammarMatcher | BaseException
            try:
                outcome = self._made(*key)
            except BaseException as error:
                outcome = error
        with self._lock:
            futures = self._waiting.pop(key, [])
            if isinstance(outcome, GrammarMatcher) and not self._closed:
                self._keep(key, outcome)
        _tell(futures, outcome)

    def _keep(self, key: _Key, matcher: GrammarMatcher) -> None:
        self._kept[key] = matcher
        self._n_characters += len(key[1])
        while len(self._kept) > MAX_KEPT or self._n_characters > MAX_KEPT_CHARACTERS:
            (_, source), _ = self._kept.popitem(last=False)
            self._n_characters -= len(source)

    def _made(self, name: str, source: str) -> GrammarMatcher:
        from llguidance import LLMatcher

        try:
            check_size(source)
            grammar = _SOURCES[name](source, self._model)
        except Exception as error:  # whatever a converter finds wrong
            raise RequestError(f"{name}: {one_line(str(error))}") from error
        matcher = LLMatcher(self._ready(), grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise RequestError(f"{name}: {_error(matcher)}")
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise RequestError(f"{name}: no answer can follow it: {_error(first)}")
        return GrammarMatcher(matcher)

    def _ready(self) -> Any:
        with self._tokenizing:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(self._model)
            return self._tokenizer


def _tell(futures: list[Future[GrammarMatcher]], outcome: GrammarMatcher | BaseException) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            if isinstance(outcome, GrammarMatcher):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)


def check_installed() -> None:
    """ConfigError where llguidance is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ConfigError(
            "grammars, JSON schemas and regular expressions need llguidance: pip install pyvelo[grammar]"
        ) from None


def _error(matcher: Any) -> str:
    """Without the state behind it."""
    text = str(matcher.get_error())
    if text.startswith("panic:"):
        return "it is too large to be followed: shorten it"
    if "NoExtension" in text:
        return "no token can come next"
    return one_line(re.split(r"\s*<(?:state|non-verbose)", text)[0])


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
    ends = _ends_of(model)
    if not ends:
        raise RequestError("this model has no token that ends an answer, and so none for a grammar's end")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(model, ends)), n_vocab=n_tokens, eos_token=ends)


def _from_grammar(source: str, model: Model) -> str:
    from llguidance import LLMatcher

    if _LARK.search(source) and not _GBNF.match(source):
        check_lark(source)
        return str(LLMatcher.grammar_from_lark(source))
    return str(LLMatcher.grammar_from_lark(to_lark(source, partial(_token_of, model), _ends_of(model))))


def _token_of(model: Model, name: str) -> int | None:
    """The token of `<name>` or `<[id]>`, but none that ends an answer."""
    if number := re.fullmatch(r"<\[([0-9]{1,10})\]>", name):
        token = int(number[1])
        return token if token < model.vocab.n_tokens and not model.is_end(token) else None
    tokens = model.tokenize(name, add_special=False, parse_special=True)
    return tokens[0] if len(tokens) == 1 and not model.is_end(tokens[0]) else None


def _ends_of(model: Model) -> list[int]:
    return [token for token in range(model.vocab.n_tokens) if model.is_end(token)]


def _from_schema(schema: str, model: Model) -> str:
    from llguidance import LLMatcher

    wanted: Any = json.loads(schema)
    if not isinstance(wanted, (dict, bool)):
        raise ValueError(f"a schema is an object, true or false, got {shown(wanted)}")
    check_schema(wanted)
    # of two that come to the same, the one that can take options
    wanted = {} if wanted is True else wanted
    options: Any = {"whitespace_pattern": _WHITESPACE} if isinstance(wanted, dict) else None
    return str(LLMatcher.grammar_from_json_schema(wanted, defaults=options))


def _from_regex(regex: str, model: Model) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(regex))


_SOURCES: dict[str, Callable[[str, Model], str]] = {
    "grammar": _from_grammar,
    "json_schema": _from_schema,
    "regex": _from_regex,
}
