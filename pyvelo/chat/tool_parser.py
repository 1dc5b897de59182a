"""Parser of answers: content, reasoning and tool calls out of text that comes in pieces."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from pyvelo.errors import ComputeError, OutOfMemory
from pyvelo.outputs import Delta, ToolCall

__all__ = ["ParsedMessage", "ToolParser", "parse_text"]

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # the only length that Mistral's templates accept
_HOT = '<>[]{}|\uff5c`"\\\n'
"""Characters that may begin or end a part of an answer in any format: it is parsed after each of them."""

_STRIDE = 8  # characters between two parses without such a character
_TAIL = 8  # characters at the end of a part that show that the text goes on in it


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """Parts of a whole answer.

    content: text without reasoning and tool calls.
    reasoning: None if there is none.
    complete: the text was in the model's format up to its end; False if it was cut or malformed.
    deltas: parts that `ToolParser.push` had not returned.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    complete: bool = True
    deltas: tuple[Delta, ...] = ()

    @property
    def parts(self) -> list[Delta]:
        """The parts that are not empty, each as one delta."""
        found = [Delta(reasoning=self.reasoning)] if self.reasoning else []
        found += [Delta(content=self.content)] if self.content else []
        calls = enumerate(self.tool_calls)
        return found + [
            Delta(index=index, id=call.id, name=call.name, arguments=call.arguments) for index, call in calls
        ]


class Parses(Protocol):
    """Upstream's parser of one answer."""

    def parse(self, text: str, *, partial: bool = False) -> dict[str, Any]:
        """Return content, reasoning and tool_calls; raise ComputeError if the text is in another format."""


@dataclass
class _Call:
    id: str
    name: str
    arguments: str = ""


class ToolParser:
    """Incremental parser of one answer. One thread at a time may use it.

    All deltas together are the same for every split of a text into pieces: the text is parsed at places that
    depend on its characters alone. What was returned is never retracted. If the rest of an answer contradicts
    it, the message keeps what was returned.

    Args:
        parses: upstream's parser.
        words: marks of the model's format. Only their first characters can end content and reasoning.
    """

    def __init__(self, parses: Parses, words: Iterable[str] = ()) -> None:
        begins = {word.strip()[0] for word in words if word.strip()}
        self._hot = _one_of({*_HOT, *begins})
        in_text = _one_of({"<", *begins} if begins else {*_HOT} - {"\n"})
        self._ends = {
            "content": in_text,
            "reasoning": in_text,
            "arguments": _one_of({*'"\\<\n', *begins}),  # within a string of JSON
        }
        self._parses = parses
        self._text = ""
        self._parsed = 0  # characters of the last parse
        self._at = 0  # characters that were looked at
        self._field: str | None = None  # the part that plain characters continue
        self._spaces = ""  # at the end of it, not returned yet
        self._parts = {"content": "", "reasoning": ""}  # returned so far
        self._calls: list[_Call] = []

    def push(self, text: str) -> list[Delta]:
        """Append a piece of the answer; return what became certain."""
        self._text += text
        deltas: list[Delta] = []
        while self._at < len(self._text):
            if self._field is not None:
                self._continue(deltas)
            elif not self._parse_next(deltas):
                break
        return _joined(deltas)

    def finish(self) -> ParsedMessage:
        """Return the whole message, at the end of the answer."""
        found, complete = _whole(self._parses, self._text)
        deltas: list[Delta] = []
        self._add(found, deltas)
        self._end_call(deltas)
        return ParsedMessage(
            content=self._parts["content"],
            reasoning=self._parts["reasoning"] or None,
            tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in self._calls),
            complete=complete,
            deltas=tuple(_joined(deltas)),
        )

    def _continue(self, deltas: list[Delta]) -> None:
        """Return characters that continue a part without a parse, up to one that may end it."""
        found = self._ends[self._field or ""].search(self._text, self._at)
        end = len(self._text) if found is None else found.start()
        run = self._spaces + self._text[self._at : end]
        shown = run.rstrip(" \n")
        self._spaces = run[len(shown) :]
        self._at = end
        if shown:
            self._put(self._field or "", shown, deltas)
        if found is not None:
            self._field, self._spaces = None, ""

    def _parse_next(self, deltas: list[Delta]) -> bool:
        """Parse up to the next place for it; return False if the text does not reach it."""
        gap = max(1, self._parsed >> 8)  # so that the work is linear in the length, and not quadratic
        first, last = self._parsed + gap, max(self._parsed + max(_STRIDE, gap), self._at + 1)
        found = self._hot.search(self._text, max(first, self._at + 1) - 1, last)
        place = last if found is None else found.end()
        if place > len(self._text):
            return False
        self._parsed = self._at = place
        text = self._text[:place]
        try:
            message = _trimmed(self._parses.parse(text, partial=True))
        except (ComputeError, OutOfMemory):
            return True
        self._add(message, deltas)
        self._field = self._continued(message, text)
        return True

    def _continued(self, message: dict[str, Any], text: str) -> str | None:
        """Return the part at whose end the text is, if plain characters continue it."""
        if message["tool_calls"]:
            part, known = message["tool_calls"][-1]["arguments"], self._calls[-1:]
            if len(self._calls) != len(message["tool_calls"]) or not _in_string(part):
                return None
            name, returned = "arguments", known[0].arguments
        else:
            name = "content" if message["content"] else "reasoning"
            part, returned = message[name], self._parts[name]
        tail = part[-_TAIL:]
        return name if tail and part == returned and text.endswith(tail) else None

    def _put(self, field: str, text: str, deltas: list[Delta]) -> None:
        if field == "arguments":
            self._calls[-1].arguments += text
            deltas.append(Delta(index=len(self._calls) - 1, arguments=text))
        else:
            self._parts[field] += text
            deltas.append(Delta(content=text) if field == "content" else Delta(reasoning=text))

    def _add(self, message: dict[str, Any], deltas: list[Delta]) -> None:
        """Return the difference between a message and what was returned."""
        for field in ("reasoning", "content"):
            if rest := _rest(self._parts[field], message[field]):
                self._put(field, rest, deltas)
        for index, call in enumerate(message["tool_calls"]):
            if index == len(self._calls):
                if not call["name"]:
                    break
                self._end_call(deltas)
                self._calls.append(_Call(call["id"] or new_id(), call["name"]))
                deltas.append(Delta(index=index, id=self._calls[-1].id, name=call["name"]))
            known, last = self._calls[index], index + 1 == len(self._calls)
            if last and known.name == call["name"] and (rest := _rest(known.arguments, call["arguments"])):
                known.arguments += rest
                deltas.append(Delta(index=index, arguments=rest))

    def _end_call(self, deltas: list[Delta]) -> None:
        """Complete the last call: no delta of it follows the beginning of another."""
        if self._calls and not self._calls[-1].arguments:
            self._calls[-1].arguments = "{}"
            deltas.append(Delta(index=len(self._calls) - 1, arguments="{}"))


