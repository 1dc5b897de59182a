"""Conversion of the fields of a request to sampling parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pyvelo.sampling import SamplingParams
from pyvelo.server.auth import Tenant
from pyvelo.server.errors import refused
from pyvelo.server.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
    StructuredOutputs,
)

__all__ = ["chat_params", "completion_params", "request_timeout"]

_DEFAULT = SamplingParams()

_SAME = (
    *(
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "top_k",
        "min_p",
        "repetition_penalty",
    ),
    *(
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "prompt_logprobs",
        "n",
        "lora",
    ),
)
"""Fields with the same name and meaning; null is the default."""


def completion_params(
    request: CompletionRequest, tenant: Tenant, timeout: float | None, default: SamplingParams = _DEFAULT
) -> SamplingParams:
    """Return the parameters of a completion; what the request leaves out comes from `default`.

    Raises: HttpError, RequestError if a value cannot be served.
    """
    if request.suffix:
        raise refused("suffix", "suffix is not supported: the model continues the prompt")
    wanted = _shared(request, tenant, timeout)
    # one token is generated, and not returned
    wanted["max_tokens"] = None if request.max_tokens is None else max(1, request.max_tokens)
    if request.best_of is not None and request.best_of != (request.n or 1):
        if request.stream:
            raise refused("best_of", "best_of: the best samples are known at the end, so they cannot stream")
        wanted["best_of"] = request.best_of
    wanted |= {"echo": request.echo, "logprobs": request.logprobs}
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        wanted["prompt_logprobs"] = request.logprobs
    return replace(default, **wanted)


def chat_params(
    request: ChatRequest, default: SamplingParams, tenant: Tenant, timeout: float | None
) -> SamplingParams:
    """Return the parameters of a chat; what the request leaves out comes from `default`.

    Raises: HttpError, RequestError if a value cannot be served.
    """
    wanted = _shared(request, tenant, timeout)
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if most is not None:
        wanted["max_tokens"] = most
    if request.logprobs:
        wanted["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs is not None:
        raise refused("top_logprobs", "top_logprobs needs logprobs: true")
    return replace(default, **wanted)


def request_timeout(request: GenerationFields, header: str) -> float | None:
    """Return the seconds of the field `timeout`, else of the header Request-Timeout-Ms; None: no limit."""
    if request.timeout is not None or not header:
        return request.timeout
    if not re.fullmatch(r"[0-9]{1,12}", header):
        raise refused(
            "Request-Timeout-Ms", f"Request-Timeout-Ms: {header[:64]!r} is no number of milliseconds"
        )
    return int(header) / 1000


def _shared(request: GenerationFields, tenant: Tenant, timeout: float | None) -> dict[str, Any]:
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options", "stream_options needs stream: true")
    if request.prompt_logprobs is not None and request.stream:
        raise refused("prompt_logprobs", "prompt_logprobs cannot stream")
    wanted = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.seed is not None:
        wanted["seed"] = request.seed % (1 << 64)  # clients send negative ones, too
    if request.logit_bias:
        wanted["logit_bias"] = {_token(name): bias for name, bias in request.logit_bias.items()}
    wanted["cache_salt"] = tenant.salt(request.cache_salt or "")
    wanted["priority"] = (
        tenant.priority if request.priority is None else max(tenant.priority, request.priority)
    )
    if timeout is not None:
        wanted["timeout"] = timeout
    return wanted | _structure(request)


def _token(name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", name):
        raise refused("logit_bias", f"logit_bias: {name[:64]!r} is no token id")
    return int(name)


def _structure(request: GenerationFields) -> dict[str, Any]:
    """Return the grammar that the answer follows; raise HttpError if there are two."""
    makers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "guided_json": _json,
        "guided_regex": lambda regex: {"regex": regex},
        "guided_grammar": lambda grammar: {"grammar": grammar},
        "guided_choice": _choice,
        "response_format": _format,
        "structured_outputs": _outputs,
    }
    given = {name: getattr(request, name) for name in makers}
    made = {name: makers[name](value) for name, value in given.items() if value is not None}
    found = {name: structure for name, structure in made.items() if structure}
    if len(found) > 1:
        raise refused(list(found)[1], f"{' and '.join(found)}: an answer can follow only one")
    return next(iter(found.values()), None) or {}


def _format(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "text":
        return {}
    if given.type == "json_object":
        return _json(given.schema or {"type": "object"})
    if given.type == "json_schema":
        schema = given.json_schema.schema if given.json_schema is not None else None
        if schema is None:
            raise refused("response_format", "response_format.json_schema.schema is missing")
        return _json(schema)
    raise refused(
        "response_format", f"response_format.type={given.type[:64]!r}: give text, json_object or json_schema"
    )


def _outputs(given: StructuredOutputs) -> dict[str, Any]:
    found = [
        *([_json(given.json)] if given.json is not None else ()),
        *([{"regex": given.regex}] if given.regex is not None else ()),
        *([{"grammar": given.grammar}] if given.grammar is not None else ()),
        *([_choice(given.choice)] if given.choice is not None else ()),
        *([_json({"type": "object"})] if given.json_object else ()),
    ]
    if len(found) > 1:
        raise refused("structured_outputs", "structured_outputs: an answer can follow only one")
    return found[0] if found else {}


def _json(schema: Any) -> dict[str, Any]:
    return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}


def _choice(texts: Sequence[str]) -> dict[str, Any]:
    """Return a grammar of alternatives, each a string of Lark."""
    return {"grammar": "start: " + " | ".join(json.dumps(text) for text in texts)}
