"""Conversations between a user at a screen and a model: turns, answers and forks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from time import perf_counter as now
from typing import Protocol

from pyvelo.cli.conversation import Conversation, Message, Turn
from pyvelo.cli.screen import Screen
from pyvelo.cli.values import count, decode_rate
from pyvelo.outputs import StreamPiece, Usage

__all__ = ["Chat", "LastAnswer", "Talker"]


class Talker(Protocol):
    """Model behind a chat."""

    def fits(self, messages: list[Message]) -> bool:
        """Return whether the context has room for the conversation and an answer."""

    def stream(self, messages: list[Message]) -> Generator[StreamPiece, None, None]:
        """Yield the answer piece by piece; the last has its usage."""

    def think(self, wanted: bool) -> None:
        """Tell the template whether to reason before an answer."""

    def describe(self) -> str:
        """Return a line about the cache."""

    def describe_model(self) -> str:
        """Return lines about the model."""

    def describe_tokens(self, messages: list[Message]) -> str:
        """Return a line about the tokens of a conversation."""

    def describe_usage(self, usage: Usage) -> str:
        """Return, for the status line, the context and the memory that a conversation takes."""


@dataclass
class LastAnswer:
    """Figures of the last answer; times in seconds from its start."""

    n_tokens: int = 0
    first: float = 0.0
    total: float = 0.0
    usage: Usage | None = None

    @property
    def rate(self) -> float:
        """Tokens per second after the first; 0 without a second one."""
        return decode_rate(self.n_tokens, self.first, self.total)

    def describe(self) -> str:
        """Return its speed, and how much of its prompt was cached."""
        if not self.n_tokens:
            return "there is no answer yet"
        n_tokens, first = count(self.n_tokens, "token"), f"{self.first:.2f} s"
        speed = f"{n_tokens}, the first after {first}, then {self.rate:.1f} tokens per second"
        if self.usage is None:
            return speed
        prompt = count(self.usage.prompt_tokens, "token")
        return f"{speed}\n{self.usage.cached_tokens} of {prompt} of the conversation were in the cache"


class Chat:
    """Conversations between a user at a screen and a model.

    conversation: the one of `conversations` that goes on.
    reasoning: "show", "hide", or "off": not even noted.
    failed: whether a line of the user gave an error; set by `chat_loop.hear`.
    """

    def __init__(
        self, talker: Talker, screen: Screen, conversation: Conversation, reasoning: str = "show"
    ) -> None:
        self.talker = talker
        self.screen = screen
        self.conversations = [conversation]
        self.last = LastAnswer()
        self.failed = False
        self._here = 0
        self._reasoning = reasoning

    @property
    def conversation(self) -> Conversation:
        """The conversation that goes on."""
        return self.conversations[self._here]

    @conversation.setter
    def conversation(self, conversation: Conversation) -> None:
        self.conversations[self._here] = conversation
        self.screen.status("")

    def say(self, text: str) -> None:
        """Answer a message."""
        before = list(self.conversation.turns)
        self.conversation.say(text)
        self._answer(before)

    def answer_again(self) -> None:
        """Answer the last message again."""
        *earlier, turn = self.conversation.turns
        before = [*earlier, replace(turn)]
        turn.answer = turn.reasoning = None
        self._answer(before)

    def fork(self) -> None:
        """Go on in a copy of the conversation; the answers so far are a prefix hit there."""
        self.conversations.append(self.conversation.copy())
        self._here = len(self.conversations) - 1

    def turn_to(self, number: int) -> None:
        """Go on in another conversation."""
        self._here = number
        self.screen.status("")

    def _answer(self, before: list[Turn]) -> None:
        """Stream an answer to the last turn; after Ctrl-C, or where the command ends, the partial text stays.

        before: the turns to go back to if there is no answer.
        """
        turn = self.conversation.turns[-1]
        said, thought = list[str](), list[str]()
        start, self.last = now(), LastAnswer()
        n_forgotten = self.conversation.n_forgotten
        try:
            self._make_room()
            self._receive(said, thought, start)
            turn.answer = "".join(said)
        except (KeyboardInterrupt, SystemExit) as ended:
            turn.answer = "".join(said) if said or thought else None
            if isinstance(ended, SystemExit):
                raise
        finally:
            turn.reasoning = "".join(thought) or None
            self.last.total = now() - start
            self.screen.finish()
            if turn.answer is None:  # templates refuse a turn without an answer before the next one
                self.conversation.turns[:], self.conversation.n_forgotten = before, n_forgotten
        if self.last.usage is not None:
            usage = self.last.usage
            cached = f"cached {usage.cached_tokens:,}/{usage.prompt_tokens:,}"
            self.screen.status(
                f"{self.last.rate:.1f} tokens/s, {cached}, {self.talker.describe_usage(usage)}"
            )

    def _receive(self, said: list[str], thought: list[str], start: float) -> None:
        with closing(self.talker.stream(self.conversation.messages())) as pieces:
            for piece in pieces:
                self.last.first = self.last.first or now() - start
                self.last.n_tokens += len(piece.token_ids)
                self.last.usage = piece.usage
                for delta in piece.deltas:
                    if delta.content:
                        said.append(delta.content)
                        self.screen.show(delta.content)
                    if delta.reasoning:
                        self._think_aloud(delta.reasoning, is_first=not thought)
                        thought.append(delta.reasoning)

    def _think_aloud(self, text: str, is_first: bool) -> None:
        if self._reasoning == "show":
            self.screen.show_reasoning(text)
        elif is_first and self._reasoning == "hide":
            self.screen.note("thinking ... (/reasoning shows it afterwards)")

    def _make_room(self) -> None:
        """Hide the oldest turns until the rest fits; if it never does, the request raises the error."""
        n_gone = 0
        while not self.talker.fits(self.conversation.messages()):
            if not self.conversation.forget_oldest():
                return
            n_gone += 1
        if n_gone:
            turns = "turn has" if n_gone == 1 else f"{n_gone} turns have"
            self.screen.note(f"the context is full: the oldest {turns} left the conversation")
