"""/v1/sessions: texts and conversations that keep their blocks between requests, and their forks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pyvelo.engine.input_processor import Prompt
from pyvelo.sampling import SamplingParams
from pyvelo.server import dialogue, kv_store
from pyvelo.server.chat import as_template_reads
from pyvelo.server.completions import CompletionForm
from pyvelo.server.errors import refused
from pyvelo.server.generation import Job, answer_stream
from pyvelo.server.params import completion_params, request_timeout
from pyvelo.server.schemas import MAX_MESSAGES, MAX_TOP_LOGPROBS, CompletionRequest, GenerationFields, convert
from pyvelo.session import AsyncSession, continued, forked, idle_tokens, saved

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving
    from pyvelo.server.session_store import StoredSession

__all__ = ["append", "create", "delete", "fork", "generate", "list_all", "save", "show"]

MAX_TTL = 86400
MAX_FORKS = 64

Messages = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]


class SessionRequest(Struct, kw_only=True):
    prompt: str | list[int] | None = None
    messages: Messages | None = None
    saved: str | None = None
    ttl: Annotated[float, Meta(ge=1, le=MAX_TTL)] = 600.0
    model: str | None = None
    cache_salt: str | None = None
    lora: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None


class SessionAppendRequest(Struct, kw_only=True):
    text: str | None = None
    token_ids: list[int] | None = None
    messages: Messages | None = None


class SessionSaveRequest(Struct, kw_only=True):
    name: str


class SessionForkRequest(Struct, kw_only=True):
    n: Annotated[int, Meta(ge=1, le=MAX_FORKS)] = 1


class SessionGenerateRequest(GenerationFields, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


async def create(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Open a session of a text, of token ids or of a conversation, or a saved one; it may be empty."""
    request = convert(body, SessionRequest)
    request.lora = request.lora or serving.check_model(request.model)
    given = [name for name in ("prompt", "messages", "saved") if getattr(request, name) is not None]
    if len(given) > 1:
        raise refused(given[1], "give one of prompt, messages and saved")
    if request.saved is not None:
        kv_store.check_name("saved", request.saved)
        kv_store.persistence_of(serving)
        if request.lora:
            raise refused("lora", "lora: a saved session keeps its own")
    serving.sessions.check_room(ticket.tenant, 1)
    salt = ticket.tenant.salt(request.cache_salt or "")

    def make() -> tuple[AsyncSession, str | None, dialogue.Dialogue | None]:
        if request.saved is not None:
            return kv_store.load(serving, request.saved, salt)
        prompt: Prompt = request.prompt or ()
        known = None
        if request.messages is not None:
            messages, arguments = as_template_reads(request.messages), request.chat_template_kwargs or {}
            prompt, known = dialogue.begin(serving.chats, messages, arguments)
        return _open(serving, prompt, salt, request.lora), request.lora, known

    session, lora, known = await serving.loop.preparer.run(make)
    try:
        stored = serving.sessions.add(
            ticket.tenant, session, ttl=request.ttl, salt=salt, lora=lora, dialogue=known
        )
    except BaseException:
        await session.close()
        raise
    await exchange.answer(serving.sessions.shown(stored))


async def list_all(serving: Serving, exchange: Exchange) -> None:
    """Answer with the sessions of the key."""
    found = [serving.sessions.shown(each) for each in serving.sessions.of(exchange.tenant)]
    await exchange.answer({"object": "list", "data": found})


async def show(serving: Serving, exchange: Exchange) -> None:
    """Answer with one session."""
    stored = serving.sessions.find(exchange.tenant, exchange.path_id)
    await exchange.answer(serving.sessions.shown(stored))


async def delete(serving: Serving, exchange: Exchange) -> None:
    """Close a session; an answer in progress ends."""
    stored = serving.sessions.find(exchange.tenant, exchange.path_id)
    await serving.sessions.remove(stored)
    await exchange.answer({"id": stored.id, "object": "session", "deleted": True})


