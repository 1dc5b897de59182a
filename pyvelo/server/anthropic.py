"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients call them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from pyvelo.server.anthropic_form import MessageForm
from pyvelo.server.anthropic_messages import AnthropicMessage, chat_messages, chat_tools, tool_choice
from pyvelo.server.chat import chat_prompt, params_of
from pyvelo.server.contents import thinking_arguments
from pyvelo.server.errors import refused
from pyvelo.server.generation import Job, answer_job
from pyvelo.server.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    JsonSchemaFormat,
    ResponseFormat,
    Stops,
    convert,
)

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["count_tokens", "create_message"]


class AnthropicFormat(Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | bool


class AnthropicOutput(Struct, kw_only=True):
    format: AnthropicFormat | None = None
    effort: str | None = None


class AnthropicPrompt(Struct, kw_only=True):
    """Fields that make the prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None
    output_config: AnthropicOutput | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None  # prefixes are always cached


class AnthropicRequest(AnthropicPrompt, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: Stops | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None


async def create_message(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Answer a conversation."""
    request = convert(body, AnthropicRequest)
    adapter = serving.check_model(request.model)
    as_chat = _chat(request)
    as_chat.lora = adapter
    as_chat.max_tokens, as_chat.stop = request.max_tokens, request.stop_sequences
    as_chat.temperature, as_chat.top_p, as_chat.top_k = request.temperature, request.top_p, request.top_k
    params = params_of(serving, exchange, ticket, as_chat)
    form = MessageForm(f"msg_{exchange.id}", serving.model_name, request.max_tokens)
    prompt = partial(chat_prompt, serving, as_chat)
    job = Job([prompt], params, form, request.stream, reader=form.reader)
    return await answer_job(serving, exchange, ticket, job)


async def count_tokens(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the number of tokens of a conversation."""
    request = convert(body, AnthropicPrompt)
    serving.check_model(request.model)
    tokens = await serving.loop.preparer.run(lambda: chat_prompt(serving, _chat(request)))
    await exchange.answer({"input_tokens": len(tokens)})


def _chat(request: AnthropicPrompt) -> ChatRequest:
    """Return the request as a chat. A last message of the assistant is continued."""
    messages = chat_messages(request.system, request.messages)
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    choice, parallel = tool_choice(request.tool_choice)
    return ChatRequest(
        messages=messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        chat_template_kwargs=_thinking(request.thinking),
        tools=chat_tools(request.tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        **_output(request.output_config),
    )


def _thinking(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the variables of templates that switch reasoning on or off; it has no limit but max_tokens."""
    if given is None:
        return None
    kind = given.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise refused("thinking", f"thinking.type={str(kind)[:64]!r}: give enabled, adaptive or disabled")
    return dict(thinking_arguments(kind != "disabled"))


def _output(given: AnthropicOutput | None) -> dict[str, Any]:
    if given is None:
        return {}
    found: dict[str, Any] = {"reasoning_effort": given.effort}
    if given.format is not None:
        if given.format.type != "json_schema":
            kind = given.format.type[:64]
            raise refused("output_config", f"output_config.format.type={kind!r}: give json_schema")
        schema = JsonSchemaFormat(schema=given.format.schema)
        found["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    return found
