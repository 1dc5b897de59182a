"""Description of the interface, made of the types of the bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from pyvelo._version import __version__
from pyvelo.server import anthropic, llama_server, ollama, ollama_embed, responses, schemas, sessions
from pyvelo.server.routes import ENDPOINTS, Work

__all__ = ["openapi"]

_POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (schemas.CompletionRequest, "Continue a prompt."),
    "/v1/chat/completions": (schemas.ChatRequest, "Answer a conversation."),
    "/v1/embeddings": (schemas.EmbeddingRequest, "Return the vectors of texts."),
    "/tokenize": (schemas.TokenizeRequest, "Return the tokens of a text or of a conversation."),
    "/detokenize": (schemas.DetokenizeRequest, "Return the text of tokens."),
    "/v1/messages": (anthropic.AnthropicRequest, "Answer a conversation, as Anthropic's API."),
    "/v1/messages/count_tokens": (
        anthropic.AnthropicPrompt,
        "Count the tokens of a conversation.",
    ),
    "/v1/responses": (responses.ResponsesRequest, "Answer a conversation, or the next turn of one."),
    "/completion": (llama_server.LlamaCompletion, "Continue a prompt, as llama-server."),
    "/apply-template": (schemas.ChatRequest, "Return the prompt of a conversation, as llama-server."),
    "/v1/chat/completions/input_tokens": (schemas.ChatRequest, "Count the tokens of a conversation."),
    "/api/chat": (ollama.OllamaChatRequest, "Answer a conversation, as Ollama."),
    "/api/generate": (ollama.OllamaGenerateRequest, "Answer a prompt, as Ollama."),
    "/api/embed": (ollama_embed.OllamaEmbedRequest, "Return the vectors of texts, as Ollama."),
    "/api/embeddings": (ollama_embed.OllamaEmbeddingRequest, "Return the vector of a text, as Ollama."),
    "/api/show": (ollama.OllamaShowRequest, "Return properties of the model, as Ollama."),
    "/v1/sessions": (sessions.SessionRequest, "Open a session."),
    "/v1/sessions/{id}/append": (sessions.SessionAppendRequest, "Append text, tokens or messages."),
    "/v1/sessions/{id}/generate": (sessions.SessionGenerateRequest, "Continue a session with an answer."),
    "/v1/sessions/{id}/fork": (sessions.SessionForkRequest, "Open sessions that share all blocks."),
    "/v1/sessions/{id}/save": (sessions.SessionSaveRequest, "Save a session in the KV store."),
}
_GETS = {
    "/health": "Whether requests are taken.",
    "/metrics": "Metrics for Prometheus.",
    "/version": "The version of PyVelo.",
    "/v1/models": "The model.",
    "/v1/models/{id}": "The model, if it has this name.",
    "/tokenizer_info": "Special tokens and chat template.",
    "/v1/blocks/stream": "The block map and its changes, as server-sent events.",
    "/v1/responses/{id}": "A stored response.",
    "/props": "Properties of the model, as llama-server.",
    "/api/tags": "The model, as Ollama.",
    "/api/ps": "The model that is loaded, as Ollama.",
    "/api/version": "The version of PyVelo, as Ollama.",
    "/v1/sessions": "The sessions of the key.",
    "/v1/sessions/{id}": "A session.",
    "/v1/kv_store": "The size of the KV store.",
    "/openapi.json": "This description.",
}
_KINDS = {"/metrics": "text/plain", "/v1/blocks/stream": "text/event-stream"}
"""Types of answers that are no JSON."""
_EVENTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/completion",
    "/v1/messages",
    "/v1/responses",
    "/v1/sessions/{id}/generate",
)
_STREAMS = dict.fromkeys(_EVENTS, "text/event-stream") | dict.fromkeys(
    ("/api/chat", "/api/generate"), "application/x-ndjson"
)
"""Types of answers that can also be sent as a stream."""
_MEANINGS = {
    400: "A field is wrong, or is not supported.",
    401: "The API key is missing or unknown.",
    403: "A page of another origin asked, or the server has no KV store.",
    404: "There is no such model, session or response.",
    408: "The body did not arrive in time.",
    409: "The session is answering, or blocks are recorded to a file.",
    413: "The body is too long.",
    415: "The body is compressed.",
    429: "The key has reached its limit.",
    503: "The queue is full, memory is short, or the server ends.",
    504: "The time of the request was up before it ran.",
}
_DELETES = {
    "/v1/sessions/{id}": "Close a session.",
    "/v1/responses/{id}": "Remove a stored response.",
    "/v1/saved_sessions/{id}": "Delete a session that the key saved.",
    "/v1/kv_store": "Delete what the KV store has of the key; of a server without keys, all.",
}
_TIMEOUT = {
    "name": "Request-Timeout-Ms",
    "in": "header",
    "description": "Time of the request, the queue included, unless the body has one.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,12}$"},
}
_PATH_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def openapi() -> dict[str, Any]:
    """Return the interface as OpenAPI 3.1."""
    kinds = [kind for kind, _ in _POSTS.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:  # an unknown name ends in an error
        fields = components[kind.__name__]
        fields["properties"] = dict.fromkeys(sorted(schemas.IGNORED), _IGNORED) | fields["properties"]
        fields["additionalProperties"] = False
    paths: dict[str, Any] = {
        path: {"parameters": [_PATH_ID]} if "{id}" in path else {} for path in (*_POSTS, *_GETS, *_DELETES)
    }
    for path, (kind, text) in _POSTS.items():
        handler = ENDPOINTS[path]["POST"]
        body = {
            "required": not (isinstance(handler, Work) and handler.optional),
            "content": _json({"$ref": f"#/components/schemas/{kind.__name__}"}),
        }
        answers = _answers(path, "The answer.", _statuses(path, with_body=True))
        described = {"summary": text, "requestBody": body, "responses": answers}
        paths[path]["post"] = described | ({"parameters": [_TIMEOUT]} if path in _STREAMS else {})
    for path, text in _DELETES.items():
        paths[path]["delete"] = {"summary": text, "responses": _answers(path, text, _statuses(path))}
    for path, text in _GETS.items():
        paths[path]["get"] = {"summary": text, "responses": _answers(path, text, _statuses(path))}
    return {
        "openapi": "3.1.0",
        "info": {"title": "PyVelo", "version": __version__},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, **_ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _statuses(path: str, with_body: bool = False) -> list[int]:
    """Return the statuses of the errors of a path."""
    if path == "/health":
        return [503]
    found = {401, 403}
    if "{id}" in path:
        found |= {404}
    if path == "/v1/blocks/stream":
        found |= {404, 409, 503}
    if path.startswith("/v1/sessions/"):
        found |= {409, 503}
    if path in ("/v1/kv_store", "/v1/saved_sessions/{id}"):
        found |= {503}
    if with_body:
        found |= {400, 404, 408, 413, 415, 429, 503, 504}
    return sorted(found)


def _answers(path: str, text: str, statuses: list[int]) -> dict[str, Any]:
    """Return the answers of a path: as a whole, as a stream if that can be, and errors."""
    kind: Any = ["object", "array"] if path == "/completion" else "object"  # a list for a list of prompts
    content = {_KINDS[path]: {}} if path in _KINDS else _json({"type": kind})
    if path in _STREAMS:
        content[_STREAMS[path]] = {}
    found = {"200": {"description": text, "content": content}}
    for status in statuses:
        found[str(status)] = {"description": _MEANINGS[status], "content": _json(_error_of(path))}
    return found


def _error_of(path: str) -> dict[str, Any]:
    """Return the schema of the errors of a path, by its dialect."""
    if path == "/health":
        return {"type": "object"}
    dialects = {"/v1/messages": "AnthropicError", "/api/": "OllamaError"}
    names = [name for start, name in dialects.items() if path.startswith(start)]
    return {"$ref": f"#/components/schemas/{names[0] if names else 'Error'}"}


def _described(*names: str, **optional: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with texts, and other properties that may be null."""
    texts = {name: {"type": "string"} for name in names}
    return {"type": "object", "required": list(names), "properties": texts | optional}


_IGNORED = {"description": "Accepted and ignored."}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERRORS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": _described("message", "type", param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)},
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": _described("type", "message")},
    },
    "OllamaError": _described("error"),
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
