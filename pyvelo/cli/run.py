"""`pyvelo run`: one prompt, streamed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvelo.cli.exits import BROKEN_PIPE, INTERRUPTED, UsageError, silence_stdout
from pyvelo.cli.progress import loading
from pyvelo.cli.terminal import print_error, print_json, print_out
from pyvelo.cli.values import count, parse_argument, show_bytes
from pyvelo.errors import ConfigError, shown
from pyvelo.models.hub import locate
from pyvelo.outputs import Usage

if TYPE_CHECKING:
    from pyvelo import LLM

__all__ = ["Request", "check_model", "generate", "read_prompt"]


@dataclass(frozen=True)
class Request:
    """Request of the options; `sampling` goes to SamplingParams, `engine` to LLM."""

    model: str
    prompt: str
    as_chat: bool  # the prompt is a message for the model's chat template
    sampling: Mapping[str, Any]
    engine: Mapping[str, Any]


@dataclass
class Answer:
    """Output so far; times in seconds, `first` and `total` from the start of the request."""

    load: float
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    stop_reason: int | str | None = None
    usage: Usage | None = None
    first: float = 0.0
    total: float = 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token; 0 without a second token."""
        span = self.total - self.first
        return (len(self.token_ids) - 1) / span if len(self.token_ids) > 1 and span > 0 else 0.0


def check_model(model: str, prompt: str | None, file: Path | None) -> None:
    """Raise UsageError if the model looks like the prompt, and there is no prompt."""
    if prompt is None and file is None and " " in model and not os.path.exists(model):
        raise UsageError(f"{shown(model)} is read as MODEL; give a prompt with -p")


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt of the option, standard input (`-`) or a file; UsageError for none or two."""
    if prompt is not None and file is not None:
        raise UsageError("give -p or -f, not both")
    if file is not None:
        return _decoded(file.read_bytes(), str(file))
    if prompt == "-":
        return _decoded(sys.stdin.buffer.read(), "standard input")
    if prompt is None:
        raise UsageError("what is the prompt? Give -p TEXT, -f FILE, or -p - to read standard input")
    return parse_argument(prompt, "the prompt")


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error


def generate(request: Request, *, as_json: bool, verbose: bool) -> int:
    """Load the model, stream the answer to standard output, and return the exit code."""
    from pyvelo import LLM, SamplingParams

    path = locate(request.model)
    params = SamplingParams(**request.sampling)
    started = time.perf_counter()
    with loading(path) as progress, LLM(path, **request.engine, progress=progress) as llm:
        answer = Answer(load=time.perf_counter() - started)
        code = _stream(llm, request, params, answer, echo=not as_json)
        if as_json:
            print_json(_as_dict(answer, llm), indent=None)
        if verbose:
            print_error(_summary(answer, llm))
    return code


def _stream(llm: LLM, request: Request, params: Any, answer: Answer, *, echo: bool) -> int:
    """Fill `answer` piece by piece; return the exit code. The user and the pipe's reader may end it early."""
    started = time.perf_counter()
    code = 0
    try:
        message = {"role": "user", "content": request.prompt}
        asked = llm.chat_stream([message], params) if request.as_chat else llm.stream(request.prompt, params)
        with closing(asked) as pieces:
            for piece in pieces:
                answer.first = answer.first or time.perf_counter() - started
                answer.text.append(piece.text)
                answer.token_ids.extend(piece.token_ids)
                answer.finish_reason = piece.finish_reason or answer.finish_reason
                answer.stop_reason, answer.usage = piece.stop_reason, piece.usage
                if echo and piece.text:
                    print_out(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        code = BROKEN_PIPE
    answer.total = time.perf_counter() - started
    if echo and answer.text and not "".join(answer.text).endswith("\n"):
        print_out(flush=True)
    return code


def _as_dict(answer: Answer, llm: LLM) -> dict[str, Any]:
    stats = llm.stats()
    return {
        "text": "".join(answer.text),
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
