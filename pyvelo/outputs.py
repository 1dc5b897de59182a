"""Outputs of requests: completions, stream pieces, logprobs, usage and times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from pyvelo.errors import VeloError

__all__ = [
    "Completion",
    "Delta",
    "FinishReason",
    "LoraInfo",
    "Pooling",
    "RequestOutput",
    "RequestTimes",
    "StreamPiece",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "raise_first_error",
]

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""Why a sample ended.

stop: the model ended it, or a stop string, a stop token or a complete grammar did.
length: `max_tokens` tokens were generated, or the context is full.
abort: the request was cancelled.
timeout: the time of `SamplingParams.timeout` was up.
error: it failed; seen only with `return_errors`, else the error is raised.
"""


Pooling = Literal["mean", "cls", "last"]
"""Vector of a text: the mean of the vectors of its tokens, the first one, or the last one."""


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """Loaded LoRA adapter.

    name: of `SamplingParams.lora`.
    scale: factor of its product; the file's alpha / rank comes on top.
    rank: the largest of its weights.
    n_weights: weights of the model that it changes.
    n_bytes: memory of its tensors.
    sha256: of its file, in hexadecimal.
    """

    name: str
    path: str
    scale: float
    rank: int
    n_weights: int
    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability, by the model's distribution before bias and temperature.

    top: the most likely tokens with their logprobs, the most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Next part of an answer to a chat: content, reasoning, or a part of one tool call.

    index: number of the tool call; None: the delta has content or reasoning.
    id, name: in the first delta of a tool call.
    arguments: next characters of its JSON.
    """

    content: str = ""
    reasoning: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    @property
    def part(self) -> str | int:
        """The part that it continues: "content", "reasoning", or the number of a tool call."""
        if self.index is not None:
            return self.index
        return "reasoning" if self.reasoning else "content"


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """Text and data of one generated token of sample `index` of a request.

    text: empty while a character or a stop string is incomplete; the first piece of a sample starts with the
        prompt if `echo` is set.
    token_ids: the token; empty only in the last piece of a sample that was cancelled or ran out of time.
    finish_reason, stop_reason: as in `Completion`, in the last piece of a sample; None before.
    logprob: of the token, if logprobs were asked for.
    prompt_logprobs: as in `RequestOutput`, in the first piece of a sample, if they were asked for.
    request_id: as in `RequestOutput`.
    usage, times: as in `RequestOutput`, in the last piece of the stream; None before. With n > 1 every sample
        has a last piece, and the last of these has them.
    deltas: in a stream of a chat, what the piece adds to the content, the reasoning and the tool calls of the
        answer. Text that may begin a tool call waits for a later piece.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    index: int = 0
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    stop_reason: int | str | None = None
    request_id: str = ""
    usage: Usage | None = None
    times: RequestTimes | None = None
    deltas: tuple[Delta, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a request, in seconds of the clock `time.perf_counter()`.

    queued: the caller asked; `SamplingParams.timeout` runs from here.
    first_token: the first token of any sample was generated; None if there is none.
    end: the last sample ended.
    """

    queued: float
    first_token: float | None
    end: float


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: its prompt, the prefix hit in the prompt, and all its samples."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a function by an answer.

    id: for the message with the function's result.
    arguments: JSON as the model wrote it; check it before use.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Completion:
    """One sample.

    text: excludes the end token and the stop string; starts with the prompt if `echo` is set.
    token_ids: generated tokens, including the end token.
    finish_reason: see `FinishReason`.
    error: exception, if `finish_reason` is "error".
    logprobs: one for each token, if requested.
    stop_reason: the stop string or the id of `stop_token_ids` that ended it; None if the model's own end
        token or anything else did.
    content: of a chat: the text without reasoning and tool calls, if the model's format is known; else None.
    reasoning: of a chat: what the model wrote before its answer; None if it wrote none.
    tool_calls: of a chat with tools: the calls in `text`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: Exception | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: int | str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the logprobs of its tokens; None if logprobs were not requested."""
        return sum(token.logprob for token in self.logprobs) if self.logprobs is not None else None


@dataclass(frozen=True)
class RequestOutput:
    """Output of one prompt. Its attributes that a `Completion` has, too, belong to the first sample.

    prompt_logprobs: None for the first token of the prompt and one for each other, if they were asked for and
        the request did not end before they were known.
    request_id: the name that the caller gave the request, or a unique one.
    times: of the whole request.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    usage: Usage
    times: RequestTimes
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    request_id: str = ""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def reasoning(self) -> str | None:
        return self.outputs[0].reasoning

    if not TYPE_CHECKING:  # a type checker would take any key

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError(f"a RequestOutput has no {key!r}: use its attributes, such as text and usage")

    @property
    def error(self) -> Exception | None:
        """Exception of the request; None if it did not fail."""
        return next((output.error for output in self.outputs if output.error is not None), None)


def raise_first_error(outputs: Iterable[RequestOutput]) -> None:
    """Raise a copy of the exception of the first output that failed, if any.

    The traceback of the copy holds the callers' variables, and these the outputs. If it were the exception of
    an output, all would hold each other until a garbage collection.
    """
    for output in outputs:
        if output.error is not None:
            raise _copy(output.error)


def _copy(error: Exception) -> Exception:
    """Return an equal exception of PyVelo; another exception as it is."""
    if not isinstance(error, VeloError):
        return error
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    copy.__suppress_context__ = True
    return copy.with_traceback(error.__traceback__)
