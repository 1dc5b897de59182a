"""Generation for one request: admission, the engine's stream, and its answer as a whole or as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.engine.input_processor import AskedOfAll, Prompt
from pyvelo.engine.output import Submission, outputs_of
from pyvelo.outputs import RequestOutput, StreamPiece, TokenLogprob
from pyvelo.sampling import SamplingParams
from pyvelo.server.answers import adapt
from pyvelo.server.errors import HttpError, of_exception
from pyvelo.server.http import EVENTS, PING, encoded, encoded_list
from pyvelo.server.schemas import GenerationFields

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.engine.request import Request
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["Form", "Job", "OpenAIForm", "answer_job", "answer_stream", "ended", "usage_of"]

DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """Shape of the answers of an endpoint."""

    media_type: str
    ping: bytes

    def begin(self, stream: RequestStream) -> None:
        """Take the requests, before their first piece."""

    def head(self, index: int) -> bytes:
        """Return the events before the first piece of a choice."""

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return the events of a piece of a choice; b"" if it says nothing."""

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return the last events."""

    def failed(self, error: HttpError) -> bytes:
        """Return the last events of a stream that breaks off."""

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> Any:
        """Return the whole answer."""


class OpenAIForm:
    """Common part of completions and chats: first fields, vLLM's prompt logprobs, ends of streams.

    Args:
        fields: of the request; they tell whether the usage and token ids are sent.
        name: id of the answer.
        kind, chunk: types of the whole answer and of an event.
    """

    media_type = EVENTS
    ping = PING

    def __init__(self, serving: Serving, fields: GenerationFields, name: str, kind: str, chunk: str) -> None:
        options = fields.stream_options
        self._serving = serving
        self._ids = bool(fields.return_token_ids)
        self._base = {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": fields.lora or serving.model_name,
            "system_fingerprint": serving.fingerprint,
        }
        self._chunk = {**self._base, "object": chunk}
        self._open = b"data: " + encoded(self._chunk)[:-1] + b',"choices":[{"index":'
        self._wants_usage = options is not None and bool(options.include_usage)
        self._counts_usage = bool(self._wants_usage and options and options.continuous_usage_stats)
        self._n = fields.n or 1
        self._n_new: dict[int, int] = {}
        self._firsts: list[Request] = []
        self._text_of = _id_text if fields.return_tokens_as_token_ids else serving.token_text
        self._wants_prompt_logprobs = fields.prompt_logprobs is not None

    def begin(self, stream: RequestStream) -> None:
        """Take the requests."""
        self._firsts = stream.firsts

    def usage_so_far(self, index: int, piece: StreamPiece | None = None) -> bytes:
        """Return the field with the usage of a choice after a piece, if each event should have it."""
        if not self._counts_usage:
            return b""
        n_new = self._n_new.get(index, 0) + (0 if piece is None else len(piece.token_ids))
        self._n_new[index] = n_new
        n_prompt = self._firsts[index // self._n].n_prompt
        counts = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
        return b',"usage":' + encoded(counts)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """Return the event with the usage and without choices."""
        return b"data: " + encoded({**self._chunk, "choices": [], "usage": usage}) + b"\n\n"

    def prompt_logprobs(self, output: RequestOutput) -> dict[str, Any]:
        """Return the field with the logprobs of a prompt, if they were asked for."""
        if not self._wants_prompt_logprobs:
            return {}
        scored = output.prompt_logprobs
        return {"prompt_logprobs": scored and [each and _ranked(self._serving, each) for each in scored]}

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return the usage, if it is wanted, and the end."""
        return (self.usage(usage) if self._wants_usage else b"") + DONE

    def failed(self, error: HttpError) -> bytes:
        """Return the error and the end."""
        return b"data: " + encoded(error.body) + b"\n\n" + DONE


@dataclass
class Job:
    """One request for generation.

    prompts: one or more; a function makes the prompt of a chat, in a thread.
    streams: the answer is sent as events.
    silent: the token that is generated is not returned.
    reader: of the answers to a chat; it takes their format from the prompt, in a thread.
    """

    prompts: Sequence[Prompt | Callable[[], Prompt]]
    params: SamplingParams
    form: Form
    streams: bool = False
    silent: bool = False
    reader: AnswerReader | None = None


async def answer_job(serving: Serving, exchange: Exchange, ticket: Ticket, job: Job) -> RequestStream:
    """Generate and send the answer; return the requests, which have ended.

    Raises: HttpError, VeloError before the answer has begun.
    """
    processor = serving.engine.processor
    asked = processor.ask_all(len(job.prompts), job.params, exchange.id)
    prompts = job.prompts
    if job.reader is not None:  # first, so that no thread waits for the grammar that the template names
        prompts, asked = await _adapted(serving, job.prompts, job.reader, asked)

    def prepare(
        prompt: Prompt | Callable[[], Prompt], number: int, put: Callable[[StreamPiece], None]
    ) -> Submission:
        tokens = prompt() if callable(prompt) else prompt
        params, ask = asked[number]
        return processor.prepare(tokens, params, put if job.streams else None, ask)

    prepares = [partial(prepare, prompt, number) for number, prompt in enumerate(prompts)]
    stream = await serving.loop.prepare(prepares, [params for params, _ in asked])
    await answer_stream(serving, exchange, ticket, job, stream)
    return stream


