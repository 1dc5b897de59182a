"""Description of the interface, made of the types of the bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from pyvelo import __version__
from pyvelo.server import schemas

__all__ = ["openapi"]

_POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (schemas.CompletionRequest, "Continue a prompt."),
    "/v1/chat/completions": (schemas.ChatRequest, "Answer a conversation."),
    "/v1/embeddings": (schemas.EmbeddingRequest, "Return the vectors of texts."),
    "/tokenize": (schemas.TokenizeRequest, "Return the tokens of a text or of a conversation."),
    "/detokenize": (schemas.DetokenizeRequest, "Return the text of tokens."),
}
_GETS = {
    "/health": "Whether requests are taken.",
    "/metrics": "Metrics for Prometheus.",
    "/version": "The version of PyVelo.",
    "/v1/models": "The model.",
    "/tokenizer_info": "Special tokens and chat template.",
    "/openapi.json": "This description.",
}


def openapi() -> dict[str, Any]:
    """Return the interface as OpenAPI 3.1."""
    kinds = [kind for kind, _ in _POSTS.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    error = {"description": "What was wrong.", "content": _json({"$ref": "#/components/schemas/Error"})}
    answer = {"description": "The answer.", "content": _json({"type": "object"})}
    paths: dict[str, Any] = {}
    for path, (kind, text) in _POSTS.items():
        body = {"required": True, "content": _json({"$ref": f"#/components/schemas/{kind.__name__}"})}
        responses = {"200": answer, "default": error}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": responses}}
    for path, text in _GETS.items():
        content = {"text/plain": {}} if path == "/metrics" else _json({"type": "object"})
        found = {"200": {"description": text, "content": content}, "default": error}
        paths[path] = {"get": {"summary": text, "responses": found}}
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
