"""What a request gives back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Completion",
    "FinishReason",
    "RequestOutput",
    "StreamPiece",
    "TokenLogprob",
    "Usage",
    "raise_first_error",
]

# "error" is seen only where errors were asked to be returned instead of raised
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was: the natural logarithm of its probability, and in `top` the most likely tokens
    with theirs, the most likely first; by the model's own distribution, before bias and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one generated token adds to sample `index`.

    `text` is empty while a character or a stop string is incomplete. `token_ids` holds the token, and is
    empty only in the last piece of a cancelled request. `finish_reason` is None in all pieces but the last.
    `logprob` is there where logprobs were asked for, and in the first piece of a sample `prompt_logprobs`, as
    `RequestOutput` has them, where they were; there the text begins with the prompt's where it is echoed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    index: int = 0
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens that a request took: its prompt, what of it was found in a cache, and all its samples."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """One sample. `token_ids` includes the token that ended it, `text` neither that nor the stop string, but
    at its beginning the prompt where it is echoed; `logprobs` is there where they were asked for, one for
    each token."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: Exception | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """ln of the probability of all its tokens, where logprobs were asked for."""
        return sum(token.logprob for token in self.logprobs) if self.logprobs is not None else None


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt; `text`, `token_ids` and `finish_reason` are those of the first sample.

    `prompt_logprobs` is there where they were asked for, one for each token of the prompt but the first, in
    whose place is None; not where the request ended before they were known.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

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
    def error(self) -> Exception | None:
        """Why the request failed; None where it did not."""
        return next((output.error for output in self.outputs if output.error is not None), None)


def raise_first_error(outputs: Iterable[RequestOutput]) -> None:
    """Raises what the first of them failed with, where one did."""
    error = next((output.error for output in outputs if output.error is not None), None)
    if error is not None:
        raise error
