"""API keys: files of keys, refusals, limits of each key, and prefixes that no two keys share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pyvelo.errors import ConfigError
from pyvelo.server.auth import ANYBODY, Keys, Tenant, read_keys
from pyvelo.server.errors import HttpError
from pyvelo.server.params import completion_params
from pyvelo.server.schemas import CompletionRequest

from .conftest import Serve
from .servers import Server

COMPLETIONS = "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def keys_of(folder: Path, text: str, *given: str) -> Keys:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    return read_keys(path, given)


# ---- files of keys ----


def test_a_file_names_tenants_and_their_limits(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"hidden").hexdigest()
    text = f"""
        # comment
        anna  key-of-anna requests=2 tokens=300 priority=-5
        bert  sha256:{digest}  priority=7
    """
    keys = keys_of(tmp_path, text, "from-environment", "", " spaced ")
    assert keys.needed
    anna, bert = keys.tenant("Bearer key-of-anna"), keys.tenant("bearer  hidden")
    assert (anna.name, anna.requests, anna.tokens, anna.priority) == ("anna", 2, 300, -5)
    assert (bert.name, bert.requests, bert.tokens, bert.priority) == ("bert", None, None, 7)
    assert keys.tenant("", "hidden") is bert
    assert keys.tenant("Basic xyz", "hidden") is bert
    assert keys.tenant("Bearer from-environment").name == "key-1"
    assert keys.tenant("Bearer spaced").name == "key-3"
    assert "key-of-anna" not in repr(anna) + repr(vars(keys))
    with pytest.raises(HttpError):
        keys.tenant(f"Bearer sha256:{digest}")  # the hash is no key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("anna", "line 1: give NAME KEY"),
        ("\n\nan/na secret", "line 3: give NAME KEY"),
        ("a" * 65 + " secret", "line 1: give NAME KEY"),
        ("anna secret requests=0", "line 1: requests must be at least 1, got 0"),
        ("anna secret tokens=-1", "line 1: tokens must be at least 1, got -1"),
        ("anna secret speed=9", "line 1: word 3 is no limit"),
        ("anna lee secret", "line 1: word 3 is no limit"),
        ("anna secret tokens=1 tokens=2", "line 1: tokens= has two values"),
        ("anna secret\x00", "line 1: clients can send printable ASCII"),
        ("anna sécret", "line 1: clients can send printable ASCII"),
        ("anna secret requests=many", "line 1: 'requests=many' is no limit"),
        ("anna secret requests", "line 1: 'requests' is no limit"),
        ("anna sha256:abc", "line 1: a hash is sha256: and 64"),
        ("anna secret\nanna other", "same name, 'anna'"),
        ("anna secret\nbert secret", "'anna' and 'bert' have the same API key"),
        ("# nothing\n", "has no key"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_its_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_of(tmp_path, text)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"missing cannot be read \(No such file or directory\): give a file"
    ):
        read_keys(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary cannot be read \(no UTF-8 text\)"):
        read_keys(tmp_path / "binary")


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfanna secret\r\n\r\nbert other\r\n")
    assert read_keys(tmp_path / "keys").tenant("Bearer other").name == "bert"


def test_a_key_of_the_environment_that_no_client_can_send_is_refused() -> None:
    with pytest.raises(ConfigError, match="key 2 of PYVELO_API_KEY: clients can send"):
        read_keys(None, ["good", "sécret"])


def test_without_keys_no_key_is_needed() -> None:
    keys = read_keys(None, ["  "])
    assert not keys.needed
    with pytest.raises(ConfigError, match="commas alone"):
        read_keys(None, ["", "  "])
    assert keys.tenant("") is ANYBODY
    assert keys.tenant("Bearer anything") is ANYBODY


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer wrong", "good", "Basic good", "Bearer goo"]
)
def test_an_unknown_key_is_refused(header: str) -> None:
    keys = read_keys(None, ["good"])
    with pytest.raises(HttpError) as caught:
        keys.tenant(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"


def test_every_key_is_compared_whatever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In constant time, by digests of one length."""
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = read_keys(None, ["a", "b", "c"])
    assert keys.tenant("Bearer a").name == "key-1"
    assert compared == [(32, 32)] * 3


# ---- salts and priorities ----


def test_a_salt_belongs_to_a_key_whatever_the_body_says() -> None:
    anna, bert = Tenant("anna", b"a" * 32), Tenant("bert", b"b" * 32)
    asks = ("", "x", "\ud800")
    salts = {(tenant.name, ask): tenant.salt(ask) for tenant in (anna, bert) for ask in asks}
    assert len(set(salts.values())) == len(salts)
    assert anna.salt("x") == anna.salt("x")
    assert bert.salt("") not in {anna.salt(bert.salt("")), anna.salt(b"b".hex() * 32)}
    assert ANYBODY.salt("x") == "x"


