"""`pyvelo chat`: lines of the user, until the last."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyvelo.chat.conversation import ChatOptions
from pyvelo.cli.chat import Chat
from pyvelo.cli.chat_commands import command_of
from pyvelo.cli.conversation import Conversation, is_text
from pyvelo.cli.exits import ERROR, as_options, explain
from pyvelo.cli.screen import Screen, best_screen, state_folder
from pyvelo.cli.values import count
from pyvelo.demo import DEMO_MODEL, DEMO_NOTE
from pyvelo.errors import ConfigError, VeloError

__all__ = ["ChatSettings", "default_store", "hear", "open_chat", "run_lines", "session_file"]

ENDS = (["/exit"], ["/quit"], ["/bye"])
"""Lines that end a chat, beside exit and quit."""


@dataclass(frozen=True)
class ChatSettings:
    """Options of a chat.

    options: arguments of `LLM.chat`.
    reasoning: "show", "hide" or "off"; None: shown in a terminal, hidden in a pipe.
    status, history: whether a terminal shows a status line, and keeps the lines of the user in a file.
    session: file of the conversation, which is read at the start and written at the end.
    """

    system: str | None = None
    options: ChatOptions = field(default_factory=ChatOptions)
    reasoning: str | None = None
    status: bool = True
    history: bool = True
    session: Path | None = None


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
    path = locate(model)
    reasoning = settings.reasoning or ("show" if sys.stdout.isatty() else "hide")
    with loading(path) as bar, LLM(path, **engine, progress=bar) as llm:
        screen = best_screen(status=settings.status, history=settings.history)
        if sys.stdin.isatty():
            screen.note(DEMO_NOTE if path == str(DEMO_MODEL) else Path(path).name)
            screen.note("/help lists the commands.")
        params = replace(llm.get_default_sampling_params(), **sampling)
        talker = LlmTalker(llm, path, params, settings.options, bar)
        chat = Chat(talker, screen, _begin(settings, screen), reasoning)
        try:
            run_lines(chat)
        finally:
            _keep(settings.session, chat.conversation)
    return ERROR if chat.failed and not sys.stdin.isatty() else 0


def session_file(name: str) -> Path:
    """Return the file of a named conversation.

    Raises:
        ConfigError: the name is no part of a path.
    """
    if not re.fullmatch(r"[\w. -]{1,100}", name) or name.strip(". ") == "":
        raise ConfigError(f"--session {name!r}: give up to 100 letters, digits, spaces, dots and dashes")
    return state_folder() / "sessions" / f"{name}.json"


def default_store() -> str | None:
    """Return the folder of the KV of named conversations; None: the extra `store` is not installed."""
    from pyvelo.store.opening import default_folder

    return str(default_folder()) if importlib.util.find_spec("xxhash") is not None else None


def _begin(settings: ChatSettings, screen: Screen) -> Conversation:
    """Return a new conversation, or the one of the session."""
    if settings.session is None or not settings.session.exists():
        return Conversation(settings.system)
    conversation = Conversation.from_json(settings.session.read_text(encoding="utf-8"))
    conversation.system = settings.system if settings.system is not None else conversation.system
    screen.note(f"This chat goes on after {count(len(conversation.turns), 'turn')}.")
    return conversation


def _keep(file: Path | None, conversation: Conversation) -> None:
    """Write the conversation of a session to its file, for its owner alone."""
    if file is None:
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(conversation.to_json())
    os.replace(partial, file)


def run_lines(chat: Chat) -> None:
    """Run or answer each line of the user."""
    while True:
        try:
            text = chat.screen.ask()
        except KeyboardInterrupt:
            continue
        if text is None or text.strip() in ("exit", "quit") or text.split()[:1] in ENDS:
            return
        if text.strip():
            hear(chat, text)


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


def _fail(chat: Chat, message: str) -> None:
    chat.failed = True
    chat.screen.note(message)
