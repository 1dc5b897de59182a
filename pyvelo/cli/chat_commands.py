"""Commands of `pyvelo chat`: what a line that begins with / does."""

from __future__ import annotations

import base64
import difflib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyvelo.cli.chat import Chat
from pyvelo.cli.conversation import Conversation, is_text
from pyvelo.cli.values import count
from pyvelo.errors import ConfigError, shown

__all__ = ["COMMANDS", "command_of"]

HELP = """\
/help            this
/system [TEXT]   set the system message; without TEXT: remove it
/think on|off    let the model reason before it answers, or not
/reasoning       show what the model thought before its last answer
/reset           forget the conversation
/undo [N]        remove the last turn, or the last N
/retry           another answer to the last message
/edit            write the next message in $EDITOR
/copy            copy the last answer to the clipboard
/fork [N]        go on in a copy of the conversation; with N: in conversation N
/save FILE       save this conversation; /load FILE restores it
/stats           speed of the last answer, and use of the cache
/tokens          tokens of the conversation
/model           the model and its file
/exit            end, as exit, quit and Ctrl-D do; Ctrl-C stops an answer
A line that ends with \\ goes on in the next."""

ALIASES = {"clear": "reset", "?": "help"}
"""Names that other programs have for a command; /bye is one of chat_loop.ENDS."""
OLLAMAS = {
    "image": "images are not supported yet",
    "set": "/system sets the system message; pyvelo chat --help lists the other settings",
    "show": "/model shows the model, /stats and /tokens the figures of the conversation",
}
"""Commands of other programs without a counterpart, and what to use."""
OLLAMAS_WORDS = {
    "image": (),
    "set": ("parameter", "system", "history", "nohistory", "wordwrap", "nowordwrap", "format", "noformat"),
    "show": ("info", "license", "modelfile", "parameters", "system", "template"),
}
"""What follows them there; other words make a message of the line."""
TAKE_ALL = ("system", "save", "load")
"""Commands that take the rest of the line: texts, and names of files with spaces."""
TAKE_ONE = ("think", "fork", "model")
"""Commands that take a word. The others take none, or /undo a number."""
MAX_CLIPBOARD = 100_000
"""Characters that terminals take for the clipboard."""


def command_of(text: str) -> tuple[Callable[[Chat, str], None], str] | None:
    """Return the command of a line and the rest of the line; None for a message.

    Raises: ConfigError if the line is nearly a command.
    """
    name, rest = (*text.split(maxsplit=1), "", "")[:2]
    if not name.startswith("/"):
        return None
    known = ALIASES.get(name[1:], name[1:])
    if known in COMMANDS:
        return (COMMANDS[known], rest.strip()) if _takes(known, rest) else None
    if name[1:] in OLLAMAS and _means_ollama(name[1:], rest):
        raise ConfigError(f"there is no {shown(name)} here: {OLLAMAS[name[1:]]}")
    near = difflib.get_close_matches(name[1:], COMMANDS, 1, 0.75)
    if near and _takes(near[0], rest):
        raise ConfigError(f"there is no {shown(name)}: do you mean /{near[0]}? /help lists the commands")
    return None


def _takes(command: str, rest: str) -> bool:
    """Return whether a command takes as many words; with more, the line is a message such as `/help me`."""
    takes_one = command in TAKE_ONE or (command == "undo" and rest.strip().isdigit())
    return command in TAKE_ALL or len(rest.split()) <= takes_one


def _means_ollama(command: str, rest: str) -> bool:
    """Return whether the line is a command of Ollama and no message such as `/show me the way`."""
    words = rest.split()
    return not words or words[0] in OLLAMAS_WORDS[command]


def _help(chat: Chat, _: str) -> None:
    chat.screen.note(HELP)


def _system(chat: Chat, text: str) -> None:
    before, chat.conversation.system = chat.conversation.system, text or None
    removed = "there is no system message" if before is None else "the system message is removed"
    chat.screen.note("the system message is set" if text else removed)


def _think(chat: Chat, text: str) -> None:
    if text not in ("on", "off"):
        raise ConfigError("give /think on or /think off")
    chat.talker.think(text == "on")
    chat.screen.note(f"reasoning is {text}, if this model's template has such a switch")


def _reasoning(chat: Chat, _: str) -> None:
    """Show the reasoning of the last answer, which --reasoning hide folds away."""
    answered = [turn for turn in chat.conversation.turns if turn.answer is not None]
    if not answered:
        chat.screen.note("there is no answer yet")
    elif answered[-1].reasoning is None:
        chat.screen.note("the last answer has no reasoning")
    else:
        chat.screen.show_reasoning(answered[-1].reasoning)
        chat.screen.finish()


def _reset(chat: Chat, _: str) -> None:
    chat.conversation.reset()
    chat.screen.status("")
    chat.screen.note("forgotten")


def _undo(chat: Chat, number: str) -> None:
    n_turns = len(chat.conversation.turns)
    if not n_turns:
        chat.screen.note("the conversation is empty")
        return
    for _ in range(_number(number or "1", n_turns, "/undo", "of turns")):
        turn = chat.conversation.undo()
        if turn is not None:
            chat.screen.note(f"removed: {turn.user}")


def _retry(chat: Chat, _: str) -> None:
    if chat.conversation.turns:
        chat.answer_again()
    else:
        chat.screen.note("the conversation is empty")


