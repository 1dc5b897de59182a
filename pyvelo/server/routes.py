"""Routes of the endpoints, and the search for the route of a path."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyvelo.server import (
    anthropic,
    block_stream,
    chat,
    completions,
    embeddings,
    kv_store,
    llama_server,
    ollama,
    ollama_embed,
    responses,
    sessions,
    tokens,
)
from pyvelo.server.anthropic_form import anthropic_error
from pyvelo.server.errors import HttpError, openai_error
from pyvelo.server.ollama import ollama_error

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["ENDPOINTS", "Read", "Router", "Work"]

Reading = Callable[["Serving", "Exchange"], Awaitable[None]]
Generating = Callable[["Serving", "Exchange", "Ticket", dict[str, Any]], Awaitable["RequestStream | None"]]


@dataclass(frozen=True)
class Read:
    """Handler that reads no body and takes no admission."""

    call: Reading
    error_body: Callable[[HttpError], Any] = openai_error


@dataclass(frozen=True)
class Work:
    """Handler of a body, admitted and cancelled with its client.

    optional: a request without a body takes the defaults of all fields.
    """

    call: Generating
    error_body: Callable[[HttpError], Any] = openai_error
    optional: bool = False


ENDPOINTS: dict[str, Mapping[str, Read | Work]] = {
    "/v1/blocks/stream": {"GET": Read(block_stream.watch)},
    "/tokenize": {"POST": Work(tokens.tokenize)},
    "/detokenize": {"POST": Work(tokens.detokenize)},
    "/v1/completions": {"POST": Work(completions.complete)},
    "/v1/chat/completions": {"POST": Work(chat.chat)},
    "/v1/embeddings": {"POST": Work(embeddings.embed)},
    "/v1/responses": {"POST": Work(responses.create_response)},
    "/v1/responses/{id}": {"GET": Read(responses.show_response), "DELETE": Read(responses.delete_response)},
    "/v1/sessions": {"GET": Read(sessions.list_all), "POST": Work(sessions.create, optional=True)},
    "/v1/sessions/{id}": {"GET": Read(sessions.show), "DELETE": Read(sessions.delete)},
    "/v1/sessions/{id}/append": {"POST": Work(sessions.append)},
    "/v1/sessions/{id}/generate": {"POST": Work(sessions.generate, optional=True)},
    "/v1/sessions/{id}/fork": {"POST": Work(sessions.fork, optional=True)},
    "/v1/sessions/{id}/save": {"POST": Work(sessions.save)},
    "/v1/saved_sessions/{id}": {"DELETE": Read(kv_store.delete)},
    "/v1/kv_store": {"GET": Read(kv_store.show), "DELETE": Read(kv_store.purge)},
    "/v1/messages": {"POST": Work(anthropic.create_message, anthropic_error)},
    "/v1/messages/count_tokens": {"POST": Work(anthropic.count_tokens, anthropic_error)},
    "/completion": {"POST": Work(llama_server.complete)},
    "/apply-template": {"POST": Work(llama_server.apply_template)},
    "/props": {"GET": Read(llama_server.props)},
    "/v1/chat/completions/input_tokens": {"POST": Work(llama_server.count_tokens)},
    "/api/chat": {"POST": Work(ollama.chat, ollama_error)},
    "/api/generate": {"POST": Work(ollama.generate, ollama_error)},
    "/api/embed": {"POST": Work(ollama_embed.embed, ollama_error)},
    "/api/embeddings": {"POST": Work(ollama_embed.embed_one, ollama_error)},
    "/api/ps": {"GET": Read(ollama.running, ollama_error)},
    "/api/show": {"POST": Work(ollama.show, ollama_error)},
    "/api/tags": {"GET": Read(ollama.tags, ollama_error)},
    "/api/version": {"GET": Read(ollama.version, ollama_error)},
}
"""Handlers by pattern and method; {id} stands for one part of a path."""


def _part(pattern: str) -> str:
    """Return the expression of {id}; names of models may have slashes."""
    return "(.{1,256})" if pattern.startswith("/v1/models/") else "([^/]{1,128})"


class Router:
    """Search for the pattern of a path.

    Args:
        patterns: of all routes.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._exact = {pattern for pattern in patterns if "{id}" not in pattern}
        self._with_id = [
            (re.compile(re.escape(pattern).replace(r"\{id\}", _part(pattern))), pattern)
            for pattern in patterns
            if "{id}" in pattern
        ]

    def __call__(self, path: str) -> tuple[str, str]:
        """Return the pattern of a path, with or without /v1, and the part at its {id}; "" if unknown."""
        for whole in (path, f"/v1{path}"):
            if whole in self._exact:
                return whole, ""
            for regex, pattern in self._with_id:
                if match := regex.fullmatch(whole):
                    return pattern, match[1]
        return "", ""
