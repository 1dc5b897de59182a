"""`pyvelo chat`: a conversation in turns, until the user ends it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter as now
from typing import Any, Protocol

from pyvelo.cli.chat_commands import command_of
from pyvelo.cli.conversation import Conversation, Message, Turn, is_text
from pyvelo.cli.exits import ERROR, as_options, explain
from pyvelo.cli.screen import Screen, best_screen
from pyvelo.cli.values import count, parse_argument
from pyvelo.demo import DEMO_MODEL, DEMO_NOTE
from pyvelo.errors import VeloError
from pyvelo.outputs import StreamPiece, Usage

__all__ = ["Chat", "ChatSettings", "LastAnswer", "Talker", "open_chat"]


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
        span = self.total - self.first
        return (self.n_tokens - 1) / span if self.n_tokens > 1 and span > 0 else 0.0

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
    reasoning: "show", "hide", or "off": the template is told to ask for none.
    failed: whether a line of the user gave an error.
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

    def run(self) -> None:
        """Run the conversation until the user ends it."""
        while True:
            try:
                text = self.screen.ask()
            except KeyboardInterrupt:
                continue
            if text is None or text.strip() in ("exit", "quit") or text.split()[:1] in (["/exit"], ["/quit"]):
                return
            if text.strip():
                self.hear(text)

    def hear(self, text: str) -> None:
        """Run a command or answer a message; errors are shown, and no turn is lost."""
        if not is_text(text):
            self._fail("this is not UTF-8 text")
            return
        try:
            found = command_of(text)
            if found is None:
                self.say(text)
            else:
                command, rest = found
                command(self, rest)
        except VeloError as error:
            self._fail(as_options(str(error)))
        except OSError as error:
            self._fail(explain(error))

    def say(self, text: str) -> None:
        """Answer a message."""
        self.conversation.say(text)
        self._answer()

    def answer_again(self) -> None:
        """Answer the last message again."""
        turn = self.conversation.turns[-1]
        before, turn.answer, turn.reasoning = replace(turn), None, None
        self._answer(before)

    def fork(self) -> None:
        """Go on in a copy of the conversation; the answers so far are a prefix hit there."""
        self.conversations.append(self.conversation.copy())
        self._here = len(self.conversations) - 1

    def turn_to(self, number: int) -> None:
        """Go on in another conversation."""
        self._here = number

    def _fail(self, message: str) -> None:
        self.failed = True
        self.screen.note(message)

    def _answer(self, before: Turn | None = None) -> None:
        """Stream an answer to the last turn, in place of its old one; after Ctrl-C the partial text stays."""
        turn = self.conversation.turns[-1]
        said, thought = list[str](), list[str]()
        start, self.last = now(), LastAnswer()
        try:
            self._make_room()
            try:
                self._receive(said, thought, start)
            except KeyboardInterrupt:
                if not said and not thought:
                    raise
            turn.answer, turn.reasoning = "".join(said), "".join(thought) or None
        except KeyboardInterrupt:
            pass
        finally:
            self.last.total = now() - start
            self.screen.finish()
            if turn.answer is None:  # templates refuse a turn without an answer before the next one
                self.conversation.undo()
                if before is not None:
                    self.conversation.turns.append(before)
        if self.last.usage is not None:
            usage = self.last.usage
            cached = f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens cached"
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
        if self._reasoning != "hide":
            self.screen.show_reasoning(text)
        elif is_first:
            self.screen.note("thinking …")

    def _make_room(self) -> None:
        n_gone = 0
        while not self.talker.fits(self.conversation.messages()) and self.conversation.forget_oldest():
            n_gone += 1
        if n_gone:
            turns = "turn has" if n_gone == 1 else f"{n_gone} turns have"
            self.screen.note(f"the context is full: the oldest {turns} left the conversation")


@dataclass(frozen=True)
class ChatSettings:
    """What a chat begins with.

    template: Jinja source in place of the model's; None: the model's own.
    arguments: other variables of the template.
    reasoning: "show", "hide" or "off"; None: shown in a terminal, hidden in a pipe.
    status, history: whether a terminal shows a status line, and keeps the lines of the user in a file.
    """

    system: str | None = None
    template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reasoning: str | None = None
    status: bool = True
    history: bool = True


def open_chat(
    model: str, settings: ChatSettings, sampling: Mapping[str, Any], engine: Mapping[str, Any]
) -> int:
    """Load the model and chat until the user ends it; return the exit code."""
    from pyvelo.cli.progress import loading
    from pyvelo.cli.talker import LlmTalker
    from pyvelo.llm import LLM
    from pyvelo.models.hub import locate
    from pyvelo.sampling import SamplingParams

    SamplingParams(**sampling)  # raises errors before the model is loaded
    told = None if settings.system is None else parse_argument(settings.system, "the system message")
    path = locate(model)
    reasoning = settings.reasoning or ("show" if sys.stdout.isatty() else "hide")
    with loading(path) as bar, LLM(path, **engine, progress=bar) as llm:
        screen = best_screen(status=settings.status, history=settings.history)
        if sys.stdin.isatty():
            screen.note(DEMO_NOTE if path == str(DEMO_MODEL) else Path(path).name)
            screen.note("/help lists the commands.")
        params = replace(llm.get_default_sampling_params(), **sampling)
        talker = LlmTalker(llm, path, params, settings.arguments, settings.template, bar)
        if reasoning == "off":
            talker.think(False)
        chat = Chat(talker, screen, Conversation(told), reasoning)
        chat.run()
    return ERROR if chat.failed and not sys.stdin.isatty() else 0
