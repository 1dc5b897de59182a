"""/api/embed and /api/embeddings, as Ollama's clients call them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from pyvelo.engine.embedding import NO_POOLING
from pyvelo.server.embeddings import vectors_of
from pyvelo.server.ollama import check_ollama_model
from pyvelo.server.schemas import MAX_PROMPTS, convert

if TYPE_CHECKING:
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["embed", "embed_one"]


class OllamaEmbedRequest(Struct, kw_only=True):
    model: str
    input: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
    dimensions: int | None = None
    truncate: bool | None = None
    options: dict[str, Any] | None = None


class OllamaEmbeddingRequest(Struct, kw_only=True):
    model: str
    prompt: str
    options: dict[str, Any] | None = None


async def embed(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the vectors of texts. A text that is too long is refused, as if `truncate` were false."""
    begin = time.perf_counter()
    request = convert(body, OllamaEmbedRequest)
    adapter = check_ollama_model(serving, request.model)
    texts = [request.input] if isinstance(request.input, str) else request.input
    pooling = _pooling(serving)
    vectors, n_tokens = await vectors_of(serving, ticket, texts, adapter, request.dimensions, pooling)
    await exchange.answer(
        {
            "model": request.model,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": round(1e9 * (time.perf_counter() - begin)),
            "load_duration": 0,
            "prompt_eval_count": n_tokens,
        }
    )


async def embed_one(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the vector of a text, as the older endpoint does."""
    request = convert(body, OllamaEmbeddingRequest)
    adapter = check_ollama_model(serving, request.model)
    vectors, _ = await vectors_of(serving, ticket, [request.prompt], adapter, pooling=_pooling(serving))
    await exchange.answer({"embedding": vectors[0].tolist()})


def _pooling(serving: Serving) -> str | None:
    """Return None if the model names its pooling; else "last", as in Ollama."""
    return "last" if serving.engine.model.info.pooling == NO_POOLING else None
