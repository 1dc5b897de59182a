"""Exit codes and last output of commands."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TypeVar

from pyvelo.errors import ConfigError, RequestError, VeloError
from pyvelo.other_names import EQUIVALENTS

__all__ = [
    "BROKEN_PIPE",
    "ERROR",
    "INTERRUPTED",
    "USAGE",
    "UsageError",
    "as_options",
    "code_of",
    "drop_unwritten",
    "exits_for_signals",
    "explain",
    "hint_of",
    "interrupted",
    "parse_option",
    "silence_stdout",
    "without_prefix",
]

T = TypeVar("T")

ERROR = 1
USAGE = 2
INTERRUPTED = 130  # a shell's code for SIGINT
BROKEN_PIPE = 141  # and for SIGPIPE

CLOSING = 10.0
"""Seconds after a signal in which others are ignored."""

_OPTIONS = {
    **{name: name for name in ("max_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "block_size")},
    **{name: name for name in ("ignore_eos", "kv_type", "kv_cache_bytes", "swap_bytes", "n_gpu_layers")},
    **{name: name for name in ("attention_precision", "max_batch_tokens", "max_num_seqs", "kv_events")},
    **{name: name for name in ("kv_store", "api_key_file")},
    **{"n_ctx": "ctx", "n_threads": "threads", "max_seqs": "max_num_seqs"},
}
"""Options by the names of Python arguments, wherever an error has them."""

_WORDS = {
    **{name: name for name in ("temperature", "seed", "stop", "pooling", "sequences", "repeats", "rate")},
    **{name: name for name in ("requests", "samples", "policy", "cost", "host")},
    **{"depths": "depth", "prompt": "prompt_tokens", "answer": "answer_tokens"},
}
"""Options by arguments that are ordinary words, only at the beginning of an error."""

_CLUSTERS = {"-ngl": "n_gpu_layers", "-ctk": "kv_type", "-ctv": "kv_type"}
"""Flags of other programs that parsers read as a flag of one letter with a value."""

_SHORT = {**_CLUSTERS, "-c": "n_ctx", "-t": "n_threads", "--max-model-len": "n_ctx"}
"""Flags of other programs whose names are not in `EQUIVALENTS`."""

_COMMANDS = {
    "help": "--help",
    "version": "--version",
    "completion": "--install-completion",
    **dict.fromkeys(("show", "inspect"), "info"),
    **dict.fromkeys(("ls", "cache"), "list"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    **dict.fromkeys(("download", "get"), "pull"),
    **dict.fromkeys(("generate", "complete", "ask", "prompt"), "run"),
    "server": "serve",
    "search": "models",
}
"""Commands of other programs, and the arguments of ours."""

_NO_COMMANDS = {
    "ps": "a server lists its models at GET /v1/models, and pyvelo list the files",
    "stop": "Ctrl-C or SIGTERM ends a server",
}
"""Commands of other programs that have none here, and what does their work."""

_RANGES = {
    "greater than or equal to": "at least",
    "greater than": "more than",
    "less than or equal to": "at most",
    "less than": "less than",
}
"""What a parser says of a number outside a range, and what we say."""

_NAME = re.compile(rf"(?<![\w/.-])({'|'.join(_OPTIONS)})(?![\w/.-]*\w)(=?)")
_FIRST = re.compile(rf"({'|'.join(_WORDS)})(?:=| (?=-?\d|nan|'|\w+=))")


class UsageError(ConfigError):
    """The options of a command are wrong."""


def parse_option(option: str, parse: Callable[[str], T], text: str) -> T:
    """Return the parsed value of an option; UsageError names the option."""
    try:
        return parse(text)
    except ConfigError as error:
        raise UsageError(f"{option} {error}") from None


def as_options(message: str) -> str:
    """Return an error of the library with options in place of Python arguments."""
    if match := _FIRST.match(message):
        message = f"--{_WORDS[match[1]].replace('_', '-')} {message[match.end() :]}"
    message = _NAME.sub(lambda m: f"--{_OPTIONS[m[1]].replace('_', '-')}{' ' * bool(m[2])}", message)
    message = message.replace("one of 'mean', 'cls', 'last'", "mean, cls or last")
    message = message.replace("name mean,", "give --pooling mean,")
    message = message.replace("chat_template= (--chat-template)", "--chat-template")
    message = message.replace(", a larger memory_utilization", "").replace("memory_utilization=", "")
    message = message.replace("; None: no limit", "; -1: no limit")
    return re.sub(r",? or None( for [^,;]*)?", "", message)


def code_of(error: VeloError, message: str) -> int:
    """Return the exit code of an error with the message of `as_options`."""
    wrong_value = isinstance(error, (ConfigError, RequestError)) and message.startswith("--")
    return USAGE if wrong_value or isinstance(error, UsageError) else ERROR


def without_prefix(message: str) -> str:
    """Return a complaint of a parser with its option once, and without the name of the exception."""
    message = re.sub(r": Input should be .*, unable to parse string as (an? \w+)", r": give \1", message)
    for theirs, ours in _RANGES.items():
        message = message.replace(f": Input should be {theirs} ", f": give {ours} ")
    return re.sub(r"^Invalid value for '(--[\w-]+)'.*?: Value error, (?:\1 )?", r"\1 ", message)


def hint_of(error: object, message: str, arguments: Sequence[str]) -> str:
    """Return the error of a parser, or a hint if it is about a command or a flag of another program.

    error: has the command's parameters if an option does not exist.
    """
    unknown = re.match(r"No such command '([\w-]+)'", message)
    if unknown and (meant_command := _COMMANDS.get(unknown[1])):
        return f"{unknown[1]} is pyvelo {meant_command} here"
    if unknown and unknown[1] in _NO_COMMANDS:
        return f"there is no pyvelo {unknown[1]}: {_NO_COMMANDS[unknown[1]]}"
    wrong = re.match(r"No such option: (--?[\w-]+)", message)
    if cluster := next((each for each in arguments if each in _CLUSTERS), None):
        name = cluster
    elif wrong is None:
        return message
    else:
        name = wrong[1]
    context = getattr(error, "ctx", None)
    if name in ("-m", "--model") and context is not None:
        return f"{name} is no option: give the model first, as in pyvelo {context.info_name} MODEL"
    known = {flag for each in context.command.params for flag in each.opts} if context is not None else set()
    meant = [flag for flag in _flags_for(name) if flag in known]
    return f"{name} is {meant[0]} here" if meant else message


def _flags_for(name: str) -> list[str]:
    """Return the flags that may do what a flag of llama.cpp, Ollama or vLLM does."""
    argument = name.lstrip("-").replace("-", "_")
    argument = _SHORT.get(name) or EQUIVALENTS.get(argument) or argument
    names = (_OPTIONS.get(argument), _WORDS.get(argument), argument)
    return [f"--{each.replace('_', '-')}" for each in names if each is not None]


def silence_stdout() -> None:
    """Redirect standard output to nowhere, so that Python prints no error at exit about a closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def drop_unwritten() -> None:
    """Drop what standard output has buffered if it cannot be written, so that Python does not try at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        silence_stdout()


@contextlib.contextmanager
def exits_for_signals() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, raise SystemExit, so that all is closed in order.

    Meanwhile more of them are ignored, because a shell may send two; Ctrl-C still ends the closing.
    A signal that is ignored already, as under nohup, or that has a handler, is left alone.
    """
    mine, ended = [], -CLOSING
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        mine = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _: FrameType | None) -> None:
        nonlocal ended
        if time.monotonic() - ended >= CLOSING:
            ended = time.monotonic()
            sys.exit(128 + number)  # as a shell has it

    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)


def interrupted(error: BaseException | None) -> int | None:
    """Return the exit code if Ctrl-C or a signal caused an error, as in an import it may; else None."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            return error.code
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def explain(error: OSError) -> str:
    """Return a sentence for an error of the operating system: what it is about, and what is wrong."""
    if error.filename is None:
        return error.strerror or str(error)
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    if isinstance(error, FileNotFoundError):
        folder = os.path.dirname(name)
        if folder and not os.path.exists(folder):
            return f"there is no folder {folder}"
        return f"there is no file or folder {name}"
    if isinstance(error, IsADirectoryError):
        return f"{name} is a folder, not a file"
    if isinstance(error, PermissionError):
        return f"{name} may not be opened by this user: change its permissions, or name another"
    return f"{name}: {error.strerror or error}"
