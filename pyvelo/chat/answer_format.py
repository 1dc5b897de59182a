"""Formats of answers: grammar, stop strings and parser of a chat, which upstream derives from the template.

PyVelo renders the prompt. From upstream come the grammar and the parser, for a prompt with the same end.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from pyvelo.chat.messages import Message
from pyvelo.chat.tool_parser import ParsedMessage, Parses, ToolParser, parse_text
from pyvelo.chat.tools import Tools, history
from pyvelo.errors import ConfigError, RequestError, one_line
from pyvelo.outputs import Delta, StreamPiece
from pyvelo.sampling import MAX_CHARACTERS, LazyGrammar, SamplingParams

if TYPE_CHECKING:
    from pyvelo.native.chat_format import ChatFormat, ChatPlan

__all__ = ["AnswerFormat", "AnswerFormats", "AnswerReader", "Vocabulary", "prepare", "thinks"]

MAX_FORMATS = 16
MAX_PLANS = 128

_THINKS = re.compile(r"think|reason|thought|<\|channel", re.IGNORECASE)
_THINKING: tuple[dict[str, bool | None], ...] = tuple({"enable_thinking": it} for it in (True, False, None))
_PREAMBLE = re.compile(r"(?m)^(root ::= .*?)\buntil-\d+\?? (?=(?:space )?[\w-]*tool-call)")
_SEVERAL = re.compile(r"(?m)^(tool-calls ::= )\((tool-call)(?: space)?\)\+$")
_LITERAL = re.compile(r'\[(?:[^\]\\\n]|\\.)*\]|"((?:[^"\\\n]|\\.)*)"|#[^\n]*')


class Vocabulary(Protocol):
    """The functions of a model that tell control tokens from text."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text."""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the text of a token; empty for a control token, unless `special`."""


@dataclass(frozen=True)
class AnswerFormat:
    """Format of the answer to one prompt. Thread-safe.

    grammar: GBNF that answers follow, or None; a `LazyGrammar` if calls may come, but need not.
    stops: strings that end an answer.
    shows_controls: the parser reads the names of control tokens, so the text must have them.
    words: marks of the format.
    """

    parses: Parses
    grammar: str | None = None
    stops: tuple[str, ...] = ()
    shows_controls: bool = False
    words: tuple[str, ...] = ()

    def parser(self) -> ToolParser:
        """Return a parser for an answer that comes in pieces."""
        return ToolParser(self.parses, self.words)

    def parse(self, text: str) -> ParsedMessage:
        """Parse a whole answer."""
        return parse_text(self.parses, text)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with this format's grammar and stop strings.

        Raises:
            RequestError: they have another grammar, and the format requires its own.
        """
        changes: dict[str, Any] = {}
        given = [name for name in ("grammar", "json_schema", "regex") if getattr(params, name) is not None]
        if isinstance(self.grammar, LazyGrammar):
            if not given and len(self.grammar) <= MAX_CHARACTERS and _can_follow():
                changes["grammar"] = self.grammar
        elif self.grammar is not None:
            if given:
                raise RequestError(
                    f"{given[0]} and a tool call that is required: an answer can follow only one"
                )
            if len(self.grammar) > MAX_CHARACTERS:
                raise RequestError(
                    f"tools: their grammar has {len(self.grammar)} characters, more than {MAX_CHARACTERS}: "
                    "give fewer tools, or smaller ones"
                )
            changes["grammar"] = self.grammar
        if self.stops:
            changes["stop"] = (*(params.stop or ()), *self.stops)
        if self.shows_controls:
            changes["skip_special_tokens"] = False
        return replace(params, **changes) if changes else params


