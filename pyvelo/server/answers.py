"""Content, reasoning and tool calls of the answers to a chat, for the forms of all endpoints."""

from __future__ import annotations

import json
from typing import Any

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.chat.conversation import ChatPrompt
from pyvelo.engine.input_processor import Prompt
from pyvelo.sampling import SamplingParams

__all__ = ["adapt", "arguments_of"]


def adapt(reader: AnswerReader, prompt: Prompt, params: SamplingParams) -> SamplingParams:
    """Let the reader take the format of the answer; return the parameters that it needs."""
    if not isinstance(prompt, ChatPrompt):
        return params
    reader.format = prompt.answer
    return prompt.params(params)


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if the answer was cut within them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    # half of a surrogate pair, which JSON can escape, is no character: "?"
    whole = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
    return dict(json.loads(whole))
