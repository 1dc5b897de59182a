"""Generation for one request: admission, the engine's stream, and its answer as a whole or as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pyvelo.engine.input_processor import Prompt
from pyvelo.engine.output import Submission, outputs_of
from pyvelo.outputs import RequestOutput, StreamPiece
from pyvelo.sampling import SamplingParams
from pyvelo.server.errors import HttpError, of_exception
from pyvelo.server.schemas import GenerationFields

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["Form", "Job", "answer_job", "usage_of"]

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Form(Protocol):
    """Shape of the answers of an endpoint."""

    def head(self, index: int) -> bytes:
        """Return the events before the first piece of a choice."""

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return the events of a piece of a choice; b"" if it says nothing."""

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """Return the last event, with the usage."""

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""


@dataclass
class Job:
    """One request for generation.

    prompts: one or more; a function makes the prompt of a chat, in a thread.
    silent: the token that is generated is not returned.
    """

    fields: GenerationFields
    prompts: Sequence[Prompt | Callable[[], Prompt]]
    params: SamplingParams
    form: Form
    silent: bool = False


async def answer_job(serving: Serving, exchange: Exchange, ticket: Ticket, job: Job) -> RequestStream:
    """Generate and send the answer; return the requests, which have ended.

    Raises: HttpError, VeloError before the answer has begun.
    """
    processor = serving.engine.processor
    asked = processor.ask_all(len(job.prompts), job.params, exchange.id)

    def prepare(
        prompt: Prompt | Callable[[], Prompt], number: int, put: Callable[[StreamPiece], None]
    ) -> Submission:
        tokens = prompt() if callable(prompt) else prompt
        params, ask = asked[number]
        return processor.prepare(tokens, params, put if job.fields.stream else None, ask)

    prepares = [partial(prepare, prompt, number) for number, prompt in enumerate(job.prompts)]
    stream = await serving.loop.prepare(prepares, [job.params])
    firsts = [submission.requests[0] for submission in stream.submissions]
    serving.admission.queue(
        ticket, sum(first.n_prompt for first in firsts), [first.parent for first in firsts]
    )
    if job.fields.stream:
        await _send_events(serving, exchange, job, stream)
    else:
        async with aclosing(serving.loop.batches(stream)) as batches:
            async for _ in batches:
                pass
        outputs = outputs_of(stream.submissions)
        _check_deadline(stream)
        await exchange.answer(job.form.answer(outputs, usage_of(stream, job.silent)))
    return stream


async def _send_events(serving: Serving, exchange: Exchange, job: Job, stream: RequestStream) -> None:
    form, n = job.form, job.params.n
    begun: set[int] = set()
    options = job.fields.stream_options
    events = exchange.events()
    events.backlog = lambda: stream.backlog
    try:
        last = time.perf_counter()
        async with aclosing(serving.loop.batches(stream)) as batches:
            async for batch in batches:
                if not events.started and batch[0][1].finish_reason == "timeout":
                    _check_deadline(stream)
                parts = []
                for number, piece in batch:
                    index = number * n + piece.index
                    if index not in begun:
                        begun.add(index)
                        parts.append(form.head(index))
                    parts.append(form.piece(index, piece))
                now = time.perf_counter()
                serving.metrics.step_of_stream(now - last, len(batch), not events.started)
                last = now
                if data := b"".join(parts):
                    await events.write(data)
        outputs_of(stream.submissions)
        _check_deadline(stream)
    except Exception as error:
        if not events.started:
            raise
        await events.end(b"data: " + _encode(of_exception(error).body) + b"\n\n" + DONE)
        raise
    wants_usage = options is not None and options.include_usage
    await events.end((form.usage(usage_of(stream, job.silent)) if wants_usage else b"") + DONE)


def _check_deadline(stream: RequestStream) -> None:
    """Raise HttpError 504 if the time of every request was up before it ran."""
    requests = stream.requests
    if all(request.finish_reason == "timeout" and request.n_cached is None for request in requests):
        raise HttpError(
            504,
            f"the request waited for {requests[0].params.timeout:g} s, its timeout, and did not run",
            code="timeout",
            headers={"x-should-retry": "false"},
        )


def usage_of(stream: RequestStream, silent: bool = False) -> dict[str, Any]:
    """Return the usage of requests that have ended, with the memory that they took.

    peak_blocks, block_seconds: blocks in the tables of the request's samples, at most and over time.
    """
    firsts = [submission.requests[0] for submission in stream.submissions]
    usages = [first.usage for first in firsts]
    parents = [first.parent for first in firsts]
    n_prompt = sum(usage.prompt_tokens for usage in usages)
    n_new = 0 if silent else sum(usage.completion_tokens for usage in usages)
    n_cached = sum(usage.cached_tokens for usage in usages)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "pyvelo": {
            "pool_tokens": n_cached,
            "peak_blocks": sum(parent.peak_blocks for parent in parents),
            "block_seconds": round(sum(parent.block_seconds for parent in parents), 6),
            "preemptions": sum(parent.n_preempted for parent in parents),
        },
    }
