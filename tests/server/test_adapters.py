"""LoRA adapters are models for clients: their names, their answers, and their vectors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.cli import main
from pyvelo.config import EngineConfig
from scripts.models import lora

from .servers import SETTINGS, Server, Settings

PROMPT = list(range(40, 60))
NEW = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
NAMES = ("demo", "one", "two")


@pytest.fixture(scope="module")
def adapters(tiny_model_f32: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(NAMES[1:], 1):
        path = folder / f"{name}.gguf"
        lora.write_adapter(path, "llama", lora.random_pairs(tiny_model_f32, 4, seed=seed))
        found[name] = (str(path), 2.0)
    return found


@pytest.fixture(scope="module")
def adapted(tiny_model_f32: Path, adapters: dict[str, tuple[str, float]]) -> Iterator[Server]:
    server = Server(Settings(model_names=("demo",)), model=tiny_model_f32, lora=adapters)
    yield server
    server.close()


@pytest.fixture(scope="module")
def texts(tiny_model_f32: Path, adapters: dict[str, tuple[str, float]]) -> dict[str, str]:
    """Return the text of each model after PROMPT, by the engine in this process."""
    with LLM(tiny_model_f32, lora=adapters, **SETTINGS) as llm:
        params = {name: SamplingParams(**NEW, lora="" if name == "demo" else name) for name in NAMES}  # type: ignore[arg-type]
        found = {name: llm.generate([PROMPT], params[name])[0].text for name in NAMES}
    assert len(set(found.values())) == 3
    return found


def test_adapters_are_listed_as_models(adapted: Server) -> None:
    models = adapted.get("/v1/models").json["data"]
    assert [(model["id"], model.get("parent")) for model in models] == [
        ("demo", None),
        ("one", "demo"),
        ("two", "demo"),
    ]
    assert adapted.get("/v1/models/two").json == models[2]
    for path in ("/api/tags", "/api/ps"):
        assert [model["name"] for model in adapted.get(path).json["models"]] == list(NAMES)
    missing = adapted.get("/v1/models/three")
    assert missing.status == 404
    assert "'demo' and 'one' and 'two'" in missing.error["message"]


@pytest.mark.parametrize("name", NAMES)
def test_the_model_of_a_request_selects_the_adapter(
    adapted: Server, texts: dict[str, str], name: str
) -> None:
    answer = adapted.ask("/v1/completions", {"model": name, "prompt": PROMPT, **NEW})
    assert (answer["model"], answer["choices"][0]["text"]) == (name, texts[name])
    session = adapted.ask("/v1/sessions", {"model": name, "prompt": PROMPT})["id"]
    answer = adapted.ask(f"/v1/sessions/{session}/generate", NEW)
    assert answer["choices"][0]["text"] == texts[name]


def test_chats_of_all_kinds_select_the_adapter(adapted: Server) -> None:
    messages = [{"role": "user", "content": "Tell me a story"}]
    template = {"chat_template": "{{ messages[0].content }}"}
    said = {}
    for name in NAMES:
        sampling = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 12}
        asked = adapted.ask("/v1/chat/completions", {**sampling, **template})
        said[name] = asked["choices"][0]["message"]["content"]
    assert len(set(said.values())) == 3


def test_vectors_of_an_adapter(adapted: Server) -> None:
    body = {"input": ["Hello", "world"], "pooling": "mean"}
    found = {}
    for name in NAMES:
        answer = adapted.ask("/v1/embeddings", {"model": name, **body})
        assert answer["model"] == name
        found[name] = np.array([each["embedding"] for each in answer["data"]])
    assert not np.allclose(found["demo"], found["one"])
    assert not np.allclose(found["two"], found["one"])


def test_vectors_for_ollama(server: Server) -> None:
    texts = ["Hello", "Once upon a time"]
    embed = partial(server.ask, "/v1/embeddings")
    expected = [each["embedding"] for each in embed({"input": texts, "pooling": "last"})["data"]]
    answer = server.ask("/api/embed", {"model": "demo:latest", "input": texts})
    assert np.allclose(answer["embeddings"], expected)
    assert answer["prompt_eval_count"] > 2
    one = server.ask("/api/embed", {"model": "demo", "input": "Hello"})
    assert np.allclose(one["embeddings"], expected[:1])
    old = server.ask("/api/embeddings", {"model": "demo", "prompt": "Hello"})
    assert np.allclose(old["embedding"], expected[0])
    assert server.post("/api/embed", {"model": "other", "input": "Hello"}).status == 404
    assert server.post("/api/embed", {"model": "demo", "input": texts, "dimensions": 3}).status == 400


def test_the_option_names_adapters_by_their_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[EngineConfig] = []

    class Serve:
        def __init__(self, config: EngineConfig, settings: object, **others: object) -> None:
            seen.append(config)

        def run(self) -> None:
            pass

    monkeypatch.setattr("pyvelo.server.run.Serve", Serve)
    for options, code in ((["a/x.gguf:0.5", "b/y.gguf"], 0), (["a/x.gguf", "b/x.gguf"], 2)):
        loras = [word for option in options for word in ("--lora", option)]
        with pytest.raises(SystemExit) as end:
            main(["serve", "--quiet", *loras])
        assert end.value.code == code
    assert seen[0].lora == {"x": ("a/x.gguf", 0.5), "y": ("b/y.gguf", 1.0)}
    assert "two files have the same name" in capsys.readouterr().err