def _edit(chat: Chat, _: str) -> None:
    """Open the editor; what it saves is the next message."""
    if not _has_terminal():
        raise ConfigError("/edit opens an editor, which needs a terminal: write the message as a line")
    with tempfile.TemporaryDirectory(prefix="pyvelo-") as folder:
        file = Path(folder) / "message.md"
        file.touch()
        done = _run_editor(file)
        message = file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    if done.returncode or not message:
        chat.screen.note("nothing is sent")
        return
    if not is_text(message):
        raise ConfigError("the editor wrote no UTF-8 text")
    chat.screen.note(message)
    chat.say(message)


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _run_editor(file: Path) -> subprocess.CompletedProcess[bytes]:
    variable = "VISUAL" if os.environ.get("VISUAL") else "EDITOR"
    editor = os.environ.get(variable) or ("notepad" if os.name == "nt" else "vi")
    try:
        return subprocess.run([*shlex.split(editor), str(file)], check=False)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the editor {shown(editor)} cannot run ({reason}): set ${variable} to the command of an editor"
        ) from None


def _copy(chat: Chat, _: str) -> None:
    """Send the answer to the terminal, which puts it into the clipboard (OSC 52 of xterm)."""
    answers = [turn.answer for turn in chat.conversation.turns if turn.answer is not None]
    if not answers:
        chat.screen.note("there is no answer yet")
    elif len(answers[-1]) > MAX_CLIPBOARD:
        raise ConfigError(f"the answer has more than {MAX_CLIPBOARD:,} characters: /save FILE writes it")
    elif chat.screen.control(f"\x1b]52;c;{base64.b64encode(answers[-1].encode()).decode()}\a"):
        chat.screen.note("copied, if this terminal lets programs write to its clipboard")
    else:
        raise ConfigError("only a terminal has a clipboard: /save FILE writes the conversation")


def _fork(chat: Chat, number: str) -> None:
    """Go on in a copy of the conversation, or in another one; list them all."""
    if number:
        chat.turn_to(_number(number, len(chat.conversations), "/fork", "of a conversation") - 1)
    else:
        chat.fork()
    lines = [_line(index, each, chat) for index, each in enumerate(chat.conversations, 1)]
    chat.screen.note("\n".join(lines))


def _number(text: str, most: int, command: str, what: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= most:
        raise ConfigError(f"{command} {shown(text)}: give the number {what}, 1 to {most}")
    return int(text[:9])


def _line(number: int, conversation: Conversation, chat: Chat) -> str:
    turns = conversation.turns
    last = " ".join(turns[-1].user.split())[:50] if turns else ""
    here = " (here)" if conversation is chat.conversation else ""
    return f"{number}: {count(len(turns), 'turn')}{here}" + (f", the last: {last}" if last else "")


def _save(chat: Chat, name: str) -> None:
    if not name:
        raise ConfigError("give a file: /save FILE")
    path = _path(name)
    if path.is_file() and not _is_saved(path):
        raise ConfigError(f"{shown(name)} exists and is no chat of /save: name another file")
    path.write_text(chat.conversation.to_json(), encoding="utf-8")
    chat.screen.note(f"saved to {name}")


def _is_saved(path: Path) -> bool:
    """Return whether a file is empty, or begins as a saved conversation does."""
    begin = Conversation().to_json().partition(",")[0].encode()
    with path.open("rb") as file:
        return file.read(len(begin)) in (b"", begin)


def _load(chat: Chat, name: str) -> None:
    if not name:
        raise ConfigError("give a file: /load FILE")
    try:
        text = _path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{shown(name)} is not UTF-8 text") from None
    chat.conversation = Conversation.from_json(text)
    chat.screen.note(f"{count(len(chat.conversation.turns), 'turn')} from {name}")


def _path(name: str) -> Path:
    """Return the path that the user means, or raise ConfigError if there can be none."""
    if "\0" in name:
        raise ConfigError(f"{shown(name)} is not a valid file name")
    try:
        os.fsencode(name)
        return Path(name).expanduser()
    except UnicodeEncodeError:
        raise ConfigError(f"{shown(name)}: file names have only {sys.getfilesystemencoding()} here") from None
    except RuntimeError:  # of a user that does not exist
        raise ConfigError(f"{shown(name)}: there is no such home folder") from None


def _stats(chat: Chat, _: str) -> None:
    chat.screen.note(f"{chat.last.describe()}\n{chat.talker.describe()}")


def _tokens(chat: Chat, _: str) -> None:
    chat.screen.note(chat.talker.describe_tokens(chat.conversation.messages()))


def _model(chat: Chat, name: str) -> None:
    if name:
        raise ConfigError("/model shows the model of this chat: pyvelo chat MODEL starts one with another")
    chat.screen.note(chat.talker.describe_model())


COMMANDS: dict[str, Callable[[Chat, str], None]] = {
    "help": _help,
    "system": _system,
    "think": _think,
    "reasoning": _reasoning,
    "reset": _reset,
    "undo": _undo,
    "retry": _retry,
    "edit": _edit,
    "copy": _copy,
    "fork": _fork,
    "save": _save,
    "load": _load,
    "stats": _stats,
    "tokens": _tokens,
    "model": _model,
}
"""Functions by name. They raise VeloError and OSError, which the chat shows."""
