"""What was said in a chat: turns that can be taken back, saved and forgotten."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pyvelo.errors import ConfigError

__all__ = ["Conversation", "Message", "Turn", "is_text"]

Message = dict[str, str]

FORMAT = "pyvelo chat 1"


@dataclass
class Turn:
    """What the user said and what came back; None: nothing yet."""

    user: str
    answer: str | None = None


@dataclass
class Conversation:
    """Turns, the oldest first; the system's text stands before them."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """As a chat template takes them."""
        said: list[Message] = []
        if self.system is not None:
            said.append({"role": "system", "content": self.system})
        for turn in self.turns:
            said.append({"role": "user", "content": turn.user})
            if turn.answer is not None:
                said.append({"role": "assistant", "content": turn.answer})
        return said

    def say(self, text: str) -> None:
        """The user's next turn."""
        self.turns.append(Turn(text))

    def undo(self) -> Turn | None:
        """Takes the last turn back."""
        return self.turns.pop() if self.turns else None

    def forget_oldest(self) -> bool:
        """Lets the oldest turn go; False where only the one that waits for its answer is left."""
        if len(self.turns) < 2:
            return False
        del self.turns[0]
        return True

    def reset(self) -> None:
        """Forgets all turns; the system's text stays."""
        self.turns.clear()

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps({"format": FORMAT, "messages": self.messages()}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """Reads what `to_json` wrote, or ConfigError."""
        try:
            data = json.loads(text)
            messages: list[Any] = data["messages"]
            if data["format"] != FORMAT or not all(_is_message(message) for message in messages):
                raise ValueError("it is no saved chat")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"this is no chat that /save wrote: {error}") from None
        made = cls()
        for message in messages:
            made._add(message["role"], message["content"])
        return made

    def _add(self, role: str, content: str) -> None:
        if role == "system" and self.system is None and not self.turns:
            self.system = content
        elif role == "user" and (not self.turns or self.turns[-1].answer is not None):
            self.say(content)
        elif role == "assistant" and self.turns and self.turns[-1].answer is None:
            self.turns[-1].answer = content
        else:
            raise ConfigError(f"this is no chat that /save wrote: {role!r} has its turn in the wrong place")


def is_text(text: str) -> bool:
    """Whether the text is Unicode, without halves of characters or bytes that could not be decoded."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        and is_text(message["content"])
    )
