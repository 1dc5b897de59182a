"""/v1/responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from pyvelo.sampling import SamplingParams
from pyvelo.server.answers import adapt
from pyvelo.server.chat import chat_prompt, params_of
from pyvelo.server.contents import thinking_arguments, with_names
from pyvelo.server.errors import HttpError, not_found, refused
from pyvelo.server.generation import Job, answer_job, answer_stream
from pyvelo.server.http import encoded
from pyvelo.server.response_form import ResponseForm
from pyvelo.server.response_items import chat_messages, chat_tools
from pyvelo.server.response_store import Turn
from pyvelo.server.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    ChatRequest,
    JsonSchemaFormat,
    ResponseFormat,
    convert,
)
from pyvelo.session import AsyncSession, continued, share_beginning

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["create_response", "delete_response", "show_response"]


LOGPROBS = "message.output_text.logprobs"
REASONING = "reasoning.encrypted_content"
"""Asks for reasoning in a form that a later request can have; here its text can."""


class ResponseTextFormat(Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseText(Struct, kw_only=True):
    format: ResponseTextFormat | None = None
    verbosity: str | None = None


class ResponseReasoning(Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # of tools that OpenAI's servers run
    include: list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # a conversation that is too long is refused
    user: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # ours
    timeout: float | None = None


async def create_response(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Answer a conversation, which a later request may continue by its id."""
    request = convert(body, ResponsesRequest)
    adapter = serving.check_model(request.model)
    before = _previous(serving, ticket, request.previous_response_id)
    own = chat_messages(request.input)
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    earlier = before.messages if before is not None else ()
    as_chat = _chat(request, with_names([*system, *earlier, *own]))
    as_chat.lora = adapter
    params = params_of(serving, exchange, ticket, as_chat)
    name = serving.new_id("resp")
    echoed = _echoed(request, name, serving.model_name)
    echoed |= {"temperature": params.temperature, "top_p": params.top_p}
    form = ResponseForm(serving, echoed, _keeper(serving, ticket, request, before, own))
    prompt = partial(chat_prompt, serving, as_chat)
    job = Job([prompt], params, form, request.stream, reader=form.reader)
    if request.store is False or not serving.keeps_sessions:
        return await answer_job(serving, exchange, ticket, job)
    previous = request.previous_response_id
    kept = serving.kept_sessions.find(ticket.tenant, previous) if previous is not None else None
    stream, session = await _answer_in_session(serving, exchange, ticket, job, kept)
    if serving.responses.body(ticket.tenant, name) is not None:
        serving.kept_sessions.keep(ticket.tenant, name, session)
    else:  # a stream's client has deleted it already
        await session.close()
    if previous is not None:
        serving.kept_sessions.close(ticket.tenant, previous)
    return stream


async def show_response(serving: Serving, exchange: Exchange) -> None:
    """Answer with a stored response."""
    found = serving.responses.body(exchange.tenant, exchange.path_id)
    if found is None:
        raise _missing(exchange.path_id)
    await exchange.answer(found)


async def delete_response(serving: Serving, exchange: Exchange) -> None:
    """Remove a stored response."""
    if not serving.responses.remove(exchange.tenant, exchange.path_id):
        raise _missing(exchange.path_id)
    serving.kept_sessions.close(exchange.tenant, exchange.path_id)
    await exchange.answer({"id": exchange.path_id, "object": "response", "deleted": True})


def _missing(name: str) -> HttpError:
    return not_found(
        f"there is no response {name[:64]!r}: it is not complete, was not stored, was deleted, has expired, "
        f"or made room for newer ones"
    )


def _previous(serving: Serving, ticket: Ticket, name: str | None) -> Turn | None:
    """Return the turn that a request continues."""
    if name is None:
        return None
    turn = serving.responses.turn(ticket.tenant, name)
    if turn is None:
        message = f"previous_response_id: {_missing(name).message}"
        raise HttpError(400, message, "previous_response_id", "previous_response_not_found")
    return turn


