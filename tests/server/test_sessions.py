"""/v1/sessions against LLM: tokens, shared blocks, owners, quotas, times, and what ends an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.chat.template import ChatTemplate
from pyvelo.engine.scheduler import StepPlan
from pyvelo.errors import ClosedError
from pyvelo.server.auth import Tenant, read_keys
from pyvelo.server.errors import HttpError
from pyvelo.server.session_store import StoredSession
from pyvelo.server.settings import Settings

from .conftest import Serve
from .servers import SETTINGS, Server

GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = [3 + (7 * i) % 250 for i in range(70)]
MESSAGES = [{"role": "user", "content": "Tell me a <|im_end|> story"}]


@pytest.fixture(scope="module")
def server(tiny_model_f32: Path) -> Iterator[Server]:
    settings = Settings(keys=read_keys(None, ["ann", "bob"]), max_sessions=6, max_session_tokens=2000)
    found = Server(settings, model=tiny_model_f32)
    yield found
    found.close()


@pytest.fixture
def ann(server: Server) -> Iterator[httpx.Client]:
    with client_of(server, "ann") as client:
        yield client
        for each in client.get("/v1/sessions").json()["data"]:
            client.delete(f"/v1/sessions/{each['id']}")
    server.until_idle()


@pytest.fixture(scope="module")
def llm(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, **SETTINGS) as found:
        yield found


def client_of(server: Server, key: str = "any") -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


def stored(server: Server, name: str) -> StoredSession:
    tenant: Tenant = server.settings.keys.tenant("Bearer ann")
    return server.serving.sessions.find(tenant, name)


def test_usage_tells_the_tokens_that_were_in_host_memory(serve: Serve, tiny_model_f32: Path) -> None:
    server = serve(model=tiny_model_f32, kv_cache_bytes=1 << 18, swap_bytes=1 << 20, prefix_cache=False)
    n_pool = server.serving.engine.pool.n_tokens
    with client_of(server) as client:
        name = client.post("/v1/sessions", json={"prompt": PROMPT}).json()["id"]
        found = []
        for n_other in (1, 1, n_pool - 16):  # the last one needs the session's blocks
            other = client.post("/v1/completions", json={"prompt": [9] * n_other, **GREEDY}).json()["usage"]
            assert other["pyvelo"]["host_tokens"] == 0
            usage = client.post(f"/v1/sessions/{name}/generate", json=GREEDY).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            found.append((cached, usage["pyvelo"]["pool_tokens"], usage["pyvelo"]["host_tokens"]))
    once, twice = len(PROMPT) + 7, len(PROMPT) + 15  # the last token is never computed
    assert found == [(0, 0, 0), (once, once, 0), (twice, 0, twice)]


def tokens_of(server: Server, name: str) -> tuple[int, ...]:
    return server.serving.sessions._by_id[name].session.token_ids


def shown(server: Server, tokens: Sequence[int]) -> str:
    return server.serving.engine.model.detokenize(tokens, special=True).decode()


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/sessions{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(client: httpx.Client, path: str, status: int, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/sessions{path}", json=body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_turns_and_forks_equal_a_session(ann: httpx.Client, llm: LLM) -> None:
    made = post(ann, "", prompt=PROMPT, ttl=60)
    assert made["object"] == "session"
    assert made["n_tokens"] == len(PROMPT)
    assert made["status"] == "idle"
    with llm.session(PROMPT) as session:
        first = post(ann, f"/{made['id']}/generate", **GREEDY)
        assert tuple(first["choices"][0]["token_ids"]) == session.generate(PARAMS).token_ids
        assert first["object"] == "text_completion"
        twins = post(ann, f"/{made['id']}/fork", n=2)["data"]
        assert [twin["n_tokens"] for twin in twins] == [len(session)] * 2
        assert twins[0]["expires_at"] - made["expires_at"] < 300
        n_before = len(session)
        for number, each in enumerate([made, *twins]):
            assert post(ann, f"/{each['id']}/append", token_ids=[5, 6 + number])["n_tokens"] == n_before + 2
            with session.fork() as fork:
                fork.append([5, 6 + number])
                expected = fork.generate(PARAMS)
            answer = post(ann, f"/{each['id']}/generate", **GREEDY)
            assert tuple(answer["choices"][0]["token_ids"]) == expected.token_ids
            usage = answer["usage"]
            assert usage["prompt_tokens"] == n_before + 2
            assert usage["prompt_tokens_details"]["cached_tokens"] == n_before - 1


def test_forks_take_no_blocks(server: Server, ann: httpx.Client) -> None:
    made = post(ann, "", prompt=PROMPT)
    post(ann, f"/{made['id']}/generate", **GREEDY)
    pool = server.serving.engine.stats
    used = pool().blocks_used
    post(ann, f"/{made['id']}/fork", n=4)
    assert pool().blocks_used == used


def test_events_have_the_shape_of_completions(ann: httpx.Client, llm: LLM) -> None:
    made = post(ann, "", prompt="Once upon a time")
    fields = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    with ann.stream("POST", f"/v1/sessions/{made['id']}/generate", json=fields) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    expected = llm.generate("Once upon a time", PARAMS)[0]
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == expected.text
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 8
    n_tokens = ann.get(f"/v1/sessions/{made['id']}").json()["n_tokens"]
    assert n_tokens == len(expected.prompt_token_ids) + 8


def test_messages_are_what_a_chat_of_all_messages_is(ann: httpx.Client, llm: LLM) -> None:
    made = post(ann, "", messages=MESSAGES)
    assert made["n_tokens"] == len(llm.chat_prompt(MESSAGES))
    first = post(ann, f"/{made['id']}/generate", **GREEDY)
    text = first["choices"][0]["text"]
    more = [{"role": "user", "content": "and then?"}]
    longer = post(ann, f"/{made['id']}/append", messages=more)
    whole = llm.chat_prompt([*MESSAGES, {"role": "assistant", "content": text}, *more])
    assert longer["n_tokens"] == len(whole)
    answer = post(ann, f"/{made['id']}/generate", **GREEDY)
    assert answer["choices"][0]["text"] == llm.generate([whole], PARAMS)[0].text
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["n_tokens"] // 32 * 32


@pytest.mark.parametrize("max_tokens", [5, 200])
def test_the_text_of_a_conversation_is_the_template_s(serve: Serve, max_tokens: int) -> None:
    """Answers that end, and answers that are cut, in a session and in its forks."""
    demo = serve()
    source, mood = demo.serving.chats.template.source, {"mood": "!"}
    moody = source.replace("'<|user|> '", "'<|user|> ' + mood")
    demo.serving.chats._known = {"": ChatTemplate(moody, bos="<|bos|>")}
    with client_of(demo) as client:
        made = post(client, "", messages=MESSAGES, chat_template_kwargs=mood)["id"]
        conversations = {made: list(MESSAGES)}
        for turn in range(3):
            reasons = []
            for name, messages in conversations.items():
                fields = {"temperature": 0, "max_tokens": max_tokens, "return_token_ids": True}
                choice = post(client, f"/{name}/generate", **fields)["choices"][0]
                reasons.append(choice["finish_reason"])
                messages.append({"role": "assistant", "content": choice["text"]})
            assert set(reasons) == {"length" if max_tokens == 5 else "stop"}
            if turn == 0:
                twin = post(client, f"/{made}/fork")["data"][0]["id"]
                conversations[twin] = list(conversations[made])
            for number, (name, messages) in enumerate(conversations.items()):
                new = [{"role": "user", "content": f"Question {number}, {turn}"}]
                messages += new
                before = tokens_of(demo, name)
                post(client, f"/{name}/append", messages=new)
                after = tokens_of(demo, name)
                assert after[: len(before)] == before
                whole = demo.serving.chats.one(messages, template_arguments=mood)
                assert "!Question" in whole.text
                assert shown(demo, after) == shown(demo, whole) == whole.text


def test_a_template_that_cuts_answers_starts_again(serve: Serve) -> None:
    demo = serve()
    source = demo.serving.chats.template.source
    cut = source.replace("'<|bot|>' + message['content'] | trim", "'<|bot|>' + message['content'][:2]")
    assert cut != source
    demo.serving.chats._known = {"": ChatTemplate(cut, bos="<|bos|>")}
    with client_of(demo) as client:
        made = post(client, "", messages=MESSAGES)["id"]
        text = post(client, f"/{made}/generate", temperature=0, max_tokens=20)["choices"][0]["text"]
        more = [{"role": "user", "content": "more " * 40}]
        post(client, f"/{made}/append", messages=more)
        whole = demo.serving.chats.one([*MESSAGES, {"role": "assistant", "content": text}, *more])
        assert tokens_of(demo, made) == whole
        usage = post(client, f"/{made}/generate", temperature=0, max_tokens=1)["usage"]
        assert usage["prompt_tokens"] == len(whole)


@pytest.mark.parametrize("n_shown", [2, 999])
def test_a_template_may_change_what_was_said(
    server: Server, ann: httpx.Client, monkeypatch: pytest.MonkeyPatch, n_shown: int
) -> None:
    content = f"{{{{ m.content[:({n_shown} if m.role == 'assistant' else 999)] }}}}"
    lines = "{% for m in messages %}{{ m.role[0] }}{{ mood }}:" + content + "\n{% endfor %}"
    cut = ChatTemplate(lines + "a{{ mood }}:")
    monkeypatch.setattr(server.serving.chats, "_known", {"": cut})
    mood = {"mood": "!"}
    made = post(ann, "", messages=MESSAGES, chat_template_kwargs=mood)["id"]
    messages = list(MESSAGES)
    for text in ("more" * 40, "and more"):
        answer = post(ann, f"/{made}/generate", **{**GREEDY, "max_tokens": 30})["choices"][0]["text"]
        new = [{"role": "user", "content": text}]
        messages += [{"role": "assistant", "content": answer}, *new]
        before = tokens_of(server, made)
        post(ann, f"/{made}/append", messages=new)
        assert (tokens_of(server, made)[: len(before)] == before) == (n_shown > 2)
        expected = server.serving.chats.one(messages, template_arguments=mood)
        assert shown(server, tokens_of(server, made)) == shown(server, expected)
    assert post(ann, f"/{made}/generate", **GREEDY)["choices"][0]["text"]


def test_defaults_of_chats_and_of_completions(
    serve: Serve, oracle: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = serve()
    with client_of(demo) as client:
        chat = post(client, "", messages=MESSAGES)["id"]
        params = SamplingParams(temperature=0, max_tokens=None, stop=["e"])
        monkeypatch.setattr(demo.serving.chats, "params", params)
        expected = oracle.chat(MESSAGES, params)
        assert post(client, f"/{chat}/generate")["choices"][0]["text"] == expected.text
        text = post(client, "", prompt="A cache")["id"]
        answer = post(client, f"/{text}/generate", temperature=0)
        expected = oracle.generate("A cache", SamplingParams(temperature=0, max_tokens=16))[0]
        assert answer["choices"][0]["text"] == expected.text


def test_sessions_belong_to_a_key(server: Server, ann: httpx.Client) -> None:
    made = post(ann, "", prompt=PROMPT)
    with client_of(server, "bob") as bob:
        assert bob.get("/v1/sessions").json() == {"object": "list", "data": []}
        path = f"/v1/sessions/{made['id']}"
        answers = [bob.get(path), bob.delete(path)]
        answers += [
            bob.post(f"{path}/{name}", json=body)
            for name, body in {"append": {"text": "a"}, "generate": {}, "fork": {}}.items()
        ]
        assert [answer.status_code for answer in answers] == [404] * 5
        other = post(bob, "", prompt=PROMPT)
        answer = post(bob, f"/{other['id']}/generate", **GREEDY)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert bob.delete(f"/v1/sessions/{other['id']}").json()["deleted"] is True
    assert [each["id"] for each in ann.get("/v1/sessions").json()["data"]] == [made["id"]]
    post(ann, f"/{made['id']}/generate", **GREEDY)
    for salt, n_cached in ((None, len(PROMPT) // 32 * 32), ("own", 0)):
        other = post(ann, "", prompt=PROMPT, cache_salt=salt)
        usage = post(ann, f"/{other['id']}/generate", **GREEDY)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= n_cached
        assert (usage["prompt_tokens_details"]["cached_tokens"] == 0) == (salt is not None)


def test_quotas(ann: httpx.Client) -> None:
    made = post(ann, "", prompt=PROMPT * 6)
    error = refused(ann, f"/{made['id']}/fork", 429, n=6)
    assert error["code"] == "session_quota"
    assert error["message"].startswith("this key has 1 sessions, and 6 more would exceed 6")
    post(ann, f"/{made['id']}/fork", n=4)  # 5 * 420 tokens
    assert "the limit is 2000" in refused(ann, "", 429)["message"]
    assert "the limit is 2000" in refused(ann, f"/{made['id']}/append", 429, text="a")["message"]
    assert ann.delete(f"/v1/sessions/{made['id']}").status_code == 200
    empty = post(ann, "")
    assert empty["n_tokens"] == 0
    post(ann, "")
    assert "this key has 6 sessions" in refused(ann, "", 429)["message"]
    assert "no tokens" in refused(ann, f"/{empty['id']}/generate", 400)["message"]


def test_time_counts_from_the_last_use(
    server: Server, ann: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    store = server.serving.sessions
    monkeypatch.setattr(store, "_clock", lambda: now)
    short, long = (post(ann, "", prompt=PROMPT, ttl=ttl)["id"] for ttl in (10, 600))
    assert post(ann, "")["expires_at"] - ann.get(f"/v1/sessions/{short}").json()["expires_at"] in (589, 590)
    now = 1009.0
    post(ann, f"/{short}/generate", **GREEDY)
    server.until_open(0)  # the session's time starts again after the last byte
    assert server.serving.engine.stats().blocks_used > 0
    now = 1018.0
    assert ann.get(f"/v1/sessions/{short}").status_code == 200  # which is no use
    now = 1019.5
    assert ann.get(f"/v1/sessions/{short}").status_code == 404
    while len(store) > 2:  # the ticker runs once a second
        ann.get("/health")
    assert server.serving.engine.stats().blocks_used == 0
    assert ann.get(f"/v1/sessions/{long}").status_code == 200


def test_a_busy_session_takes_nothing(server: Server, ann: httpx.Client) -> None:
    made = post(ann, "", prompt=PROMPT)["id"]
    with server.serving.sessions.use(stored(server, made)):
        assert ann.get(f"/v1/sessions/{made}").json()["status"] == "answering"
        bodies: dict[str, dict[str, Any]] = {"append": {"text": "a"}, "generate": GREEDY, "fork": {}}
        for path, body in bodies.items():
            error = refused(ann, f"/{made}/{path}", 409, **body)
            assert error["code"] == "session_busy"
    post(ann, f"/{made}/generate", **GREEDY)


def test_a_client_that_leaves_ends_the_answer(server: Server, ann: httpx.Client, llm: LLM) -> None:
    made = post(ann, "", prompt=PROMPT)["id"]
    fields = {**GREEDY, "max_tokens": 400, "stream": True}
    before = server.serving.engine.stats().completion_tokens
    with server.paused_at(lambda stats: stats.completion_tokens == before + 5) as wait:
        with ann.stream("POST", f"/v1/sessions/{made}/generate", json=fields):
            wait()
            assert ann.get(f"/v1/sessions/{made}").json()["status"] == "answering"
        server.until_open(0)
    n_kept = post(ann, f"/{made}/append", token_ids=[9])["n_tokens"] - len(PROMPT) - 1
    assert n_kept in (5, 6)
    expected = llm.generate([PROMPT], replace(PARAMS, max_tokens=n_kept))[0].token_ids
    post(ann, f"/{made}/generate", **{**GREEDY, "max_tokens": 1})
    tokens = stored(server, made).session.token_ids
    assert tokens[:-1] == (*PROMPT, *expected, 9)


def test_deletion_ends_an_answer(server: Server, ann: httpx.Client) -> None:
    made = post(ann, "", prompt=PROMPT)["id"]
    fields = {**GREEDY, "max_tokens": 400, "stream": True}
    before = server.serving.engine.stats().completion_tokens
    with (
        server.paused_at(lambda stats: stats.completion_tokens == before + 5) as wait,
        ann.stream("POST", f"/v1/sessions/{made}/generate", json=fields) as answer,
    ):
        wait()
        with client_of(server, "ann") as other:
            assert other.delete(f"/v1/sessions/{made}").status_code == 200
        server._go_on.set()
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "abort"
    refused(ann, f"/{made}/append", 404, text="a")


def test_a_request_on_a_session_that_is_deleted_meanwhile(server: Server, ann: httpx.Client) -> None:
    found = stored(server, post(ann, "", prompt=PROMPT)["id"])
    store = server.serving.sessions
    with pytest.raises(ClosedError), store.use(found):
        raise ClosedError("the engine was closed")
    with pytest.raises(HttpError, match="was deleted") as raised, store.use(found):  # noqa: PT012
        ann.delete(f"/v1/sessions/{found.id}")
        raise ClosedError("the session was closed")
    assert raised.value.status == 404


def test_wrong_input_names_the_field(ann: httpx.Client) -> None:
    made = post(ann, "", prompt=PROMPT)["id"]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("", {"prompt": [-1]}, "prompt"),
        ("", {"ttl": 0}, "ttl"),
        ("", {"ttl": 86401}, "ttl"),
        ("", {"tll": 5}, "tll"),
        ("", {"model": "other"}, "model"),
        ("", {"lora": "none"}, "lora"),
        ("", {"messages": [{"role": "user", "content": "a", "hidden": "a" * (3 << 20)}]}, "messages"),
        (f"/{made}/append", {}, "text"),
        (f"/{made}/append", {"text": "a", "token_ids": [1]}, "token_ids"),
        (f"/{made}/append", {"messages": MESSAGES}, "messages"),
        (f"/{made}/append", {"text": 5}, "text"),
        (f"/{made}/fork", {"n": 0}, "n"),
        (f"/{made}/generate", {"n": 2}, "n"),
        (f"/{made}/generate", {"prompt": "a"}, "prompt"),
        (f"/{made}/generate", {"max_tokens": 0}, "max_tokens"),
        (f"/{made}/generate", {"cache_salt": "a"}, "cache_salt"),
        (f"/{made}/generate", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ]
    for path, body, name in cases:
        answer = ann.post(f"/v1/sessions{path}", json=body)
        assert answer.status_code in (400, 404), (path, body, answer.text)
        error = answer.json()["error"]
        assert name in (error["param"] or error["message"]), (path, body, error)


def test_paths_in_metrics_are_patterns(server: Server, ann: httpx.Client) -> None:
    made = post(ann, "", prompt=PROMPT)["id"]
    ann.get(f"/v1/sessions/{made}")
    ann.get(f"/v1/sessions/{made}/other/more")
    assert ann.put(f"/v1/sessions/{made}").headers["allow"] == "GET, DELETE"
    text = ann.get("/metrics").text
    assert 'path="/v1/sessions/{id}",status="200"' in text
    assert made not in text


def test_the_end_of_a_server_closes_its_sessions(serve: Serve, tiny_model_f32: Path) -> None:
    server = serve(model=tiny_model_f32)
    with client_of(server) as client:
        post(client, "", prompt=PROMPT)
        answering = post(client, "", prompt=PROMPT)["id"]
        post(client, f"/{answering}/generate", **GREEDY)
    store = server.serving.sessions
    assert len(store) == 2
    server.drain(0.0).result(60)
    assert len(store) == 0
    assert server.serving.engine.stats().blocks_used == 0


def test_an_answer_counts_for_the_tokens_of_a_key(serve: Serve) -> None:
    server = serve(max_session_tokens=40)
    name = server.ask("/v1/sessions", {"prompt": [5] * 43})["id"]
    answer = server.post(f"/v1/sessions/{name}/generate", GREEDY)
    assert (answer.status, answer.error["code"]) == (429, "session_quota")


def test_a_fork_computes_with_the_priority_of_its_key(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann ann-key-is-long priority=7")
    server = serve(keys=read_keys(file, []))
    seen: list[tuple[int, int]] = []
    core = server.serving.loop.engine.core

    def before_run(plan: StepPlan) -> None:
        seen.extend((request.params.priority, request.max_new) for request in plan.requests)

    core.before_run.append(before_run)
    with client_of(server, "ann-key-is-long") as client:
        name = client.post("/v1/sessions", json={"prompt": PROMPT}).json()["id"]
        assert client.post(f"/v1/sessions/{name}/fork", json={}).status_code == 200
    assert set(seen) == {(7, 0)}


def test_requests_whose_fields_have_defaults_need_no_body(serve: Serve) -> None:
    with client_of(serve()) as client:
        name = client.post("/v1/sessions").json()["id"]
        assert client.post(f"/v1/sessions/{name}/append", json={"text": "Once upon a time"}).is_success
        answer = client.post(f"/v1/sessions/{name}/generate")
        assert answer.status_code == 200, answer.text
        forks = client.post(f"/v1/sessions/{name}/fork", content=b" \n")
        assert len(forks.json()["data"]) == 1
        refused = client.post(f"/v1/sessions/{name}/append")
        assert (refused.status_code, "it is empty" in refused.text) == (400, True)
