"""`pyvelo chat`: a conversation in turns, until the user ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter as now
from typing import Any, Protocol

from pyvelo.cli.conversation import Conversation, Message, is_text
from pyvelo.cli.exits import ERROR, as_options, explain
from pyvelo.cli.screen import Screen, best_screen
from pyvelo.cli.values import count, parse_argument
from pyvelo.demo import DEMO_MODEL, DEMO_NOTE
from pyvelo.errors import ConfigError, VeloError, shown
from pyvelo.outputs import StreamPiece, Usage

__all__ = ["Chat", "Talker", "open_chat"]

HELP = """\
/help            this
/system [TEXT]   set the system message; without TEXT: remove it
/reset           forget the conversation
/undo            remove the last turn
/retry           another answer to the last message
/save FILE       save this conversation; /load FILE restores it
/stats           speed of the last answer, and use of the cache
/exit            end, as exit, quit and Ctrl-D do; Ctrl-C stops an answer
A line that ends with \\ goes on in the next."""


class Talker(Protocol):
    """Model behind a chat."""

    def fits(self, messages: list[Message]) -> bool:
        """Return whether the context has room for the conversation and an answer."""

    def stream(self, messages: list[Message]) -> Generator[StreamPiece, None, None]:
        """Yield the answer piece by piece; the last has its usage."""

    def describe(self) -> str:
        """Return a line about the cache."""


@dataclass
class _Last:
    """Figures of the last answer; times in seconds from its start."""

    n_tokens: int = 0
    first: float = 0.0
    total: float = 0.0
    usage: Usage | None = None


class Chat:
    """Conversation between a user at a screen and a model."""

    def __init__(self, talker: Talker, screen: Screen, conversation: Conversation) -> None:
        self.conversation = conversation
        self._talker = talker
        self._screen = screen
        self._last = _Last()
        self.failed = False  # whether a line of the user gave an error
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: screen.note(HELP),
            "system": self._system,
            "reset": self._reset,
            "undo": self._undo,
            "retry": self._retry,
            "save": self._save,
            "load": self._load,
            "stats": lambda _: screen.note(self._stats()),
        }

    def run(self) -> None:
        """Run the conversation until the user ends it."""
        while True:
            try:
                text = self._screen.ask()
            except KeyboardInterrupt:
                continue
            if text is None or text.strip() in ("exit", "quit") or text.split()[:1] in (["/exit"], ["/quit"]):
                return
            if text.strip():
                self.hear(text)

    def hear(self, text: str) -> None:
        """Run a command or answer a message; errors are shown, and no turn is lost."""
        name, _, rest = text.strip().partition(" ")
        if not is_text(text):
            self._fail("this is not UTF-8 text")
            return
        try:
            if not text.startswith("/"):
                self.conversation.say(text)
                self._answer()
            elif (command := self._commands.get(name[1:])) is not None:
                command(rest.strip())
            else:
                self._screen.note(f"there is no {name}; /help lists the commands")
        except VeloError as error:
            self._fail(as_options(str(error)))
        except OSError as error:
            self._fail(explain(error))

    def _fail(self, message: str) -> None:
        self.failed = True
        self._screen.note(message)

    def _answer(self, before: str | None = None) -> None:
        """Stream an answer to the last turn, in place of its old one; after Ctrl-C the partial text stays."""
        turn = self.conversation.turns[-1]
        parts: list[str] = []
        start, self._last = now(), _Last()
        try:
            self._make_room()
            self._receive(parts, start)
            turn.answer = "".join(parts)
        except KeyboardInterrupt:
            turn.answer = "".join(parts) or None
        finally:
            self._last.total = now() - start
            self._screen.finish()
            if turn.answer is None:  # templates refuse a turn without an answer before the next one
                turn.answer = before
                if before is None:
                    self.conversation.undo()

    def _receive(self, parts: list[str], start: float) -> None:
        pieces = self._talker.stream(self.conversation.messages())
        with closing(pieces):
            for piece in pieces:
                self._last.first = self._last.first or now() - start
                self._last.n_tokens += len(piece.token_ids)
                self._last.usage = piece.usage
                parts.append(piece.text)
                if piece.text:
                    self._screen.show(piece.text)

    def _make_room(self) -> None:
        n_gone = 0
        while not self._talker.fits(self.conversation.messages()) and self.conversation.forget_oldest():
            n_gone += 1
        if n_gone:
            turns = "turn has" if n_gone == 1 else f"{n_gone} turns have"
            self._screen.note(f"the context is full: the oldest {turns} left the conversation")

    # ---- commands ----

    def _system(self, text: str) -> None:
        before, self.conversation.system = self.conversation.system, text or None
        removed = "there is no system message" if before is None else "the system message is removed"
        self._screen.note("the system message is set" if text else removed)

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self._screen.note("forgotten")

    def _undo(self, _: str) -> None:
        turn = self.conversation.undo()
        self._screen.note("the conversation is empty" if turn is None else f"removed: {turn.user}")

    def _retry(self, _: str) -> None:
        if not self.conversation.turns:
            self._screen.note("the conversation is empty")
            return
        turn = self.conversation.turns[-1]
        before, turn.answer = turn.answer, None
        self._answer(before)

    def _save(self, name: str) -> None:
        if not name:
            self._screen.note("give a file: /save FILE")
            return
        _path(name).write_text(self.conversation.to_json(), encoding="utf-8")
        self._screen.note(f"saved to {name}")

    def _load(self, name: str) -> None:
        if not name:
            self._screen.note("give a file: /load FILE")
            return
        try:
            text = _path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self._screen.note(f"{name} is not UTF-8 text")
            return
        self.conversation = Conversation.from_json(text)
        self._screen.note(f"{count(len(self.conversation.turns), 'turn')} from {name}")

    def _stats(self) -> str:
        last = self._last
        span = last.total - last.first
        rate = (last.n_tokens - 1) / span if last.n_tokens > 1 and span > 0 else 0.0
        n_tokens, first = count(last.n_tokens, "token"), f"{last.first:.2f} s"
        speed = f"{n_tokens}, the first after {first}, then {rate:.1f} tokens per second"
        lines = [speed if last.n_tokens else "there is no answer yet"]
        if last.usage is not None:
            cached, prompt = last.usage.cached_tokens, last.usage.prompt_tokens
            lines.append(f"{cached} of {count(prompt, 'token')} of the conversation were in the cache")
        return "\n".join([*lines, self._talker.describe()])


def _path(name: str) -> Path:
    """Return the path that the user means, or raise ConfigError if there can be none."""
    if "\0" in name:
        raise ConfigError(f"{shown(name)} is not a valid file name")
    try:
        return Path(name).expanduser()
    except RuntimeError:  # of a user that does not exist
        raise ConfigError(f"{shown(name)}: there is no such home folder") from None


def open_chat(model: str, system: str | None, sampling: Mapping[str, Any], engine: Mapping[str, Any]) -> int:
    """Load the model and chat until the user ends it; return the exit code."""
    from pyvelo.cli.progress import loading
    from pyvelo.cli.talker import LlmTalker
    from pyvelo.llm import LLM
    from pyvelo.models.hub import locate
    from pyvelo.sampling import SamplingParams

    SamplingParams(**sampling)  # raises errors before the model is loaded
    told = None if system is None else parse_argument(system, "the system message")
    path = locate(model)
    with loading(path) as bar, LLM(path, **engine, progress=bar) as llm:
        screen = best_screen()
        if sys.stdin.isatty():
            screen.note(DEMO_NOTE if path == str(DEMO_MODEL) else Path(path).name)
            screen.note("/help lists the commands.")
        params = replace(llm.get_default_sampling_params(), **sampling)
        chat = Chat(LlmTalker(llm, params, bar=bar), screen, Conversation(told))
        chat.run()
    return ERROR if chat.failed and not sys.stdin.isatty() else 0