async def _adapted(
    serving: Serving,
    prompts: Sequence[Prompt | Callable[[], Prompt]],
    reader: AnswerReader,
    asked: AskedOfAll,
) -> tuple[list[Prompt], AskedOfAll]:
    """Return prompts that are made, and the parameters that each needs."""

    def make() -> tuple[list[Prompt], AskedOfAll]:
        made = [prompt() if callable(prompt) else prompt for prompt in prompts]
        both = zip(made, asked, strict=True)
        return made, [(adapt(reader, prompt, params), ask) for prompt, (params, ask) in both]

    return await serving.loop.preparer.run(make)


async def answer_stream(
    serving: Serving, exchange: Exchange, ticket: Ticket, job: Job, stream: RequestStream
) -> None:
    """Run requests that are prepared, and send the answer.

    Raises: HttpError, VeloError before the answer has begun.
    """
    firsts = stream.firsts
    serving.admission.queue(
        ticket, sum(first.n_prompt for first in firsts), [first.parent for first in firsts]
    )
    job.form.begin(stream)
    if job.streams:
        await _send_events(serving, exchange, job, stream)
    else:
        async with aclosing(serving.loop.batches(stream)) as batches:
            async for _ in batches:
                pass
        outputs = outputs_of(stream.submissions)
        _check_deadline(stream)
        make = partial(job.form.answer, outputs, usage_of(stream, job.silent))
        if any(output.prompt_logprobs for output in outputs):  # the event loop would stand still for seconds
            await exchange.answer(await serving.loop.preparer.run(lambda: _in_pieces(make())))
        else:
            await exchange.answer(make())


def _in_pieces(answer: Mapping[str, Any]) -> bytes:
    """Return an answer as JSON, encoded choice by choice."""
    return encoded({**answer, "choices": encoded_list(answer["choices"], at_once=1)})


async def _send_events(serving: Serving, exchange: Exchange, job: Job, stream: RequestStream) -> None:
    form, n = job.form, job.params.n
    begun: set[int] = set()
    events = exchange.events(form.media_type, form.ping)
    events.backlog, events.failed = lambda: stream.backlog, form.failed
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
        end = form.end(usage_of(stream, job.silent))
    except Exception as error:
        if not events.started:
            raise
        await events.fail(of_exception(error))
        raise
    await events.end(end)


def ended(reason: str | None, stop_reason: int | str | None, usage: bytes = b"") -> bytes:
    """Return the end of an event: why its choice ended, or null, and the usage so far."""
    if reason is None:
        return b',"finish_reason":null}]%s}\n\n' % usage
    return b',"finish_reason":%s,"stop_reason":%s}]%s}\n\n' % (encoded(reason), encoded(stop_reason), usage)


def _id_text(token: int) -> str:
    """Return the name of a token in logprobs, if ids are wanted in place of texts."""
    return f"token_id:{token}"


def _ranked(serving: Serving, token: TokenLogprob) -> dict[int, dict[str, Any]]:
    """Return the logprobs of a token of the prompt and of the most likely ones, as vLLM names them."""
    values: dict[int, tuple[float, int | None]] = {
        each: (value, rank) for rank, (each, value) in enumerate(token.top, 1)
    }
    values.setdefault(token.token_id, (token.logprob, None))
    return {
        each: {"logprob": value, "rank": rank, "decoded_token": serving.token_text(each)}
        for each, (value, rank) in values.items()
    }


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

    pool_tokens, host_tokens, store_tokens: cached tokens of the prompt, by where they were.
    peak_blocks, block_seconds: blocks in the tables of the request's samples, at most and over time.
    """
    firsts = stream.firsts
    usages = [first.usage for first in firsts]
    parents = [first.parent for first in firsts]
    n_prompt = sum(usage.prompt_tokens for usage in usages)
    n_new = 0 if silent else sum(usage.completion_tokens for usage in usages)
    n_cached = sum(usage.cached_tokens for usage in usages)
    n_host = min(n_cached, sum(parent.n_host for parent in parents))
    n_store = min(n_cached - n_host, sum(parent.n_loaded for parent in parents))
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "pyvelo": {
            "pool_tokens": n_cached - n_host - n_store,
            "host_tokens": n_host,
            "store_tokens": n_store,
            "peak_blocks": sum(parent.peak_blocks for parent in parents),
            "block_seconds": round(sum(parent.block_seconds for parent in parents), 6),
            "preemptions": sum(parent.n_preempted for parent in parents),
        },
    }
