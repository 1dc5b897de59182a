"""Ollama's endpoints through its client, against LLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ollama
import pytest

from pyvelo import LLM, SamplingParams, __version__
from pyvelo.chat.template import BUILT_IN, ChatTemplate
from pyvelo.errors import RequestError
from pyvelo.server.ollama_form import OllamaForm

from .servers import Server

USER: Any = {"role": "user", "content": "What is a KV cache?"}
OPTIONS = {"temperature": 0, "num_predict": 30, "num_ctx": 4096, "repeat_last_n": 64}
PARAMS = SamplingParams(max_tokens=30, temperature=0, top_p=0.95)


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    found = ollama.Client(host=server.url)
    yield found
    found._client.close()


@pytest.fixture
def chatml(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a template that shows system messages, which the server has now."""
    monkeypatch.setattr(server.serving.chats, "_known", {"": ChatTemplate(BUILT_IN["chatml"])})
    return "chatml"


def test_chat(client: ollama.Client, oracle: LLM) -> None:
    expected = oracle.chat([USER], PARAMS)
    answer = client.chat("demo", [USER], options=OPTIONS, keep_alive="5m")
    assert answer.message.content == expected.text
    assert answer.message.role == "assistant"
    assert answer.done is True
    assert answer.done_reason == expected.finish_reason
    assert answer.prompt_eval_count == len(expected.prompt_token_ids)
    assert answer.eval_count == len(expected.token_ids)
    times = (answer.prompt_eval_duration, answer.eval_duration)
    assert answer.total_duration == pytest.approx(sum(each or 0 for each in times), abs=2)
    assert (answer.total_duration or 0) > 1000


def test_lines_of_a_chat(client: ollama.Client, oracle: LLM, server: Server) -> None:
    expected = oracle.chat([USER], PARAMS)
    parts = list(client.chat("demo:latest", [USER], options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == expected.text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == len(expected.token_ids)
    assert parts[0].model == "demo:latest"
    raw = server.post("/api/chat", {"model": "demo", "messages": [USER], "options": OPTIONS})
    assert raw.headers["content-type"] == "application/x-ndjson"
    assert raw.data.count(b"\n") == len(raw.data.splitlines())


def test_an_error_in_a_stream(client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OllamaForm, "end", broken)
    with pytest.raises(ollama.ResponseError, match="it broke"):
        list(client.chat("demo", [USER], options=OPTIONS, stream=True))


def broken(*_: Any) -> bytes:
    raise RequestError("it broke")


def test_generate(client: ollama.Client, oracle: LLM, chatml: str) -> None:
    system = {"role": "system", "content": "Be short."}
    expected = oracle.chat([system, USER], PARAMS, chat_template=chatml)
    answer = client.generate("demo", USER["content"], system="Be short.", options=OPTIONS)
    assert answer.response == expected.text
    assert answer.prompt_eval_count == len(expected.prompt_token_ids)
    text = "".join(
        part.response or ""
        for part in client.generate("demo", USER["content"], system="Be short.", options=OPTIONS, stream=True)
    )
    assert text == expected.text


def test_generate_raw(client: ollama.Client, oracle: LLM) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n"
    tokens = oracle.tokenize(prompt, parse_special=True)
    expected = oracle.generate([tokens], PARAMS)[0]
    answer = client.generate("demo", prompt, raw=True, options=OPTIONS)
    assert answer.response == expected.text
    assert answer.prompt_eval_count == len(tokens)


def test_formats_and_options(client: ollama.Client, oracle: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
    expected = oracle.chat([USER], replace(PARAMS, json_schema=json.dumps(schema)))
    assert client.chat("demo", [USER], format=schema, options=OPTIONS).message.content == expected.text
    expected = oracle.chat([USER], replace(PARAMS, json_schema='{"type": "object"}'))
    assert client.chat("demo", [USER], format="json", options=OPTIONS).message.content == expected.text
    given = {"top_k": 50, "top_p": 0.99, "min_p": 0.001, "seed": 7, "stop": ["~"], "repeat_penalty": 1.1}
    given |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "num_predict": 20, "temperature": 3.0}
    params = SamplingParams(
        max_tokens=20,
        temperature=3.0,
        top_k=50,
        top_p=0.99,
        min_p=0.001,
        seed=7,
        stop=["~"],
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
    )
    answer = client.chat("demo", [USER], options=given, think=False)
    assert answer.message.content == oracle.chat([USER], params).text
    expected = oracle.chat([USER], replace(PARAMS, max_tokens=None, stop=["e"]))
    answer = client.chat("demo", [USER], options={"temperature": 0, "num_predict": -1, "stop": "e"})
    assert answer.message.content == expected.text
    expected = oracle.chat([USER], replace(PARAMS, max_tokens=None))
    answer = client.chat("demo", [USER], options={"temperature": 0, "num_predict": -1, "seed": -1})
    assert answer.message.content == expected.text


def test_requests_without_text_load_the_model(client: ollama.Client) -> None:
    assert client.generate("demo").done_reason == "load"
    assert client.chat("demo", []).done_reason == "load"


def test_models_and_version(client: ollama.Client, server: Server) -> None:
    (model,) = client.list().models
    assert model.model == "demo"
    assert model.size is not None
    assert model.size > 1000
    assert model.details is not None
    assert model.details.format == "gguf"
    shown = client.show("demo")
    assert shown.details == model.details
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == model.details.family
    assert server.get("/api/version").json == {"version": __version__}


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages[0].images"),
    ("chat", {"messages": [{"role": "developer", "content": "a"}]}, "messages[0].role='developer'"),
    (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ("chat", {"messages": [{"role": "tool", "content": "a", "tool_name": 1}]}, "messages[0].tool_name"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat", {"messages": [USER], "tools": [{}]}, "tools"),
    ("chat", {"messages": [USER], "think": 5}, "think"),
    ("chat", {"messages": [USER], "format": "xml"}, "format='xml'"),
    ("chat", {"messages": [USER], "options": {"mirostat": 1}}, "options.mirostat"),
    ("chat", {"messages": [USER], "options": {"typical_p": 0.5}}, "options.typical_p"),
    ("chat", {"messages": [USER], "options": {"temprature": 0.5}}, "did you mean temperature"),
    ("chat", {"messages": [USER], "options": {"top_k": "a"}}, "options.top_k"),
    ("chat", {"messages": [USER], "options": {"num_predict": 0}}, "options.num_predict"),
    ("chat", {"messages": [USER], "options": {"repeat_penalty": 2, "repeat_last_n": 9}}, "repeat_last_n=9"),
    ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("generate", {"prompt": "a", "context": [1]}, "context"),
    ("generate", {"prompt": "a", "images": ["aa"]}, "images"),
    ("generate", {"prompt": "a", "template": "b"}, "template"),
    ("generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
    ("generate", {"prompt": 5}, "prompt"),
    ("show", {"model": ""}, "model"),
]


@pytest.mark.parametrize(("path", "body", "named"), CASES, ids=[named for *_, named in CASES])
def test_wrong_input_names_the_field(server: Server, path: str, body: dict[str, Any], named: str) -> None:
    answer = server.post(f"/api/{path}", {"model": "demo", **body})
    assert answer.status == 400, answer.data
    assert named in answer.error


def test_the_client_knows_the_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="'other'") as raised:
        client.chat("other", [USER])
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="the prompt"):
        list(client.chat("demo", [{"role": "user", "content": "long " * 600}], stream=True))
