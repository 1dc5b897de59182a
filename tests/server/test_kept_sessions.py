"""Sessions of responses: what the next turn shares, and what is left of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.chat.template import BUILT_IN, ChatTemplate
from pyvelo.server.auth import ANYBODY, Tenant
from pyvelo.server.errors import HttpError
from pyvelo.server.kept_sessions import TTL, KeptSessions

from .conftest import Serve
from .servers import Server

FIELDS: dict[str, Any] = {"model": "demo", "max_output_tokens": 30, "temperature": 0}
PARAMS = SamplingParams(max_tokens=30, temperature=0, top_p=0.95)
QUESTION = "What is a KV cache?"


@pytest.fixture
def chatml(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return a server whose template shows system messages."""
    server = serve()
    monkeypatch.setattr(server.serving.chats, "_known", {"": ChatTemplate(BUILT_IN["chatml"])})
    return server


def turn(server: Server, text: str, previous: Mapping[str, Any] | None = None, **more: Any) -> Any:
    if previous is not None:
        more["previous_response_id"] = previous["id"]
    return server.ask("/v1/responses", {"input": text, **FIELDS, **more})


def cached(response: Mapping[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def known(response: Mapping[str, Any]) -> int:
    """Return the tokens that were computed; the last one was not needed."""
    return int(response["usage"]["total_tokens"]) - 1


def text_of(response: Mapping[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_the_next_turn_computes_its_own_tokens_alone(chatml: Server, oracle: LLM) -> None:
    first = turn(chatml, QUESTION)
    assert known(first) % 32  # more than whole blocks
    messages: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": text_of(first)},
    ]
    for text in ("And a table?", "Why?"):
        later = turn(chatml, text, first)
        expected = oracle.chat([*messages, {"role": "user", "content": text}], PARAMS, chat_template="chatml")
        assert text_of(later) == expected.text
        if text != "Why?":  # the second turn finds whole blocks
            assert cached(later) == known(first)
            assert cached(turn(chatml, "So?", later)) == known(later)


def test_turns_that_fail_leave_the_session(chatml: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise HttpError(503, "full")

    first = turn(chatml, QUESTION)
    body = {**FIELDS, "input": "Why?", "previous_response_id": first["id"]}
    assert chatml.post("/v1/responses", {**body, "input": "a " * 600}).status == 400
    assert chatml.post("/v1/responses", {**body, "timeout": 0}).status == 504
    with monkeypatch.context() as patch:
        patch.setattr(chatml.serving.admission, "queue", full)
        assert chatml.post("/v1/responses", body).status == 503
    assert chatml.serving.engine.stats().idle == 1
    assert cached(turn(chatml, "And a table?", first)) == known(first)


def test_turns_that_are_not_stored_leave_it_too(chatml: Server) -> None:
    first = turn(chatml, QUESTION)
    assert cached(turn(chatml, "Why?", first, store=False)) == known(first) // 32 * 32
    assert cached(turn(chatml, "And a table?", first)) == known(first)


@pytest.mark.parametrize("more", [{"instructions": "Be short."}, {"cache_salt": "other"}])
def test_turns_that_begin_otherwise(chatml: Server, more: dict[str, Any]) -> None:
    first = turn(chatml, QUESTION)
    assert cached(turn(chatml, "Why?", first, **more)) < known(first)
    assert len(chatml.serving.kept_sessions) == 1  # the new turn's


def test_a_deleted_response_frees_its_blocks_at_once(serve: Serve) -> None:
    server = serve()
    response = turn(server, "a")
    server.until(lambda: server.stats.idle == 1)
    assert server.request("DELETE", f"/v1/responses/{response['id']}").status == 200
    server.until(lambda: server.stats.blocks_used == 0)


def test_a_server_without_sessions_keeps_none(serve: Serve) -> None:
    server = serve(max_sessions=0)
    turn(server, "b", turn(server, "a"))
    server.until_open(0)
    assert len(server.serving.kept_sessions) == 0
    assert server.serving.engine.stats().blocks_used == 0


def test_one_shot_responses_leave_the_prefix_cache_alone(serve: Serve) -> None:
    server = serve(n_ctx=512, kv_cache_bytes=2 << 20)
    prompt = {"prompt": "The same long prefix. " * 12, "max_tokens": 1}
    usage = server.ask("/v1/completions", prompt)["usage"]
    n_whole = (usage["prompt_tokens"] - 1) // 32 * 32
    for number in range(24):
        turn(server, f"{number} one shot of some length, for which blocks are needed. " * 2)
        if number % 3 == 0:
            again = server.ask("/v1/completions", prompt)["usage"]
            assert again["prompt_tokens_details"]["cached_tokens"] >= n_whole


class Session:
    """Session of so many tokens."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens, self.closed, self._sequence = n_tokens, False, object()

    def __len__(self) -> int:
        return self.n_tokens

    def _close(self) -> None:
        self.closed = True


def test_the_oldest_sessions_make_room() -> None:
    now = [0.0]
    kept = KeptSessions(3, 100, lambda: now[0])
    other = Tenant("other")
    sessions: dict[str, Any] = {name: Session(10) for name in "abcd"}
    for name, session in sessions.items():
        kept.keep(other if name == "a" else ANYBODY, name, session)
    assert [session.closed for session in sessions.values()] == [True, False, False, False]
    assert kept.find(ANYBODY, "b") is sessions["b"]
    assert kept.find(other, "b") is None
    assert kept.by_sequence()[id(sessions["d"]._sequence)] == (ANYBODY, "d")
    long: Any = Session(101)
    kept.keep(ANYBODY, "long", long)
    assert long.closed
    assert len(kept) == 3
    now[0] = TTL / 2
    large: Any = Session(85)
    kept.keep(ANYBODY, "large", large)  # 105 of 100 with two others
    assert [sessions[name].closed for name in "bcd"] == [True, True, False]
    kept.close(ANYBODY, "large")
    kept.close(ANYBODY, "none")
    assert large.closed
    now[0] = TTL
    kept.expire()
    assert sessions["d"].closed
    assert len(kept) == 0
