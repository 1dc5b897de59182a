"""A server of a model that embeds texts and generates none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyvelo import LLM
from pyvelo.server.settings import Settings
from scripts.models._shapes import Shape
from scripts.models.make import write_model

from .servers import Server

TEXTS = ["page memory", "river"]
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "encoder.gguf"
    shape = Shape("bert", layers=2, embd=128, heads=2, kv_heads=2, head_dim=64, ctx=128, pooling="mean")
    write_model(shape, path)
    return path


@pytest.fixture(scope="module")
def embedding(encoder: Path) -> Iterator[Server]:
    server = Server(Settings(), model=encoder)
    yield server
    server.close()


def test_vectors(embedding: Server, encoder: Path) -> None:
    with LLM(encoder) as llm:
        expected = llm.embed(TEXTS)
        ids = [llm.tokenize(text) for text in TEXTS]
    for given in (TEXTS, ids):
        answer = embedding.ask("/v1/embeddings", {"input": given})
        found = [each["embedding"] for each in answer["data"]]
        assert np.allclose(found, expected, atol=1e-5)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_reading(embedding: Server) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/props", "/tokenizer_info", "/api/tags", "/api/ps"):
        assert embedding.get(path).status == 200, path
    assert embedding.ask("/tokenize", {"prompt": "river"})["count"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/completion", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        (
            "/v1/messages",
            {"model": "encoder", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
        ),
        ("/v1/sessions", {"prompt": "a"}),
        ("/api/generate", {"model": "encoder", "prompt": "a"}),
    ],
)
def test_what_it_cannot(embedding: Server, path: str, body: dict[str, Any]) -> None:
    answer = embedding.post(path, body)
    assert answer.status == 400
    assert "embeds texts" in str(answer.json)
