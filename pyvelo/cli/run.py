"""`pyvelo run`: one prompt, streamed."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pyvelo.cli.exits import BROKEN_PIPE, ERROR, UsageError, interrupted, silence_stdout
from pyvelo.cli.progress import loading
from pyvelo.cli.screen import PlainScreen
from pyvelo.cli.terminal import print_error, print_json, print_out
from pyvelo.cli.values import count, decode_rate, parse_argument, show_bytes
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError
from pyvelo.models.hub import locate, parse_name
from pyvelo.models.suggestions import suggest
from pyvelo.outputs import StreamPiece, Usage
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.chat.conversation import ChatOptions
    from pyvelo.llm import LLM

__all__ = ["Request", "generate", "read_message", "read_prompt", "split_words"]

NO_PROMPT = "what is the prompt? Give it after MODEL, in a file with -f FILE, or through a pipe"
PATIENCE = 2.0
"""Seconds that a pipe may be silent before a note."""
MAX_BYTES = 256 << 20
"""Most bytes of a text: a pipe may never end."""
OWN_TEMPLATE = "tokenizer.chat_template"
"""Name of the chat template in a model's file."""


@dataclass(frozen=True)
class Request:
    """Request of the options; `sampling` goes to SamplingParams, `engine` to LLM.

    chat: arguments of `LLM.chat`; the prompt is a message then. None: it is a text to go on with.
    reasoning: whether the reasoning of an answer is shown, on standard error.
    """

    model: str
    prompt: str
    chat: ChatOptions | None
    system: str | None
    reasoning: bool
    sampling: Mapping[str, Any]
    engine: Mapping[str, Any]

    def pieces(self, llm: LLM, params: SamplingParams) -> Generator[StreamPiece, None, None]:
        """Return the stream of the answer."""
        if self.chat is None:
            return llm.stream(self.prompt, params)
        told = [] if self.system is None else [{"role": "system", "content": self.system}]
        return llm.chat_stream([*told, {"role": "user", "content": self.prompt}], params, **self.chat)


@dataclass
class Answer:
    """Output so far; times in seconds, `first` and `total` from the start of the request."""

    load: float
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    stop_reason: int | str | None = None
    usage: Usage | None = None
    first: float = 0.0
    total: float = 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token; 0 without a second token."""
        return decode_rate(len(self.token_ids), self.first, self.total)


def split_words(words: Sequence[str], prompt: str | None, file: Path | None) -> tuple[str, str | None]:
    """Return the model and the prompt of `[MODEL] [PROMPT]`; the default model if none is named.

    A word alone is a model if there is another prompt, or if it looks like one: a file that exists, a path of
    a GGUF file, or a name on the hub. If a file is given, "-" and what looks like a sentence are prompts.
    """
    if len(words) > 2:
        raise UsageError("give MODEL and one PROMPT, in quotes if it has spaces")
    if len(words) == 2 and prompt is not None:
        raise UsageError("the prompt is given twice: leave the word after MODEL out, or -p")
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return str(DEMO_MODEL), prompt
    is_text = " " in words[0] or words[0].endswith((":", "?", "!", ".")) or words[0] == "-"
    if prompt is not None or _is_model(words[0]) or (file is not None and not is_text):
        return words[0], prompt
    if " " not in words[0] and (hint := suggest(words[0])):
        raise UsageError(f"there is no model {words[0]}{hint} (-p {words[0]} asks the demo model)")
    if re.fullmatch(r"[\w.:-]*\d[\w.:-]*", words[0]) and not words[0].isdigit():
        print_error(
            f"pyvelo: {words[0]} is taken as a message to the demo model; to ask another model, give "
            "its file or org/repo, and then a text"
        )
    return str(DEMO_MODEL), words[0]


def _is_model(word: str) -> bool:
    named = parse_name(word) is not None and " " not in word
    return named or word.lower().endswith(".gguf") or os.path.exists(word)


def read_message(prompt: str | None, file: Path | None) -> str:
    """Return the prompt as `read_prompt`; UsageError if a part of it is empty.

    Without a prompt and a file, the prompt is standard input, unless that is a terminal.
    """
    is_implied = prompt is None and file is None and not sys.stdin.isatty()
    if is_implied:
        _tell_of_waiting()
        prompt = "-"
    parts = _parts_of(prompt, file)
    for source, text in parts.items():
        if not text.strip():
            empty = f"the prompt is empty ({source} has no text): give a text"
            raise UsageError(NO_PROMPT if is_implied else empty)
    if prompt != "-" and str(file) != "-" and _has_unread_input():
        print_error("pyvelo: standard input has a text that is not read: -f - would add it to the prompt")
    return "\n\n".join(parts.values())


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt, and below it the text of the file; `-` is standard input. UsageError for neither."""
    return "\n\n".join(_parts_of(prompt, file).values())


