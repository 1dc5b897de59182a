"""Bodies of requests, as OpenAI's clients send them, with vLLM's additional fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from pyvelo.server.errors import HttpError, refused
from pyvelo.server.wording import in_words

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "GenerationFields",
    "ResponseFormat",
    "StreamOptions",
    "StructuredOutputs",
    "TokenizeRequest",
    "convert",
]

MAX_MESSAGES = 4096
MAX_PROMPTS = 256
MAX_SAMPLES = 16
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128

Stops = Annotated[list[str], Meta(max_length=MAX_STOPS)]
Tokens = list[int]
Choice = Annotated[list[str], Meta(min_length=1, max_length=1024)]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct, kw_only=True):
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """Fields that completions and chats share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choice | None = None
    # ours
    lora: str | None = None
    timeout: float | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | Annotated[list[str | int | Tokens], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = 16
    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatRequest(GenerationFields, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class EmbeddingRequest(Struct, kw_only=True):
    input: str | Annotated[list[str | int | Tokens], Meta(min_length=1)]
    model: str | None = None
    encoding_format: str = "float"
    dimensions: int | None = None
    pooling: str | None = None
    user: str | None = None


class TokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


IGNORED = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity", "id"),
        *("prediction", "prompt_cache_retention", "request_id", "include_reasoning"),
        *("separate_reasoning", "stream_reasoning", "spaces_between_special_tokens", "keep_alive"),
        *("cache_prompt", "chat_id", "session_id", "id_slot", "timings_per_token", "return_progress"),
    }
)
"""Fields that cannot change the tokens of an answer here."""

REFUSED = {
    "tools": "/v1/chat/completions has tool calls",
    "tool_choice": "/v1/chat/completions has tool calls",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "modalities": "only text can be generated",
    "audio": "only text can be generated",
    "web_search_options": "the server searches nothing",
    "use_beam_search": "beam search is LLM.beam_search in Python",
    "length_penalty": "beam search is LLM.beam_search in Python",
    "bad_words": "ban tokens with logit_bias",
    "allowed_token_ids": "restrict the answer with structured_outputs",
    "logits_processors": "restrict the answer with structured_outputs",
    "truncate_prompt_tokens": "prompts are not cut: shorten it",
    "prompt_embeds": "prompts are text or token ids",
    "typical_p": "the sampler has top_k, top_p and min_p",
    "mirostat": "the sampler has top_k, top_p and min_p",
    "tfs_z": "the sampler has top_k, top_p and min_p",
    "top_a": "the sampler has top_k, top_p and min_p",
    "guided_whitespace_pattern": "whitespace follows the grammar",
    "guided_decoding_backend": "grammars have one backend",
}
"""Fields that would change the answer, and what to do instead; null, false, [], "none" and "auto" pass."""

ALIASES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
    "content": "prompt",
    "add_special": "add_special_tokens",
    "with_pieces": "return_token_strs",
}
"""llama-server's names of fields."""

T = TypeVar("T", bound=Struct)


def convert(body: Mapping[str, Any], kind: type[T]) -> T:
    """Return the fields of a body.

    Raises: HttpError 400 that names the field: unknown, not served, of the wrong type or out of range.
    """
    known = kind.__struct_fields__
    body = _renamed(body, known)
    for name, value in body.items():
        if name in known or name in IGNORED:
            continue
        if value is None or value is False or value in ([], "none", "auto"):
            continue
        if name in REFUSED:
            raise refused(name, f"{name} is not supported: {REFUSED[name]}")
        near = get_close_matches(name[:64], known, 1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise refused(name[:64], f"{name[:64]} is no parameter of this request{hint}")
    try:
        given = {name: body[name] for name in known if name in body}
        return msgspec.convert(_without_nulls(given, kind), kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise HttpError(400, *in_words(error)) from None


def _without_nulls(given: dict[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Leave out fields that are null, if they have a default and null is no value of theirs."""
    return {name: value for name, value in given.items() if value is not None or name not in _defaulted(kind)}


@cache
def _defaulted(kind: type[Struct]) -> frozenset[str]:
    """Return the fields for which null stands for their default, as OpenAI's own clients send it."""
    described = msgspec.inspect.type_info(kind)
    fields = described.fields if isinstance(described, msgspec.inspect.StructType) else ()
    return frozenset(field.name for field in fields if not field.required and not _takes_null(field.type))


def _takes_null(kind: msgspec.inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(each, msgspec.inspect.NoneType | msgspec.inspect.AnyType) for each in kinds)


def _renamed(body: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Give fields our names where they have another one elsewhere; null under one name hides no value."""
    renamed: dict[str, Any] = {}
    for name, value in body.items():
        other = ALIASES.get(name)
        ours = other if other is not None and other in known and name not in known else name
        if value is not None or ours not in renamed:
            renamed[ours] = value
    return renamed