def _keeper(
    serving: Serving,
    ticket: Ticket,
    request: ResponsesRequest,
    before: Turn | None,
    own: Sequence[Mapping[str, Any]],
) -> Callable[[Mapping[str, Any]], None]:
    """Return the function that stores an answer."""

    def keep(response: Mapping[str, Any]) -> None:
        if request.store is not False:
            messages = [*own, *chat_messages(response["output"])]
            serving.responses.add(ticket.tenant, response["id"], before, messages, encoded(response))

    return keep


async def _answer_in_session(
    serving: Serving, exchange: Exchange, ticket: Ticket, job: Job, kept: AsyncSession | None
) -> tuple[RequestStream, AsyncSession]:
    """Answer as `answer_job`, in a session; it shares the blocks of another one that it begins with.

    Returns: the request, which has ended, and its session.
    """
    processor = serving.engine.processor
    asked = processor.ask(job.params, exchange.id)

    def make() -> tuple[AsyncSession, SamplingParams]:
        (prompt,) = job.prompts
        made = prompt() if callable(prompt) else prompt
        params = job.params if job.reader is None else adapt(job.reader, made, job.params)
        return AsyncSession(serving.loop, processor.sequence(made, params.cache_salt, params.lora)), params

    session, params = await serving.loop.preparer.run(make)
    try:
        if kept is not None:
            await share_beginning(session, kept)
        async with continued(session, params, asked, streams=job.streams) as stream:
            await answer_stream(serving, exchange, ticket, job, stream)
    except BaseException:
        await session.close()
        raise
    return stream, session


def _chat(request: ResponsesRequest, messages: list[Any]) -> ChatRequest:
    """Return the request as a chat."""
    include = request.include or ()
    other = next((each for each in include if each not in (LOGPROBS, REASONING)), None)
    if other is not None:
        raise refused("include", f"include: {other[:64]!r} is not supported: give {LOGPROBS}")
    if len(messages) > MAX_MESSAGES:
        raise refused("input", f"the conversation has {len(messages)} messages: at most {MAX_MESSAGES}")
    wants_logprobs = LOGPROBS in include
    if request.top_logprobs and not wants_logprobs:
        raise refused("top_logprobs", f"top_logprobs needs include: [{LOGPROBS!r}]")
    return ChatRequest(
        messages=messages,
        stream=request.stream,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=wants_logprobs,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        response_format=_format(request.text),
        **_effort(request.reasoning),
        **{name: getattr(request, name) for name in ("top_k", "min_p", "seed", "priority")},
        cache_salt=request.cache_salt,
        tools=chat_tools(request.tools),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        timeout=request.timeout,
    )


def _effort(reasoning: ResponseReasoning | None) -> dict[str, Any]:
    """Return the fields for an effort of reasoning; "none" switches it off."""
    effort = reasoning.effort if reasoning is not None else None
    if effort is None:
        return {}
    found: dict[str, Any] = {"chat_template_kwargs": dict(thinking_arguments(effort != "none"))}
    return found if effort == "none" else {**found, "reasoning_effort": effort}


def _format(text: ResponseText | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    given = text.format
    if given.type == "json_schema":
        if given.schema is None:
            raise refused("text", "text.format.schema is missing")
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given.schema))
    if given.type not in ("text", "json_object"):
        raise refused("text", f"text.format.type={given.type[:64]!r}: give text, json_object or json_schema")
    return ResponseFormat(type=given.type)


def _echoed(request: ResponsesRequest, name: str, model: str) -> dict[str, Any]:
    """Return the fields of a response that are known before its answer."""
    text = request.text or ResponseText()
    found = text.format or ResponseTextFormat(type="text")
    shown: dict[str, Any] = {"type": found.type}
    if found.type == "json_schema":
        names = ("name", "schema", "description", "strict")
        shown |= {each: getattr(found, each) for each in names}
    effort = request.reasoning.effort if request.reasoning is not None else None
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "background": False,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "store": request.store is not False,
        "text": {"format": shown},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "user": request.user,
    }
