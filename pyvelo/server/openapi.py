"""Description of the interface, made of the types of the bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from pyvelo._version import __version__
from pyvelo.server import anthropic, ollama, ollama_embed, responses, schemas, sessions

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
    "/api/chat": (ollama.OllamaChatRequest, "Answer a conversation, as Ollama."),
    "/api/generate": (ollama.OllamaGenerateRequest, "Answer a prompt, as Ollama."),
    "/api/embed": (ollama_embed.OllamaEmbedRequest, "Return the vectors of texts, as Ollama."),
    "/api/embeddings": (ollama_embed.OllamaEmbeddingRequest, "Return the vector of a text, as Ollama."),
    "/api/show": (ollama.OllamaShowRequest, "Return properties of the model, as Ollama."),
    "/v1/sessions": (sessions.SessionRequest, "Open a session."),
    "/v1/sessions/{id}/append": (sessions.SessionAppendRequest, "Append text, tokens or messages."),
    "/v1/sessions/{id}/generate": (sessions.SessionGenerateRequest, "Continue a session with an answer."),
    "/v1/sessions/{id}/fork": (sessions.SessionForkRequest, "Open sessions that share all blocks."),
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
    "/api/tags": "The model, as Ollama.",
    "/api/ps": "The model that is loaded, as Ollama.",
    "/api/version": "The version of PyVelo, as Ollama.",
    "/v1/sessions": "The sessions of the key.",
    "/v1/sessions/{id}": "A session.",
    "/openapi.json": "This description.",
}
_KINDS = {"/metrics": "text/plain", "/v1/blocks/stream": "text/event-stream"}
"""Types of answers that are no JSON."""
_DELETES = {"/v1/sessions/{id}": "Close a session.", "/v1/responses/{id}": "Remove a stored response."}
_PATH_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def openapi() -> dict[str, Any]:
    """Return the interface as OpenAPI 3.1."""
    kinds = [kind for kind, _ in _POSTS.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    error = {"description": "What was wrong.", "content": _json({"$ref": "#/components/schemas/Error"})}
    answer = {"description": "The answer.", "content": _json({"type": "object"})}
    paths: dict[str, Any] = {
        path: {"parameters": [_PATH_ID]} if "{id}" in path else {} for path in (*_POSTS, *_GETS, *_DELETES)
    }
    for path, (kind, text) in _POSTS.items():
        body = {"required": True, "content": _json({"$ref": f"#/components/schemas/{kind.__name__}"})}
        responses = {"200": answer, "default": error}
        paths[path]["post"] = {"summary": text, "requestBody": body, "responses": responses}
    for path, text in _DELETES.items():
        paths[path]["delete"] = {"summary": text, "responses": {"200": answer, "default": error}}
    for path, text in _GETS.items():
        content = {_KINDS[path]: {}} if path in _KINDS else _json({"type": "object"})
        found = {"200": {"description": text, "content": content}, "default": error}
        paths[path]["get"] = {"summary": text, "responses": found}
    return {
        "openapi": "3.1.0",
        "info": {"title": "PyVelo", "version": __version__},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