async def append(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Append a text, token ids or messages; the next answer computes them."""
    request = convert(body, SessionAppendRequest)
    given = [name for name in ("text", "token_ids", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        raise refused(given[1] if given else "text", "give one of text, token_ids and messages")
    stored = serving.sessions.find(ticket.tenant, exchange.path_id)
    serving.sessions.check_room(ticket.tenant, 0)
    with serving.sessions.use(stored) as session:
        if request.messages is not None:
            await _append_messages(serving, stored, as_template_reads(request.messages))
        else:
            await session.append(request.text if request.text is not None else request.token_ids or ())
    await exchange.answer(serving.sessions.shown(stored))


async def generate(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Continue a session with an answer, which it keeps; answers and events have the shape of completions."""
    request = convert(body, SessionGenerateRequest)
    serving.check_model(request.model)
    stored = serving.sessions.find(ticket.tenant, exchange.path_id)
    for name in ("lora", "cache_salt"):
        if getattr(request, name) is not None:
            raise refused(name, f"{name}: a session keeps its own: give it when you create the session")
    fields = CompletionRequest(prompt="", **msgspec.structs.asdict(request))
    if stored.dialogue is None and fields.max_tokens is None:
        fields.max_tokens = 16  # as for completions
    default = SamplingParams() if stored.dialogue is None else serving.chats.params
    timeout = request_timeout(request, exchange.header("request-timeout-ms"))
    params = completion_params(fields, ticket.tenant, timeout, default)
    params = replace(params, cache_salt="")  # the sequence has it
    form = CompletionForm(serving, exchange.id, fields, silent=False)
    job = Job((), params, form, request.stream)
    serving.sessions.check_room(ticket.tenant, 0)
    with serving.sessions.use(stored) as session:
        asked = serving.engine.processor.ask(params, exchange.id)
        async with continued(session, params, asked, streams=request.stream) as stream:
            await answer_stream(serving, exchange, ticket, job, stream)
        stored.n_known = len(session)
    return stream


async def save(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Save a session in the store under a name, in place of an earlier one."""
    request = convert(body, SessionSaveRequest)
    kv_store.check_name("name", request.name)
    kv_store.persistence_of(serving)
    stored = serving.sessions.find(ticket.tenant, exchange.path_id)
    with serving.sessions.use(stored) as session:
        note = None if stored.dialogue is None else asdict(stored.dialogue)
        await saved(session, request.name, note)
    await exchange.answer({**serving.sessions.shown(stored), "saved": request.name})


async def fork(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Open sessions of the same tokens that share all blocks; compute what was appended first."""
    request = convert(body, SessionForkRequest)
    store = serving.sessions
    stored = store.find(ticket.tenant, exchange.path_id)
    store.check_room(ticket.tenant, request.n)
    made: list[AsyncSession] = []
    found: list[StoredSession] = []
    try:
        with store.use(stored) as session:
            serving.admission.queue(ticket, len(session) - stored.n_known, ())
            for _ in range(request.n):
                made.append(await forked(session, ticket.tenant.priority))
            stored.n_known = len(session)
        store.check_room(ticket.tenant, request.n)
        for twin in made:
            new = store.add(
                *(ticket.tenant, twin),
                ttl=stored.ttl,
                salt=stored.salt,
                lora=stored.lora,
                dialogue=stored.dialogue,
            )
            new.n_known = stored.n_known
            found.append(new)
    except BaseException:
        for new in found:
            await store.remove(new)
        for twin in made:
            await twin.close()
        raise
    await exchange.answer({"object": "list", "data": [store.shown(new) for new in found]})


async def _append_messages(
    serving: Serving, stored: StoredSession, messages: Sequence[dict[str, Any]]
) -> None:
    """Append the text of messages; if the template changes the text before, start again with all of it."""
    session, known = stored.session, stored.dialogue
    tokens = await idle_tokens(session)
    if known is None and tokens:
        raise refused("messages", "messages: the session was made of text: append text or token_ids")

    def extend() -> tuple[Sequence[int], bool, dialogue.Dialogue]:
        if known is None:
            prompt, begun = dialogue.begin(serving.chats, messages, {})
            return prompt, True, begun
        return dialogue.extend(serving.engine, serving.chats, known, tokens, messages)

    added, follows, longer = await serving.loop.preparer.run(extend)
    if follows:
        await session.append(added)
    else:
        make = partial(_open, serving, added, stored.salt, stored.lora)
        stored.session = await serving.loop.preparer.run(make)
        stored.n_known = 0
        await session.close()
    stored.dialogue = longer


def _open(serving: Serving, prompt: Prompt, salt: str, lora: str | None) -> AsyncSession:
    return AsyncSession(serving.loop, serving.engine.processor.sequence(prompt, salt, lora))