def _parts_of(prompt: str | None, file: Path | None) -> dict[str, str]:
    """Return the parts of a prompt by the names of their sources."""
    if prompt is None and file is None:
        raise UsageError(NO_PROMPT)
    if prompt == "-" and str(file) == "-":
        raise UsageError("-p - and -f -: standard input can be read once")
    parts = {}
    if prompt is not None and prompt != "-":
        parts["it"] = parse_argument(prompt, "the prompt")
    if prompt == "-" or str(file) == "-":
        parts["standard input"] = _read_text(sys.stdin.buffer, "standard input")
    if file is not None and str(file) != "-":
        with file.open("rb") as opened:
            parts[f"the file {file}"] = _read_text(opened, str(file))
    return parts


def _tell_of_waiting() -> None:
    """Tell what is waited for if standard input stays silent."""
    if sys.platform == "win32":
        return
    import select

    with suppress(OSError, ValueError):
        if not select.select([sys.stdin], [], [], PATIENCE)[0]:
            print_error("pyvelo: the prompt is read from standard input, which says nothing so far")


def _has_unread_input() -> bool:
    """Return whether a pipe or a file is standard input and has a text now."""
    if sys.platform == "win32":
        return False
    import array
    import fcntl
    import termios

    n_bytes = array.array("i", [0])
    try:
        fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, n_bytes)
    except (OSError, ValueError):
        return False
    return n_bytes[0] > 0 and not sys.stdin.isatty()


def _read_text(stream: BinaryIO, source: str) -> str:
    data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{source} has more than {show_bytes(MAX_BYTES)}: give a shorter text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error


def generate(request: Request, *, as_json: bool, verbose: bool) -> int:
    """Load the model, stream the answer to standard output, and return the exit code."""
    from pyvelo.llm import LLM

    path = locate(request.model)
    params = SamplingParams(**request.sampling)
    started = time.perf_counter()
    with loading(path) as progress, LLM(path, **request.engine, progress=progress) as llm:
        answer = Answer(load=time.perf_counter() - started)
        code = _stream(llm, request, params, answer, echo=not as_json)
        if as_json:
            print_json(_as_dict(answer, llm), indent=None)
        elif request.chat is None and sys.stderr.isatty() and llm.chat_template.name == OWN_TEMPLATE:
            print_error("pyvelo: the text was continued; with --chat it is a message that the model answers")
        if verbose:
            print_error(_summary(answer, llm))
    return code


def _stream(llm: LLM, request: Request, params: SamplingParams, answer: Answer, *, echo: bool) -> int:
    """Fill `answer` piece by piece; return the exit code. The user and the pipe's reader may end it early."""
    started = time.perf_counter()
    screen, code = PlainScreen(), 0
    try:
        with closing(request.pieces(llm, params)) as pieces:
            for piece in pieces:
                answer.first = answer.first or time.perf_counter() - started
                text, thought = _parts(piece, request, params)
                answer.text.append(text)
                answer.reasoning.append(thought)
                answer.token_ids.extend(piece.token_ids)
                answer.finish_reason = piece.finish_reason or answer.finish_reason
                answer.stop_reason, answer.usage = piece.stop_reason, piece.usage
                if echo and request.reasoning and thought:
                    screen.show_reasoning(thought)
                if echo and text:
                    screen.show(text)
    except (KeyboardInterrupt, SystemExit) as ended:
        code = interrupted(ended) or ERROR
    except BrokenPipeError:
        silence_stdout()
        code = BROKEN_PIPE
    answer.total = time.perf_counter() - started
    screen.finish()
    if echo and answer.text and not any(answer.text):
        print_out(flush=True)  # a line for an empty answer
    return code


def _parts(piece: StreamPiece, request: Request, params: SamplingParams) -> tuple[str, str]:
    """Return what a piece adds to the text and to the reasoning; with the echo of the prompt, all is text."""
    if request.chat is None or params.echo:
        return piece.text, ""
    return "".join(d.content for d in piece.deltas), "".join(d.reasoning for d in piece.deltas)


def _as_dict(answer: Answer, llm: LLM) -> dict[str, Any]:
    stats = llm.stats()
    return {
        "text": "".join(answer.text),
        "reasoning": "".join(answer.reasoning) or None,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "usage": asdict(answer.usage or Usage(stats.prompt_tokens, 0, len(answer.token_ids))),
        "seconds": {"load": answer.load, "first_token": answer.first, "total": answer.total},
        "tokens_per_second": answer.decode_rate,
        "stats": asdict(stats),
    }


def _summary(answer: Answer, llm: LLM) -> str:
    stats = llm.stats()
    rate = f"then {answer.decode_rate:.1f} tokens per second, " if answer.decode_rate else ""
    return (
        f"load {answer.load:.2f} s | "
        f"{count(stats.prompt_tokens, 'prompt token')} | first token after {answer.first:.2f} s | "
        f"{rate}"
        f"{count(len(answer.token_ids), 'token')} in {answer.total:.2f} s | "
        f"KV cache of {stats.blocks_total} blocks = {stats.tokens_total} tokens = "
        f"{stats.sequences_total} sequences of {stats.n_ctx}, {show_bytes(stats.pool_bytes)} | "
        f"{answer.finish_reason}"
    )
