"""Numbers of a run: rows, failures and tokens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pyvelo.batch.rows import Row

__all__ = ["Counts", "count_result"]

MAX_SHOWN = 3
"""Failed rows whose errors are kept."""


@dataclass
class Counts:
    """Numbers of a run.

    rows: of the input, as far as it was read.
    answered: rows with a result of this run.
    failed: of these, results with another status than 200.
    skipped: rows whose result the output held before.
    failed_before: of these, failed ones.
    read_bytes: of the input, of rows that have a result.
    errors: the first failed rows, with their status and message.
    interrupted: whether a signal ended the run.
    wrong_model: whether a row asked for a model of another name.
    """

    rows: int = 0
    answered: int = 0
    failed: int = 0
    skipped: int = 0
    failed_before: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    wrong_model: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the answers in a second of the run; 0 for an empty one."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


class _Usage(msgspec.Struct):
    """Tokens of an answer, by the names of all endpoints."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    tokens_evaluated: int = 0
    tokens_predicted: int = 0


class _Message(msgspec.Struct):
    message: str = ""
    code: Any = None


class _Refusal(msgspec.Struct):
    error: _Message = msgspec.field(default_factory=_Message)


_answer = msgspec.json.Decoder(_Answer)
_refusal = msgspec.json.Decoder(_Refusal)


def count_result(counts: Counts, row: Row, status: int, body: bytes) -> None:
    """Count a result; `body` is JSON."""
    counts.answered += 1
    if status == 200:
        with suppress(msgspec.ValidationError):  # a list of answers, each with its own numbers
            found = _answer.decode(body)
            usage = found.usage or _Usage()
            counts.prompt_tokens += usage.prompt_tokens + usage.input_tokens + found.tokens_evaluated
            counts.completion_tokens += usage.completion_tokens + usage.output_tokens + found.tokens_predicted
        return
    counts.failed += 1
    error = _refusal.decode(body).error
    counts.wrong_model |= status == 404 and error.code == "model_not_found"
    if len(counts.errors) < MAX_SHOWN:
        message = error.message
        place = "" if row.fault is not None else f"line {row.number}: "  # a fault names its line
        counts.errors.append(f"{place}{message} (status {status})")