class AnswerReader:
    """Parser of the answers to one prompt, whose pieces come in any order. Without a format, text is content.

    format: of the answers; it may be set before the first piece.
    called: numbers of the samples whose pieces had tool calls.

    Args:
        echo: text before each sample, which is no part of the answer.
    """

    def __init__(self, answer: AnswerFormat | None = None, echo: str = "") -> None:
        self.format = answer
        self.called: set[int] = set()
        self._parsers: dict[int, ToolParser] = {}
        self._echo = echo
        self._begun: set[int] = set()

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self.format is None

    def push(self, index: int, piece: StreamPiece) -> list[Delta]:
        """Return what a piece of a sample adds; the last one ends the sample."""
        if self.format is None:
            return [Delta(content=piece.text)] if piece.text else []
        parser = self._parsers.get(index) or self._parsers.setdefault(index, self.format.parser())
        found = parser.push(piece.text)
        if piece.finish_reason is not None:
            found += parser.finish().deltas
        if any(delta.index is not None for delta in found):
            self.called.add(index)
        return found

    def read(self, piece: StreamPiece) -> StreamPiece:
        """Return a piece with its deltas."""
        answer = piece
        if self._echo and piece.index not in self._begun:
            self._begun.add(piece.index)
            answer = replace(piece, text=piece.text.removeprefix(self._echo))
        return replace(piece, deltas=tuple(self.push(piece.index, answer)))

    def parse(self, text: str) -> ParsedMessage:
        """Return the parts of a whole answer."""
        return ParsedMessage(text) if self.format is None else self.format.parse(text)


class AnswerFormats:
    """Formats of the chat templates of one model, cached. Thread-safe."""

    def __init__(self, model: Vocabulary) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._formats: OrderedDict[str, ChatFormat | RequestError] = OrderedDict()
        self._plans: OrderedDict[tuple[str, str], ChatPlan] = OrderedDict()

    def find(
        self,
        template: str,
        prompt: str,
        messages: Sequence[Message],
        tools: Tools,
        arguments: Mapping[str, Any] | None = None,
    ) -> AnswerFormat | None:
        """Return the format of the answer to a prompt; None if it is plain text, or is not known.

        Args:
            template: its source.
            prompt: the conversation as PyVelo's template engine renders it, with the beginning of the answer.
            arguments: other variables of the template.

        Raises:
            RequestError: tools were asked for, and the template has no format for them.
        """
        if not tools.functions and not thinks(template):
            return None
        try:
            plan = self._plan(template, prompt, messages, tools, arguments or {})
        except RequestError:
            if tools.asked:
                raise
            return None
        facts = plan.facts
        named = [name for name in facts["preserved_tokens"] if _control(self._model, name)]
        grammar = None
        if tools.choice == "required":
            if not facts["grammar"] or facts["grammar_lazy"]:
                raise RequestError("tool_choice: this model's chat template has no format for tool calls")
            grammar = _required(facts["grammar"], tools.parallel)
            grammar = after(self._model, grammar, facts["generation_prompt"], named)
        triggers = [one["value"] for one in facts["triggers"] if one["type"] == "word"]
        if tools.functions and facts["grammar_lazy"] and len(triggers) == len(facts["triggers"]) > 0:
            grammar = self._lazy(facts, triggers, named, tools.parallel)
        return AnswerFormat(
            plan,
            grammar=grammar,
            stops=tuple(facts["stops"]),
            shows_controls=bool(named) and bool(tools.functions),
            words=(*facts["preserved_tokens"], *triggers),
        )

    def _lazy(
        self, facts: Mapping[str, Any], words: Sequence[str], named: Sequence[str], parallel: bool
    ) -> LazyGrammar | None:
        """Return the grammar of calls that may come; None if it is not known where reasoning ends."""
        think, ends, begun = facts["thinking_start"], facts["thinking_ends"], facts["generation_prompt"]
        if facts["thinking"] and not (think and ends):
            return None
        source = facts["grammar"] if parallel else _SEVERAL.sub(r"\1\2", facts["grammar"])
        thinks = bool(think) and begun.rfind(think) > max(map(begun.rfind, ends))
        return LazyGrammar(after(self._model, source, "", named), words, think, ends, thinks)

    def _format(self, template: str) -> ChatFormat:
        from pyvelo.native.chat_format import ChatFormat  # here, so that only chats load it

        with self._lock:
            if template not in self._formats:
                made: ChatFormat | RequestError
                try:
                    made = ChatFormat(template)
                except ConfigError as error:
                    made = RequestError(one_line(str(error)))
                    if "takes too long" in str(error):  # the machine may be busy: try again
                        raise made from None
                self._formats[template] = made
                while len(self._formats) > MAX_FORMATS:
                    self._formats.popitem(last=False)
            self._formats.move_to_end(template)
            found = self._formats[template]
        if isinstance(found, RequestError):
            raise RequestError(str(found))
        return found

    def _plan(
        self,
        template: str,
        prompt: str,
        messages: Sequence[Message],
        tools: Tools,
        arguments: Mapping[str, Any],
    ) -> ChatPlan:
        """Return the plan for a prompt with this end: of a short conversation, or else of this one."""
        request: dict[str, Any] = {
            "tools": list(tools.functions),
            "tool_choice": tools.choice,
            "parallel_tool_calls": tools.parallel,
        }
        # upstream always sets this variable, and PyVelo only if the caller does
        thinks: Sequence[dict[str, bool | None]] = ({},) if "enable_thinking" in arguments else _THINKING
        for conversation in ([{"role": "user", "content": "Hi"}], history(messages)):
            for think in thinks:
                given = {**arguments, **think}
                known = {"arguments": given, "enable_thinking": given["enable_thinking"] is not False}
                plan = self._cached(template, {"messages": conversation, **known, **request})
                if prompt.endswith(plan.facts["generation_prompt"]):
                    return plan
        raise RequestError(
            "this chat template begins the answer in another way than llama.cpp's engine does, so tool calls "
            "cannot be parsed: give tool_choice='none'"
        )

    def _cached(self, template: str, request: dict[str, Any]) -> ChatPlan:
        try:
            key = (template, json.dumps(request))
        except (TypeError, ValueError) as error:
            raise RequestError(f"an argument of the template is no JSON: {one_line(str(error))}") from None
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
        try:
            plan = self._format(template).plan(request)
        except ConfigError as error:
            raise RequestError(one_line(str(error))) from None
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        return plan


