"""Compilation of grammars, JSON schemas and regular expressions to bitmasks of the allowed tokens.

llguidance (the extra `grammar`) does the work. GBNF is translated to its Lark.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from pyvelo.errors import ClosedError, ConfigError, RequestError, one_line, shown
from pyvelo.grammar.lark import to_lark
from pyvelo.grammar.limits import (
    check_lark,
    check_schema,
    parser_limits,
    start_deep,
)
from pyvelo.grammar.matcher import GrammarMatcher, LateMatcher, LazyMatcher, Marks, error_of
from pyvelo.sampling import LazyGrammar, SamplingParams

if TYPE_CHECKING:
    from pyvelo.native import Model

__all__ = ["GrammarCompiler", "check_installed"]

_Key = tuple[str, str, tuple[object, ...]]
"""Kind of a source, the source, and the marks of a lazy grammar."""

# between the parts of JSON: a space, or a new line and its indentation. Without a limit, small models write
# blanks until max_tokens.
_WHITESPACE = r" ?|\n[ \t]{0,32}"

_LARK = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|[?!]*start\b[^:\n]*:(?!:=))")
_GBNF = re.compile(r"(?:\s|(?:#|//)[^\r\n]*(?:[\r\n]|\Z))*[A-Za-z0-9_-]+[ \t]*::=")

_AFTER = re.compile(r"# after (\[.*\])\n")
"""First line of a GBNF whose outputs continue a text: its parts, strings and ids of control tokens."""

MAX_FORCED = 256  # bytes

MAX_CACHED = 64
"""Cached grammars of a model."""

MAX_CACHED_CHARACTERS = 1 << 21
"""Characters of their sources: the sizes of compiled grammars are about proportional to them."""

MAX_COMPILING = 2
"""Grammars that compile at once."""

WAIT_SECONDS = 0.1
"""Seconds after which a caller that waits for a grammar checks whether to go on."""


class GrammarCompiler:
    """Compiler of grammars for one model, with a cache. Thread-safe.

    Each grammar compiles in its own thread, so callers can stop waiting. Equal grammars of concurrent callers
    compile once. llguidance reads the vocabulary with the first grammar.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(MAX_COMPILING)
        self._tokenizing = threading.Lock()
        self._tokenizer: Any = None
        self._cached: OrderedDict[_Key, GrammarMatcher] = OrderedDict()  # the least recently used first
        self._n_characters = 0
        self._waiting: dict[_Key, list[Future[GrammarMatcher]]] = {}  # callers of the grammars that compile
        self._closed = False

    def compile(
        self,
        params: SamplingParams,
        seconds: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> GrammarMatcher | None:
        """Return the matcher to copy for each output; None if `params` has no grammar.

        Args:
            params: may have a grammar, a schema or a regular expression.
            seconds: time to wait; then the returned matcher allows no token.
            check: called now and then during the wait, which its exception ends.

        Raises:
            RequestError: the grammar, schema or expression is wrong, or exceeds a limit.
            ConfigError: llguidance is not installed.
            ClosedError: the compiler was closed.
            OutOfMemory: the system has no memory for a thread.
        """
        future = self.begin(params)
        if future is None:
            return None
        end = math.inf if seconds is None else monotonic() + seconds
        try:
            while True:
                check()
                with suppress(TooLate):
                    return future.result(max(0.0, min(WAIT_SECONDS, end - monotonic())))
                if monotonic() >= end:
                    return LateMatcher()
        finally:
            future.cancel()
            del future  # or its exception would keep this frame, and the frame it

    def begin(self, params: SamplingParams) -> Future[GrammarMatcher] | None:
        """Return the future of `compile`; cancel it to stop waiting."""
        given = [(name, getattr(params, name)) for name in _SOURCES if getattr(params, name) is not None]
        if not given:
            return None
        check_installed()
        name, source = given[0]
        key = name, source, source.marks if isinstance(source, LazyGrammar) else ()
        future = Future[GrammarMatcher]()
        with self._lock:
            if self._closed:
                raise ClosedError("this engine was closed")
            if key in self._cached:
                self._cached.move_to_end(key)
                future.set_result(self._cached[key])
            elif key in self._waiting:
                self._waiting[key].append(future)
            else:
                start_deep(partial(self._run, key), "pyvelo-grammar")
                self._waiting[key] = [future]
        return future

    def close(self) -> None:
        """End all waits with ClosedError. Running compilations end by themselves, soon."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._cached.clear()
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
                outcome = self._made(*key[:2])
            except BaseException as error:
                outcome = error
        with self._lock:
            futures = self._waiting.pop(key, [])
            if isinstance(outcome, GrammarMatcher) and not self._closed:
                self._cache(key, outcome)
        _tell(futures, outcome)
        del futures, outcome  # or an exception would keep this frame, and the frame it

    def _cache(self, key: _Key, matcher: GrammarMatcher) -> None:
        self._cached[key] = matcher
        self._n_characters += len(key[1])
        while len(self._cached) > MAX_CACHED or self._n_characters > MAX_CACHED_CHARACTERS:
            (_, source, _), _ = self._cached.popitem(last=False)
            self._n_characters -= len(source)

    def _made(self, name: str, source: str) -> GrammarMatcher:
        if not isinstance(source, LazyGrammar):
            return GrammarMatcher(self._compiled(name, source))
        try:
            matcher = self._compiled(name, source)
        except RequestError:  # the request does not ask for it, so the answer is free
            matcher = None
        ends = tuple(end.encode() for end in source.ends)
        marks = Marks(tuple(word.encode() for word in source.words), source.think.encode(), ends)
        return LazyMatcher(matcher, marks, source.thinks, self._text_of, self._tokens_of)

    def _text_of(self, token: int) -> bytes:
        return self._model.token_bytes(token, special=True)

    def _tokens_of(self, text: bytes) -> list[int]:
        tokens: list[int] = self._ready().tokenize_bytes(text)
        return tokens

    def _compiled(self, name: str, source: str) -> Any:
        """Return llguidance's matcher at the beginning of a grammar; raise RequestError."""
        from llguidance import LLMatcher

        try:
            grammar = _SOURCES[name](source, self._model)
        except Exception as error:  # a converter's error, of any class
            raise RequestError(f"{name}: {one_line(str(error))}") from error
        matcher = LLMatcher(self._ready(), grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise RequestError(f"{name}: {error_of(matcher)}")
        if (begun := _AFTER.match(source)) and name == "grammar":
            self._begin(matcher, begun[1])
        for _ in range(2):  # copies share the lexer, and some errors of its limits come with the next mask
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                raise RequestError(f"{name}: no output can follow it: {error_of(first)}")
        return matcher

    def _begin(self, matcher: Any, parts: str) -> None:
        """Append the tokens of a text that outputs continue, a list in JSON."""
        tokens: list[int] = []
        try:
            for part in json.loads(parts):
                tokens += [part] if isinstance(part, int) else self._ready().tokenize_bytes(part.encode())
            followed = matcher.try_consume_tokens(tokens)
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            followed = -1  # of a caller
        if followed != len(tokens) or matcher.is_error():
            raise RequestError(f"grammar: no output that continues {shown(parts)} can follow it")

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
    """Raise ConfigError if llguidance is not installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ConfigError(
            "grammars, JSON schemas and regular expressions need llguidance: pip install 'pyvelo[grammar]'"
        ) from None


class _Vocabulary:
    """A model's vocabulary in llguidance's interface."""

    bos_token_id = None

    def __init__(self, model: Model, ends: Sequence[int]) -> None:
        plain = model.all_token_bytes()
        self._model = model
        self.special_token_ids = [token for token, text in enumerate(plain) if not text]
        self.tokens = plain
        for token in self.special_token_ids:
            self.tokens[token] = model.token_bytes(token, special=True)
        self.eos_token_id = ends[0]
        self._ids = {text: token for token, text in enumerate(plain) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of forced text, with exactly its bytes.

        The tokens of its first MAX_FORCED bytes suffice. llguidance calls this at every token, so a long text
        would take too long.
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
                break  # llguidance splits the rest itself
            tokens.append(token)
            at += len(self.tokens[token])
        return tokens


def _tokenizer_of(model: Model) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    n_tokens = model.vocab.n_tokens
    ends = model.end_tokens
    if not ends:
        raise RequestError("grammars need a token that ends the output, and this model has none")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(model, ends)), n_vocab=n_tokens, eos_token=[*ends])


def _from_grammar(source: str, model: Model) -> str:
    from llguidance import LLMatcher

    if _LARK.search(source) and not _GBNF.match(source):
        check_lark(source)
        return str(LLMatcher.grammar_from_lark(source))
    return str(LLMatcher.grammar_from_lark(to_lark(source, partial(_token_of, model), model.end_tokens)))


def _token_of(model: Model, name: str) -> int | None:
    """Return the token `<name>` or `<[id]>`; None if there is none, or if it ends an output."""
    if number := re.fullmatch(r"<\[([0-9]{1,10})\]>", name):
        token = int(number[1])
        return token if token < model.vocab.n_tokens and not model.is_end(token) else None
    tokens = model.tokenize(name, add_special=False, parse_special=True)
    return tokens[0] if len(tokens) == 1 and not model.is_end(tokens[0]) else None


def _from_schema(schema: str, model: Model) -> str:
    from llguidance import LLMatcher

    wanted: Any = json.loads(schema)
    if not isinstance(wanted, (dict, bool)):
        raise ValueError(f"a schema is an object, true or false, got {shown(wanted)}")
    check_schema(wanted)
    # equivalent, and a dictionary can have options
    wanted = {} if wanted is True else wanted
    options: Any = {"whitespace_pattern": _WHITESPACE} if isinstance(wanted, dict) else None
    return str(LLMatcher.grammar_from_json_schema(wanted, defaults=options))


def _from_regex(regex: str, model: Model) -> str:
    from llguidance import LLMatcher

    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance would ignore it
        raise ValueError("it ends with a backslash that escapes nothing: write \\\\ for a backslash")
    return str(LLMatcher.grammar_from_regex(regex))


_SOURCES: dict[str, Callable[[str, Model], str]] = {
    "grammar": _from_grammar,
    "json_schema": _from_schema,
    "regex": _from_regex,
}
