"""Content, reasoning and tool calls of the answers to a chat, for the forms of all endpoints."""

from __future__ import annotations

import json
from typing import Any

from pyvelo.chat.answer_format import AnswerFormat
from pyvelo.chat.conversation import ChatPrompt
from pyvelo.chat.tool_parser import Delta, ParsedMessage, ToolParser
from pyvelo.engine.input_processor import Prompt
from pyvelo.outputs import StreamPiece
from pyvelo.sampling import SamplingParams

__all__ = ["AnswerReader", "arguments_of"]


class AnswerReader:
    """Parser of the answers to one prompt. Without a format, their text is content.

    called: numbers of the choices whose pieces had tool calls.
    """

    def __init__(self, answer: AnswerFormat | None = None) -> None:
        self._format = answer
        self._parsers: dict[int, ToolParser] = {}
        self.called: set[int] = set()

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self._format is None

    def adapt(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """Take the format of the answer; return the parameters that it needs."""
        if not isinstance(prompt, ChatPrompt):
            return params
        self._format = prompt.answer
        return prompt.params(params)

    def push(self, index: int, piece: StreamPiece) -> list[Delta]:
        """Return what a piece of a choice adds; the last one ends the choice."""
        if self._format is None:
            return [Delta(content=piece.text)] if piece.text else []
        parser = self._parsers.get(index) or self._parsers.setdefault(index, self._format.parser())
        found = parser.push(piece.text)
        if piece.finish_reason is not None:
            found += parser.finish().deltas
        if any(delta.index is not None for delta in found):
            self.called.add(index)
        return found

    def parse(self, text: str) -> ParsedMessage:
        """Return the parts of a whole answer."""
        return ParsedMessage(text) if self._format is None else self._format.parse(text)


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if the answer was cut within them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