def thinks(template: str) -> bool:
    """Return whether the source of a chat template has words of reasoning."""
    return _THINKS.search(template) is not None


def prepare(
    formats: AnswerFormats,
    template: str,
    prompt: str,
    messages: Sequence[Message],
    tools: Any = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> AnswerFormat | None:
    """Return the format of the answer to a prompt, as `AnswerFormats.find`, for a request's arguments."""
    return formats.find(
        template, prompt, messages, Tools.of(tools, tool_choice, parallel_tool_calls), arguments
    )


def after(model: Vocabulary, grammar: str, begun: str, names: Iterable[str]) -> str:
    """Return a grammar for answers that continue the text `begun`, with control tokens for these names."""
    tokens = {name: token for name in names if (token := _control(model, name)) is not None}
    for token in model.tokenize(begun, add_special=False, parse_special=True):
        if not model.token_bytes(token):
            tokens[model.token_bytes(token, special=True).decode("utf-8", "replace")] = token
    if tokens:
        grammar = _with_tokens(grammar, tokens)
    parts = [tokens.get(part, part) for part in _splitter(tokens).split(begun) if part]
    return f"# after {json.dumps(parts)}\n{grammar}" if parts else grammar


@cache
def _can_follow() -> bool:
    """Return whether the extra `grammar` is installed."""
    return importlib.util.find_spec("llguidance") is not None


def _required(grammar: str, parallel: bool) -> str:
    """Return a grammar without content in front of the call, and with one call alone unless `parallel`."""
    grammar = _PREAMBLE.sub(r"\1", grammar)
    return grammar if parallel else _SEVERAL.sub(r"\1\2", grammar)


def _splitter(tokens: Mapping[str, int]) -> re.Pattern[str]:
    """Return a pattern that splits a text at the names of control tokens."""
    names = sorted(map(re.escape, tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(names) or '(?!)'})")


def _control(model: Vocabulary, name: str) -> int | None:
    """Return the control token with this name, None if there is none."""
    tokens = model.tokenize(name, add_special=False, parse_special=True)
    return tokens[0] if len(tokens) == 1 and not model.token_bytes(tokens[0]) else None


def _with_tokens(grammar: str, tokens: Mapping[str, int]) -> str:
    """Return a GBNF with control tokens for their names; not in JSON, which users describe."""
    split = _splitter(tokens)

    def literal(found: re.Match[str]) -> str:
        text = found[1]
        if not text or '\\"' in text or not split.search(text):
            return found[0]
        parts = [part for part in split.split(text) if part]
        return (
            "(" + " ".join(f"<[{tokens[part]}]>" if part in tokens else f'"{part}"' for part in parts) + ")"
        )

    return _LITERAL.sub(literal, grammar)
