"""/api/chat, /api/generate, /api/tags, /api/show and /api/version, as Ollama's clients call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from pyvelo._version import __version__
from pyvelo.chat.answer_format import thinks
from pyvelo.engine.input_processor import Prompt
from pyvelo.server.chat import chat_prompt, params_of
from pyvelo.server.contents import thinking_arguments
from pyvelo.server.errors import HttpError, refused
from pyvelo.server.generation import Job, answer_job
from pyvelo.server.ollama_form import OllamaForm, now
from pyvelo.server.schemas import MAX_MESSAGES, MAX_TOOLS, ChatRequest, ResponseFormat, Stops, convert

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["chat", "check_ollama_model", "generate", "ollama_error", "running", "show", "tags", "version"]

NEVER = "9999-12-31T23:59:59Z"


class OllamaOptions(Struct, kw_only=True):
    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


IGNORED_OPTIONS = frozenset(
    {
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"),
        *("f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
        *("penalize_newline", "draft_num_predict"),
    }
)
"""Options of the program that Ollama starts; here the server's own settings count."""

ROLES = ("system", "user", "assistant", "tool")

OFF = {"typical_p": 1.0, "tfs_z": 1.0, "mirostat": 0}
"""Options of samplers that do not exist here, and the values that switch them off."""


class OllamaFields(Struct, kw_only=True):
    """Fields that chats and prompts share."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None
    think: bool | str | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None
    context: list[int] | None = None


class OllamaShowRequest(Struct, kw_only=True):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


async def chat(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream | None:
    """Answer a conversation."""
    request = convert(body, OllamaChatRequest)
    adapter = check_ollama_model(serving, request.model)
    form = OllamaForm(request.model, as_chat=True)
    if not request.messages:
        await exchange.answer(form.loaded())
        return None
    messages = [_message(message, f"messages[{number}]") for number, message in enumerate(request.messages)]
    as_chat = _chat(request, messages, request.tools)
    as_chat.lora = adapter
    prompt = partial(chat_prompt, serving, as_chat)
    return await _answer(serving, exchange, ticket, request, as_chat, prompt, form)


async def generate(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream | None:
    """Answer a prompt, as the model's template shows it, or as it is if `raw` is set."""
    request = convert(body, OllamaGenerateRequest)
    adapter = check_ollama_model(serving, request.model)
    reasons = {
        "suffix": "the model continues the prompt",
        "template": "the model's own is used: render yours and set raw",
        "images": "prompts are text",
        "context": "send messages to /api/chat",
    }
    for name, reason in reasons.items():
        if getattr(request, name):
            raise refused(name, f"{name} is not supported: {reason}")
    form = OllamaForm(request.model, as_chat=False)
    if not request.prompt:
        await exchange.answer(form.loaded())
        return None
    if request.raw and request.system:
        raise refused("system", "system: a raw prompt has no place for it")
    system = [{"role": "system", "content": request.system}] if request.system else []
    as_chat = _chat(request, [*system, {"role": "user", "content": request.prompt}])
    as_chat.lora = adapter
    prompt: Callable[[], Prompt] = partial(chat_prompt, serving, as_chat)
    if request.raw:
        prompt = partial(serving.engine.model.tokenize, request.prompt, add_special=True, parse_special=True)
    return await _answer(serving, exchange, ticket, request, as_chat, prompt, form)


async def tags(serving: Serving, exchange: Exchange) -> None:
    """Answer with the model and its adapters."""
    created = {"modified_at": _created(serving)}
    await exchange.answer({"models": [{**found, **created} for found in _models(serving)]})


async def running(serving: Serving, exchange: Exchange) -> None:
    """Answer with the same models: they stay loaded until the server ends."""
    loaded = {"expires_at": NEVER, "context_length": serving.engine.n_ctx}
    await exchange.answer({"models": [{**found, **loaded} for found in _models(serving)]})


async def version(serving: Serving, exchange: Exchange) -> None:
    """Answer with the version of PyVelo."""
    await exchange.answer({"version": __version__})


