"""Turns of a chat, which can be removed, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pyvelo.errors import ConfigError

__all__ = ["Conversation", "Message", "Turn", "is_text"]

Message = dict[str, str]

FORMAT = "pyvelo chat 1"


@dataclass
class Turn:
    """Message of the user and its answer; None: no answer yet.

    reasoning: what the model thought before the answer; None: nothing.
    """

    user: str
    answer: str | None = None
    reasoning: str | None = None


@dataclass
class Conversation:
    """Turns, the oldest first, after an optional system message.

    n_forgotten: oldest turns that the model does not see any more; they are still saved.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    n_forgotten: int = field(default=0, compare=False)

    def messages(self) -> list[Message]:
        """Return the messages for a chat template."""
        return self._messages(self.turns[self.n_forgotten :])

    def _messages(self, turns: Iterable[Turn]) -> list[Message]:
        said: list[Message] = []
        if self.system is not None:
            said.append({"role": "system", "content": self.system})
        for turn in turns:
            said.append({"role": "user", "content": turn.user})
            if turn.answer is not None:
                thought = {} if turn.reasoning is None else {"reasoning_content": turn.reasoning}
                said.append({"role": "assistant", **thought, "content": turn.answer})
        return said

    def say(self, text: str) -> None:
        """Append a turn of the user."""
        self.turns.append(Turn(text))

    def undo(self) -> Turn | None:
        """Remove and return the last turn."""
        last = self.turns.pop() if self.turns else None
        if self.n_forgotten >= len(self.turns):
            self.n_forgotten = 0
        return last

    def forget_oldest(self) -> bool:
        """Hide the oldest turn from the model; return False if only the turn that waits is left."""
        if len(self.turns) - self.n_forgotten < 2:
            return False
        self.n_forgotten += 1
        return True

    def copy(self) -> Conversation:
        """Return a copy that changes on its own."""
        return Conversation(self.system, [replace(turn) for turn in self.turns], self.n_forgotten)

    def reset(self) -> None:
        """Remove all turns; the system message stays."""
        self.turns.clear()
        self.n_forgotten = 0

    def to_json(self) -> str:
        """Return the conversation as JSON for `from_json`."""
        messages = self._messages(self.turns)
        return json.dumps({"format": FORMAT, "messages": messages}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """Parse the JSON of `to_json`; ConfigError if it is not valid."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("it has another form")
            messages: Any = data["messages"]
            if data["format"] != FORMAT or not isinstance(messages, list):
                raise ValueError("it has another form")
            if not all(_is_message(message) for message in messages):
                raise ValueError("a message is not a role with a text")
        except KeyError as error:
            raise ConfigError(f"the file is not a chat of /save: it has no {error}") from None
        except json.JSONDecodeError:
            raise ConfigError("the file is not a chat of /save: it is no JSON") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the file is not a chat of /save: {error}") from None
        made = cls()
        for message in messages:
            made._add(message["role"], message["content"], message.get("reasoning_content"))
        if made.turns and made.turns[-1].answer is None:
            raise ConfigError("the file is not a chat of /save: its last message has no answer")
        return made

    def _add(self, role: str, content: str, reasoning: str | None) -> None:
        if role == "system" and self.system is None and not self.turns:
            self.system = content
        elif role == "user" and (not self.turns or self.turns[-1].answer is not None):
            self.say(content)
        elif role == "assistant" and self.turns and self.turns[-1].answer is None:
            self.turns[-1].answer, self.turns[-1].reasoning = content, reasoning
        else:
            raise ConfigError(f"the file is not a chat of /save: {role!r} has its turn in the wrong place")


def is_text(text: str) -> bool:
    """Return whether the text is valid Unicode, without lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        and is_text(message["content"])
        and isinstance(message.get("reasoning_content", ""), str)
        and is_text(message.get("reasoning_content", ""))
    )
