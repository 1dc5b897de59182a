"""A server with a KV store: saved sessions, what belongs to a key, and metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyvelo.server.auth import read_keys
from pyvelo.server.settings import Settings
from pyvelo.store import opening

from .servers import Server

GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = [3 + (7 * i) % 250 for i in range(200)]
MESSAGES = [{"role": "user", "content": "Tell me a long story of a cache. " * 8}]


@pytest.fixture(autouse=True)
def _slow_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loading pay, as it does with larger models."""
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda *_: 5.0)


class Lives:
    """Servers on one store, one after the other."""

    def __init__(self, model: Path, store: Path) -> None:
        self._model, self._store = model, store
        self.server: Server | None = None

    def begin(self, *keys: str, wait: bool = True) -> Server:
        """End the server and start another one."""
        self.end()
        settings = Settings(keys=read_keys(None, keys)) if keys else Settings()
        self.server = Server(settings, model=self._model, kv_store=self._store)
        persistence = self.server.serving.engine.persistence
        assert persistence is not None
        assert not wait or persistence.identity
        return self.server

    def end(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


@pytest.fixture
def lives(tiny_model_f32: Path, tmp_path: Path) -> Iterator[Lives]:
    found = Lives(tiny_model_f32, tmp_path / "kv")
    yield found
    found.end()


class Client:
    """A client with a key, which has no connection between two requests."""

    def __init__(self, server: Server, key: str = "any") -> None:
        self.url, self.headers = server.url, {"authorization": f"Bearer {key}"}

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, self.url + path, json=body, headers=self.headers, timeout=60)


def answered(client: Client, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    answer = client.request(method, path, body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("begin", [{"prompt": PROMPT}, {"messages": MESSAGES}], ids=["prompt", "messages"])
def test_a_session_goes_on_in_another_server(lives: Lives, begin: dict[str, Any]) -> None:
    client = Client(lives.begin())
    name = answered(client, "POST", "/v1/sessions", begin)["id"]
    more = {"messages": MESSAGES} if "messages" in begin else {"token_ids": [7, 8, 9]}
    answered(client, "POST", f"/v1/sessions/{name}/generate", GREEDY)
    saved = answered(client, "POST", f"/v1/sessions/{name}/save", {"name": "mine"})
    assert (saved["id"], saved["saved"]) == (name, "mine")
    expected = [answered(client, "POST", f"/v1/sessions/{name}/append", more)["n_tokens"]]
    expected.append(answered(client, "POST", f"/v1/sessions/{name}/generate", GREEDY)["choices"])
    client = Client(lives.begin())
    loaded = answered(client, "POST", "/v1/sessions", {"saved": "mine", "ttl": 60})
    assert loaded["n_tokens"] == saved["n_tokens"]
    assert loaded["id"] != name
    found = [answered(client, "POST", f"/v1/sessions/{loaded['id']}/append", more)["n_tokens"]]
    answer = answered(client, "POST", f"/v1/sessions/{loaded['id']}/generate", GREEDY)
    found.append(answer["choices"])
    assert found == expected
    assert answer["usage"]["pyvelo"]["store_tokens"] >= 192
    assert "pyvelo:kv_store_loaded_tokens_total" in client.request("GET", "/metrics").text


def test_keys_have_sessions_and_blocks_of_their_own(lives: Lives) -> None:
    server = lives.begin("ann", "bob")
    ann, bob = Client(server, "ann"), Client(server, "bob")
    for client, salt in ((ann, None), (ann, "x"), (bob, None)):
        begin = {"prompt": PROMPT} if salt is None else {"prompt": PROMPT, "cache_salt": salt}
        name = answered(client, "POST", "/v1/sessions", begin)["id"]
        answered(client, "POST", f"/v1/sessions/{name}/generate", GREEDY)
        answered(client, "POST", f"/v1/sessions/{name}/save", {"name": "s"})
    answered(bob, "DELETE", "/v1/saved_sessions/s")
    answered(bob, "DELETE", "/v1/saved_sessions/s", None, 404)
    answered(bob, "POST", "/v1/sessions", {"saved": "s"}, 404)
    answered(ann, "POST", "/v1/sessions", {"saved": "s"})
    answered(ann, "POST", "/v1/sessions", {"saved": "s", "cache_salt": "x"})
    answered(ann, "POST", "/v1/sessions", {"saved": "s", "cache_salt": "y"}, 404)
    assert answered(ann, "GET", "/v1/kv_store")["n_records"] == 3 * 6 + 2
    assert answered(ann, "DELETE", "/v1/kv_store")["n_deleted"] == 2 * 6 + 2
    assert answered(bob, "GET", "/v1/kv_store")["n_records"] == 6
    server = lives.begin("ann", "bob")
    tokens = [
        answered(Client(server, key), "POST", "/v1/completions", {"prompt": PROMPT, **GREEDY})["usage"]
        for key in ("ann", "bob")
    ]
    assert [usage["pyvelo"]["store_tokens"] for usage in tokens] == [0, 192]


def test_without_keys_all_is_deleted(lives: Lives) -> None:
    client = Client(lives.begin())
    for salt in ("a", "b"):
        answered(client, "POST", "/v1/completions", {"prompt": PROMPT, "cache_salt": salt, **GREEDY})
    assert lives.server is not None
    persistence = lives.server.serving.engine.persistence
    assert persistence is not None
    assert persistence.flush(10)
    assert answered(client, "DELETE", "/v1/kv_store")["n_deleted"] == 12


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"saved": "a/b"}, "saved: give a name of 1 to 128 characters without /"),
        ({"saved": ""}, "saved: give a name"),
        ({"saved": "x", "prompt": "y"}, "give one of prompt, messages and saved"),
        ({"saved": "x", "lora": "y"}, "a saved session keeps its own"),
    ],
)
def test_wrong_names(lives: Lives, body: dict[str, Any], says: str) -> None:
    client = Client(lives.begin())
    assert says in answered(client, "POST", "/v1/sessions", body, 400)["error"]["message"]