def parse_text(parses: Parses, text: str) -> ParsedMessage:
    """Parse a whole answer at once."""
    found, complete = _whole(parses, text)
    calls = [call for call in found["tool_calls"] if call["name"]]
    return ParsedMessage(
        content=found["content"],
        reasoning=found["reasoning"] or None,
        tool_calls=tuple(
            ToolCall(call["id"] or new_id(), call["name"], call["arguments"] or "{}") for call in calls
        ),
        complete=complete,
    )


def new_id() -> str:
    """Return an id for a tool call whose model gives none."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


def _whole(parses: Parses, text: str) -> tuple[dict[str, Any], bool]:
    """Return the parts of an answer, and whether it is complete; all is content if nothing else fits."""
    for partial in (False, True):
        try:
            message = _trimmed(parses.parse(text, partial=partial))
        except (ComputeError, OutOfMemory):
            continue
        if any(message.values()) or not text.strip():
            return message, not partial
    return {"content": text, "reasoning": "", "tool_calls": []}, False


def _trimmed(message: dict[str, Any]) -> dict[str, Any]:
    """Return the parts without the line ends that models write around their reasoning."""
    if message["reasoning"]:
        message["reasoning"] = message["reasoning"].strip()
        message["content"] = message["content"].lstrip("\n")
    return message


def _rest(returned: str, found: str) -> str:
    return found[len(returned) :] if found.startswith(returned) else ""


def _one_of(characters: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(''.join(sorted(characters)))}]")


def _in_string(arguments: str) -> bool:
    """Return whether the beginning of JSON ends within a string."""
    return len(re.findall(r'(?<!\\)(?:\\\\)*"', arguments)) % 2 == 1 and not arguments.endswith("\\")


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Return the deltas with each run of one part as one."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if last is None or last.part != delta.part:
            joined.append(delta)
        else:
            joined[-1] = Delta(
                content=last.content + delta.content,
                reasoning=last.reasoning + delta.reasoning,
                index=last.index,
                id=last.id,
                name=last.name,
                arguments=last.arguments + delta.arguments,
            )
    return joined