async def show(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with properties of the model."""
    request = convert(body, OllamaShowRequest)
    name = request.model or request.name
    if not name:
        raise refused("model", "model is missing")
    check_ollama_model(serving, name)
    meta = serving.engine.model.meta
    await exchange.answer(
        {
            "modelfile": "",
            "parameters": "",
            "template": serving.chats.template.source,
            "details": _details(serving),
            "model_info": {
                name: value for name, value in meta.items() if not name.startswith("tokenizer.chat_template")
            },
            "capabilities": _capabilities(serving),
            "modified_at": _created(serving),
        }
    )


def _capabilities(serving: Serving) -> list[str]:
    """Return what the model can do, by Ollama's names; its template tells of tools and reasoning."""
    if not serving.generates:
        return ["embedding"]
    source = serving.chats.template.source
    tools = ["tools"] if "tools" in source else []
    return ["completion", *tools, *(["thinking"] if thinks(source) else [])]


def ollama_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an error as Ollama's clients read it."""
    return {"error": error.message}


async def _answer(
    serving: Serving,
    exchange: Exchange,
    ticket: Ticket,
    request: OllamaFields,
    as_chat: ChatRequest,
    prompt: Callable[[], Prompt],
    form: OllamaForm,
) -> RequestStream:
    params = params_of(serving, exchange, ticket, as_chat)
    job = Job([prompt], params, form, request.stream, reader=form.reader)
    return await answer_job(serving, exchange, ticket, job)


def check_ollama_model(serving: Serving, name: str) -> str | None:
    """Return the adapter that a name selects, as `Serving.check_model`; names may have a tag."""
    return serving.check_model(name.removesuffix(":latest"))


def _chat(
    request: OllamaFields, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> ChatRequest:
    """Return the request as OpenAI's clients write it; of num_predict, what is negative means no limit."""
    options = _options(request.options or {})
    most = options.num_predict
    if most == 0:
        raise refused("options", "options.num_predict must be at least 1, or negative for no limit, got 0")
    return ChatRequest(
        messages=messages,
        stream=request.stream,
        max_tokens=most if most is not None and most > 0 else None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=None if options.seed == -1 else options.seed,
        stop=options.stop,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        response_format=_format(request.format),
        chat_template_kwargs=None if request.think is None else dict(thinking_arguments(bool(request.think))),
        reasoning_effort=request.think if isinstance(request.think, str) else None,
        tools=tools,
    )


def _options(given: Mapping[str, Any]) -> OllamaOptions:
    """Return the options that a request sets.

    Raises: HttpError at one that would change the answer and does not exist here.
    """
    try:
        options = convert(
            {name: value for name, value in given.items() if name not in IGNORED_OPTIONS}, OllamaOptions
        )
    except HttpError as error:
        raise refused("options", f"options.{error.message}") from None
    for name, off in OFF.items():
        if getattr(options, name) not in (None, off):
            raise refused("options", f"options.{name} is not supported: use top_k, top_p and min_p")
    if options.repeat_last_n is not None and options.repeat_last_n != -1:
        penalties = (options.presence_penalty or 0, options.frequency_penalty or 0)
        if any(penalties) or options.repeat_penalty not in (None, 1.0):
            n_last = options.repeat_last_n
            raise refused("options", f"options.repeat_last_n={n_last}: penalties count all tokens: give -1")
    return options


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not given:
        return None
    if isinstance(given, dict):
        return ResponseFormat(type="json_object", schema=given)
    if given != "json":
        raise refused("format", f"format={given[:64]!r}: give json or a schema")
    return ResponseFormat(type="json_object")


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message as a chat has it; raise HttpError if it has something else than text and calls."""
    if message.get("images"):
        raise refused("messages", f"{where}.images is not supported: messages are text")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise refused("messages", f"{where}.role={str(role)[:64]!r}: give {', '.join(ROLES)}")
    calls = _calls(message.get("tool_calls"), where)
    if not isinstance(content, str) and not (content is None and calls):
        raise refused("messages", f"{where}.content must be a string")
    found: dict[str, Any] = {"role": role, "content": content or ""}
    if calls:
        found["tool_calls"] = calls
    names = {"thinking": "reasoning_content", "tool_name": "name", "tool_call_id": "tool_call_id"}
    for name, other in names.items():
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise refused("messages", f"{where}.{name} must be a string")
            found[other] = message[name]
    return found


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message."""
    calls = []
    for number, call in enumerate(given if isinstance(given, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        fields = function if isinstance(function, dict) else {}
        name, arguments = fields.get("name"), fields.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, (dict, str, type(None))):
            place = f"{where}.tool_calls[{number}]"
            raise refused("messages", f"{place}.function must have a name and arguments")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**named, "type": "function", "function": {"name": name, "arguments": arguments or {}}})
    return calls


def _models(serving: Serving) -> list[dict[str, Any]]:
    common = {
        "size": serving.engine.model.info.size_bytes,
        "digest": serving.fingerprint,
        "details": _details(serving),
    }
    return [{"name": name, "model": name, **common} for name in serving.all_names]


def _details(serving: Serving) -> dict[str, Any]:
    """Return the family and the size of the model."""
    info = serving.engine.model.info
    n = info.n_params
    size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M" if n >= 1e6 else f"{n / 1e3:.0f}K"
    return {
        "parent_model": "",
        "format": "gguf",
        "family": info.arch,
        "families": [info.arch],
        "parameter_size": size,
        "quantization_level": info.description.split()[-1],
    }


def _created(serving: Serving) -> str:
    return now(datetime.fromtimestamp(serving.created, timezone.utc))