@pytest.mark.parametrize(
    ("ceiling", "asked", "given"),
    [(0, None, 0), (0, -9, 0), (0, 4, 4), (-5, None, -5), (-5, 0, 0), (-5, -9, -5), (3, 0, 3), (3, None, 3)],
)
def test_a_request_never_runs_before_the_priority_of_its_key(
    ceiling: int, asked: int | None, given: int
) -> None:
    request = CompletionRequest(prompt="a", priority=asked)
    assert completion_params(request, Tenant("anna", priority=ceiling), None).priority == given


# ---- over HTTP ----


@pytest.fixture
def guarded(serve: Serve, tmp_path: Path) -> Server:
    text = "anna key-a requests=1\nbert key-b tokens=40\ncleo key-c"
    return serve(keys=keys_of(tmp_path, text), max_num_seqs=1)


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/version", "/openapi.json", "/tokenizer_info"])
def test_everything_but_health_needs_a_key(guarded: Server, path: str) -> None:
    assert guarded.get("/health").status == 200
    refused = guarded.get(path)
    assert (refused.status, refused.error["type"]) == (401, "authentication_error")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert guarded.request("GET", path, headers=bearer("key-a")).status == 200
    assert guarded.request("GET", path, headers={"X-Api-Key": "key-b"}).status == 200


def test_a_body_is_not_read_without_a_key(guarded: Server) -> None:
    with guarded.client() as client:
        client.send(COMPLETIONS, b"{", length=1 << 30)
        assert b" 401 " in client.until(b"\n")


def test_two_keys_never_share_a_prefix(guarded: Server) -> None:
    body = {"prompt": [7] * 100, "max_tokens": 1}

    def cached(key: str, **fields: Any) -> int:
        usage = guarded.ask(COMPLETIONS, {**body, **fields}, bearer(key))["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("key-a") == 0
    assert cached("key-a") == 96
    assert cached("key-c") == 0
    assert cached("key-c") == 96
    assert cached("key-a", cache_salt="x") == 0
    assert cached("key-a", cache_salt="x") == 96
    assert cached("key-c", cache_salt="x") == 0
    assert cached("key-a", cache_salt="") == 96


def refusal(server: Server, key: str, n_prompt: int) -> Mapping[str, Any]:
    """Return status, code and Retry-After of a request."""
    answer = server.post(COMPLETIONS, {"prompt": [9] * n_prompt, "max_tokens": 1}, bearer(key))
    found = {"status": answer.status, "retry": answer.headers.get("retry-after")}
    return found if answer.status == 200 else {**found, "code": answer.error["code"]}


def endless(n_prompt: int) -> dict[str, Any]:
    return {"prompt": [8] * n_prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}


def test_the_requests_of_a_key_are_bounded(guarded: Server) -> None:
    with guarded.client() as client:
        with guarded.paused_at(lambda stats: stats.running == 1) as wait:
            client.send(COMPLETIONS, endless(3), headers=bearer("key-a"))
            wait()
            refused = refusal(guarded, "key-a", 3)
        assert refused == {"status": 429, "retry": "1", "code": "rate_limit_exceeded"}
        client.close()
    guarded.until_idle()
    assert refusal(guarded, "key-a", 3)["status"] == 200


def test_the_queued_tokens_of_a_key_are_bounded(guarded: Server) -> None:
    admission = guarded.serving.admission
    with guarded.client() as runs, guarded.client() as waits:
        with guarded.paused_at(lambda stats: stats.completion_tokens == 1) as wait:
            runs.send(COMPLETIONS, endless(50), headers=bearer("key-b"))  # alone it may have any length
            wait()
            waits.send(COMPLETIONS, endless(30), headers=bearer("key-b"))
            guarded.until(lambda: admission.queued_tokens() == 30)
            refused = refusal(guarded, "key-b", 11)
            assert admission.queued_tokens() == 30
        assert (refused["status"], refused["code"]) == (429, "rate_limit_exceeded")
        assert int(refused["retry"]) >= 1
        assert admission.refusals["key_tokens"] == 1
    guarded.until_idle()
    assert refusal(guarded, "key-b", 200)["status"] == 200


def test_bodies_that_trickle_leave_room_for_other_keys(
    guarded: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyvelo.server.app.MAX_READING", 4)
    with ExitStack() as stack:
        slow = [stack.enter_context(guarded.client()) for _ in range(6)]
        for client in slow:
            client.send("/v1/completions", b"{", bearer("key-c"), length=99)
        assert b" 503 " in slow[-1].until(b"\r\n"), "three of this key are read, and no more"
        answer = guarded.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, bearer("key-b"))
        assert answer.status == 200


def test_a_template_of_a_request_is_cut_soon(server: Server) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    start = time.monotonic()
    messages = [{"role": "user", "content": "x"}]
    answer = server.post("/v1/chat/completions", {"messages": messages, "chat_template": endless})
    assert answer.status == 400
    assert time.monotonic() - start < 5, "two seconds on a machine with nothing else to do"