def test_a_name_that_was_not_saved(lives: Lives) -> None:
    client = Client(lives.begin())
    found = answered(client, "POST", "/v1/sessions", {"saved": "nothing"}, 404)
    assert "there is no saved session 'nothing'" in found["error"]["message"]
    name = answered(client, "POST", "/v1/sessions", {"prompt": "x"})["id"]
    answered(client, "POST", f"/v1/sessions/{name}/save", {"name": "a/b"}, 400)


def test_while_the_model_is_identified(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, digest = threading.Event(), opening.file_digest

    def later(*given: Any) -> str:
        go_on.wait(20)
        return digest(*given)

    monkeypatch.setattr("pyvelo.store.opening.known_digest", lambda *_: None)
    monkeypatch.setattr("pyvelo.store.opening.file_digest", later)
    client = Client(lives.begin(wait=False))
    name = answered(client, "POST", "/v1/sessions", {"prompt": "x"})["id"]
    for method, path, body in (
        ("POST", "/v1/sessions", {"saved": "x"}),
        ("POST", f"/v1/sessions/{name}/save", {"name": "x"}),
        ("DELETE", "/v1/saved_sessions/x", None),
        ("DELETE", "/v1/kv_store", None),
    ):
        assert "still being read" in answered(client, method, path, body, 503)["error"]["message"]
    answered(client, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})
    go_on.set()
    assert lives.server is not None
    persistence = lives.server.serving.engine.persistence
    assert persistence is not None
    assert persistence.identity
    answered(client, "POST", f"/v1/sessions/{name}/save", {"name": "x"})


def test_a_server_without_a_store(server: Server) -> None:
    client = Client(server)
    name = answered(client, "POST", "/v1/sessions", {"prompt": "Hi"})["id"]
    for method, path, body in (
        ("POST", f"/v1/sessions/{name}/save", {"name": "x"}),
        ("POST", "/v1/sessions", {"saved": "x"}),
        ("GET", "/v1/kv_store", None),
        ("DELETE", "/v1/kv_store", None),
        ("DELETE", "/v1/saved_sessions/x", None),
    ):
        assert "--kv-store PLACE" in answered(client, method, path, body, 403)["error"]["message"]
    answered(client, "DELETE", f"/v1/sessions/{name}")


def test_a_store_that_is_away(tiny_model_f32: Path) -> None:
    server = Server(Settings(), model=tiny_model_f32, kv_store="valkey://127.0.0.1:1")
    assert server.serving.engine.persistence is not None
    assert server.serving.engine.persistence.identity
    client = Client(server)
    name = answered(client, "POST", "/v1/sessions", {"prompt": "Hi"})["id"]
    answered(client, "POST", f"/v1/sessions/{name}/save", {"name": "x"}, 503)
    answered(client, "POST", "/v1/sessions", {"saved": "x"}, 503)
    found = answered(client, "GET", "/v1/kv_store")
    assert found == {"object": "kv_store", "n_records": None, "n_bytes": None}
    answered(client, "DELETE", "/v1/kv_store", None, 503)
    server.close()
