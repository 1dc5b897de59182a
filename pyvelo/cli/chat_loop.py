"""`pyvelo chat`: lines of the user, until the last."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyvelo.chat.conversation import ChatOptions
from pyvelo.cli.chat import Chat
from pyvelo.cli.chat_commands import command_of
from pyvelo.cli.chat_session import ChatSession, session_salt
from pyvelo.cli.conversation import Conversation, is_text
from pyvelo.cli.exits import ERROR, UsageError, as_options, explain
from pyvelo.cli.screen import best_screen
from pyvelo.cli.values import count
from pyvelo.demo import DEMO_MODEL, DEMO_NOTE
from pyvelo.errors import VeloError, shown

__all__ = ["ChatSettings", "hear", "open_chat", "run_lines"]

ENDS = ("exit", "quit", "/exit", "/quit", "/bye")
"""Lines that end a chat."""


@dataclass(frozen=True)
class ChatSettings:
    """Options of a chat.

    options: arguments of `LLM.chat`.
    reasoning: "show", "hide" or "off"; None: shown in a terminal, hidden in a pipe.
    status, history: whether a terminal shows a status line, and keeps the lines of the user in a file.
    session: name of the conversation, which goes on, and is written after each turn.
    """

    system: str | None = None
    options: ChatOptions = field(default_factory=ChatOptions)
    reasoning: str | None = None
    status: bool = True
    history: bool = True
    session: str | None = None


def open_chat(
    model: str, settings: ChatSettings, sampling: Mapping[str, Any], engine: Mapping[str, Any]
) -> int:
    """Load the model and chat until the user ends it; return the exit code."""
    from pyvelo.cli.progress import loading
    from pyvelo.cli.talker import LlmTalker
    from pyvelo.llm import LLM
    from pyvelo.models.hub import locate
    from pyvelo.sampling import SamplingParams

    if " " in model and not model.lower().endswith(".gguf") and not os.path.exists(model):
        raise UsageError(f"{shown(model)} is read as MODEL: give it to pyvelo run, or as a line of the chat")
    SamplingParams(**sampling)  # raises errors before the model is loaded
    path = locate(model)
    reasoning = settings.reasoning or ("show" if sys.stdout.isatty() else "hide")
    with ExitStack() as stack:
        session = None if settings.session is None else ChatSession(settings.session)
        if session is not None:
            stack.callback(session.close)
            sampling = {**sampling, "cache_salt": session_salt(session.name)}
        conversation = Conversation(settings.system) if session is None else session.load(settings.system)
        bar = stack.enter_context(loading(path))
        llm = stack.enter_context(LLM(path, **engine, progress=bar))
        screen = best_screen(status=settings.status, history=settings.history)
        if sys.stdin.isatty():
            screen.note(DEMO_NOTE if path == str(DEMO_MODEL) else Path(path).name)
            screen.note("/help lists the commands.")
        params = replace(llm.get_default_sampling_params(), **sampling)
        talker = LlmTalker(llm, path, params, settings.options, bar)
        if conversation.turns:
            screen.note(f"This chat goes on after {count(len(conversation.turns), 'turn')}.")
        chat = Chat(talker, screen, conversation, reasoning)
        run_lines(chat, session)
    return ERROR if chat.failed and not sys.stdin.isatty() else 0


def run_lines(chat: Chat, session: ChatSession | None = None) -> None:
    """Run or answer each line of the user, and keep the conversation of a session."""
    while True:
        try:
            text = chat.screen.ask()
        except KeyboardInterrupt:
            continue
        if text is None or text.strip() in ENDS:
            return
        if text.strip():
            was_alone = len(chat.conversations) == 1
            try:
                hear(chat, text)
            finally:  # also if a signal ends the command
                _keep(chat, session)
            if session is not None and was_alone and len(chat.conversations) > 1:
                chat.screen.note("--session keeps the conversation that you are in; /save FILE keeps another")


def hear(chat: Chat, text: str) -> None:
    """Run a command or answer a message; errors are shown, and no turn is lost."""
    if not is_text(text):
        _fail(chat, "this is not UTF-8 text")
        return
    try:
        found = command_of(text)
        if found is None:
            chat.say(text)
        else:
            command, rest = found
            command(chat, rest)
    except VeloError as error:
        _fail(chat, as_options(str(error)))
    except OSError as error:
        _fail(chat, explain(error))
    except KeyboardInterrupt:  # not in an answer, which keeps what it has
        chat.screen.note("stopped")


def _keep(chat: Chat, session: ChatSession | None) -> None:
    if session is None:
        return
    try:
        session.keep(chat.conversation)
    except OSError as error:
        where, reason = session.file, explain(error)
        _fail(chat, f"the session was not written to {where}: {reason}; /save FILE writes it elsewhere")


def _fail(chat: Chat, message: str) -> None:
    chat.failed = True
    chat.screen.note(message)
