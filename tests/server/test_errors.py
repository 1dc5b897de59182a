"""Bodies, paths and methods that are refused: status, field and message; afterwards the server answers."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from pyvelo.server import http
from pyvelo.server.bodies import MAX_DEPTH, MAX_PARTS, MAX_VALUES, parse_json
from pyvelo.server.errors import HttpError
from pyvelo.server.schemas import IGNORED, REFUSED, ChatRequest, CompletionRequest, EmbeddingRequest

from .conftest import Serve
from .servers import Answer, Server

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "Hello"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "intger"}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHOICE = {"type": "function", "function": {"name": "g"}}

Case = tuple[str, dict[str, Any], str | None, str]
"""Path, body, field that is named, and words of the message."""

TYPES: list[Case] = [
    (COMPLETIONS, {"prompt": 5}, "prompt", "got an integer"),
    (COMPLETIONS, {"prompt": []}, "prompt", "at least 1 item"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]", "got a number"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "texts alone"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt", "texts alone"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "no tokens"),
    (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt", "256"),
    (COMPLETIONS, {}, "prompt", "missing"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "got a string"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "got a number"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream", "got a string"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop", "at most 16 items"),
    (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop[0]", "got an integer"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias[...]", "got a string"),
    (CHAT, {"messages": "Hello"}, "messages", "got a string"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {"messages": ["Hello"]}, "messages[0]", "got a string"),
    (CHAT, {"messages": [{"role": "user"}]}, None, "content"),
    (CHAT, {"messages": [{"content": "a"}]}, None, "role"),
    (CHAT, {"messages": [{"role": 5, "content": "a"}]}, None, "role"),
    (CHAT, {"messages": MESSAGES * 4097}, "messages", "at most 4096 items"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": 1}}, None, "got an integer"),
    (CHAT, {"messages": MESSAGES, "chat_template": "no template"}, "chat_template", "Jinja"),
    (CHAT, {"messages": MESSAGES, "chat_template": "{% for %}"}, "chat_template", "line 1"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "no tokens"),
    (COMPLETIONS, {"prompt": [1, 10**6]}, "prompt", "token 1000000"),
    (COMPLETIONS, {"prompt": "a", "guided_json": "{bad"}, "guided_json", "json_schema="),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "("}, "guided_regex", "regex"),
    (COMPLETIONS, {"prompt": "a", "guided_grammar": "root ::= foo"}, "guided_grammar", "grammar"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
    (CHAT, {"messages": MESSAGES, "response_format": FORMAT}, "response_format", "json_schema"),
    (CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": CHOICE}, "tool_choice", "'g' is none"),
    (EMBEDDINGS, {"input": {}}, "input", "got an object"),
    (EMBEDDINGS, {"input": ["a"], "encoding_format": "hex"}, "encoding_format", "'hex'"),
    (EMBEDDINGS, {"input": ["a"], "dimensions": 7}, "dimensions", "dimensions=7"),
    (EMBEDDINGS, {"input": ["a"], "pooling": "sum"}, "pooling", "'sum'"),
    (EMBEDDINGS, {"input": ["a"], "pooling": ""}, "pooling", ", or null for the model's own"),
    (EMBEDDINGS, {"input": ["a"]}, "pooling", "give one of mean, cls, last"),
    ("/tokenize", {}, "prompt", "either"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "either"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "got a string"),
    ("/detokenize", {"tokens": [10**9]}, "tokens", "token 1000000000"),
]

VALUES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": -0.5}, "temperature", "-0.5"),
    ({"temperature": 1e7}, "temperature", "10000000"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 2}, "min_p", "2"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 17}, "n", "at most 16"),
    ({"max_tokens": -1}, "max_tokens", "at least "),
    ({"max_tokens": 2**40}, "max_tokens", str(2**40)),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "9"),
    ({"presence_penalty": 3}, "presence_penalty", "3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    ({"stop": ""}, "stop", "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids"),
    ({"timeout": -1}, "timeout", "-1"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"priority": 10**9}, "priority", "1000000000"),
    ({"lora": "nothing"}, None, "nothing"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"max_token": 1}, "max_token", "did you mean max_tokens?"),
    ({"xyzzy": 1}, "xyzzy", "xyzzy is no parameter"),
    ({"x" * 500: 1}, "x" * 64, "is no parameter"),
]

ONLY: list[Case] = [
    (COMPLETIONS, {"prompt": "a", "best_of": 2, "n": 3}, "best_of", "2"),
    (COMPLETIONS, {"prompt": "a", "best_of": 17}, "best_of", "at most 16"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "at most 20"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
    (COMPLETIONS, {"prompt": "a", "messages": [1]}, "messages", "no parameter"),
    (COMPLETIONS, {"prompt": [10**6]}, None, "1000000"),
    (COMPLETIONS, {"prompt": [-1]}, None, "-1"),
    (COMPLETIONS, {"prompt": [2**70]}, None, "prompt"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "at least 1"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    (CHAT, {"messages": MESSAGES, "echo": True}, "echo", "no parameter"),
]


def refuse(server: Server, path: str, body: Any) -> Answer:
    """Return the answer 400 to a body; the next request of the same connection is not asked here."""
    answer = server.post(path, body)
    assert answer.status == 400, answer.data
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["type"] == "invalid_request_error"
    assert "\n" not in answer.error["message"]
    assert len(answer.error["message"]) < 700
    return answer


@pytest.mark.parametrize(("path", "body", "param", "says"), [*TYPES, *ONLY])
def test_a_body_is_refused(
    server: Server, path: str, body: dict[str, Any], param: str | None, says: str
) -> None:
    error = refuse(server, path, body).error
    assert says in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(("fields", "param", "says"), VALUES)
def test_a_value_is_refused(server: Server, fields: dict[str, Any], param: str | None, says: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        error = refuse(server, path, {**body, **fields}).error
        assert says in error["message"]
        if param is not None:
            assert error["param"] == param


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_would_change_the_answer_is_refused(server: Server, name: str) -> None:
    path, body = CHAT, {"messages": MESSAGES}
    if name in ChatRequest.__struct_fields__:
        path, body = COMPLETIONS, {"prompt": "a"}
    error = refuse(server, path, {**body, name: {"a": 1}}).error
    assert error["param"] == name
    assert REFUSED[name] in error["message"]
    off: tuple[Any, ...] = (None, False, [], "none", "auto")
    for value in off:
        answer = server.post(path, {**body, "max_tokens": 1, name: value})
        assert answer.status == 200, answer.data


def test_no_field_is_known_and_ignored() -> None:
    for kind in (ChatRequest, CompletionRequest, EmbeddingRequest):
        assert not IGNORED & set(kind.__struct_fields__)
    assert not IGNORED & set(REFUSED)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON: it is empty"),
        (b"{", "no JSON"),
        (b'{"prompt": "a"} x', "no JSON"),
        (b'{"prompt": NaN}', "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
        (b"\xef\xbb\xbf{}", "no JSON: it begins with a byte order mark"),
        (b'{"prompt": "\xff"}', "no JSON: it is not UTF-8 text"),
        (b'{"prompt": "\\ud800"}', r"no JSON: \ud800 at byte 12 is half of a surrogate pair"),
        (b'{"prompt": "\\\\ud83d\\ud83d\\uDE00\\udc00"}', r"no JSON: \udc00 at byte 31 is half"),
        (b'{"prompt": "\\ud83d\\ude00"', "no JSON: Input data was truncated"),
        (b"[1]", "no JSON object"),
        (b'"text"', "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "more than 64 nested"),
        (b'{"a":' * 30_000, "more than 64 nested"),
        (b'{"prompt": "a", "n": 1' + b"0" * 400 + b"}", "n"),
    ],
)
def test_a_body_that_is_no_object_is_refused(server: Server, body: bytes, says: str) -> None:
    assert says in refuse(server, COMPLETIONS, body).error["message"]


def test_a_compressed_body_is_refused(server: Server) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "a"}, {"Content-Encoding": "gzip"})
    assert answer.status == 415
    assert "Content-Encoding: 'gzip' is not supported" in answer.error["message"]


def test_brackets_in_a_text_are_not_nested() -> None:
    text = '[{"\\' * 1000
    assert parse_json(json.dumps({"a": text}).encode()) == {"a": text}
    deepest = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)
    assert parse_json(b'{"b": "\\"[\\\\", "a": ' + deepest + b"}")


@pytest.mark.parametrize("end", [b'"' + b"a" * 500_000, b'"' + b'\\"' * 250_000, b'"' * 500_001, b'"a\\'])
def test_the_depth_of_a_text_without_end_takes_linear_time(end: bytes) -> None:
    """A pattern that goes back over what it has read would take hours."""
    with pytest.raises(HttpError, match=r"no JSON|nested|more than"):
        parse_json(b"[[]" * 40 + end)


@pytest.mark.parametrize(
    ("item", "most", "named"),
    [
        (b"[],", MAX_PARTS - 3, "strings, lists and objects"),
        (b'"a",', MAX_PARTS - 3, "strings, lists and objects"),
        (rb'"\\",', MAX_PARTS - 3, "strings, lists and objects"),
        (b'{"a":0},', MAX_PARTS // 2 - 2, "strings, lists and objects"),
        (b"1,", MAX_VALUES - 1, "values"),
    ],
)
def test_the_values_of_a_body_are_bounded_before_they_are_decoded(item: bytes, most: int, named: str) -> None:
    """A server with millions of small objects to make answers nothing else meanwhile."""
    assert parse_json(b'{"a": [' + item * most + b"0]}")
    with pytest.raises(HttpError, match=f"the body has more than [0-9]+ {named}"):
        parse_json(b'{"a": [' + item * (most + 2) + b"0]}")


def test_commas_brackets_and_quotes_in_a_text_are_no_values() -> None:
    text = ',["{\\' * 600_000
    assert parse_json(json.dumps({"a": text}).encode()) == {"a": text}


def test_health_does_not_wait_for_a_body_of_millions_of_lists(server: Server) -> None:
    body = b'{"prompt": [' + b"[]," * 2_000_000 + b"0]}"
    slowest, ended = 0.0, threading.Event()

    def probe() -> None:
        nonlocal slowest
        while not ended.wait(0.005):
            begin = time.perf_counter()
            assert server.get("/health").status == 200
            slowest = max(slowest, time.perf_counter() - begin)

    prober = threading.Thread(target=probe)
    prober.start()
    for _ in range(3):
        assert "lists and objects" in refuse(server, COMPLETIONS, body).error["message"]
    ended.set()
    prober.join()
    assert 0 < slowest < 0.2


def test_a_body_that_is_too_long_is_refused(serve: Serve) -> None:
    server = serve(max_body=1000, n_ctx=64)
    for size in (1000, 3_000_000):  # of which most arrives after the answer
        answer = server.post(COMPLETIONS, {"prompt": "a" * size})
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    with server.client() as client:  # in chunks, so that the length is not known before
        client.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        client.socket.sendall(b"200\r\n" + b" " * 512 + b"\r\n")
        client.socket.sendall(b"200\r\n" + b" " * 512 + b"\r\n")
        assert b" 413 " in client.until(b"\n")
    assert server.post(COMPLETIONS, {"prompt": "a" * 20, "max_tokens": 1}).status == 200


def test_a_body_that_is_too_slow_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(n_ctx=64)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.05)
    with server.client() as client:
        client.send(COMPLETIONS, b'{"prompt"', length=1000)
        answer = client.rest()
    assert b" 408 " in answer.partition(b"\r\n")[0]
    assert b"connection: close" in answer.lower()
    assert b"did not arrive" in answer
    server.until_idle()


def test_a_prompt_that_is_too_long_is_refused(server: Server) -> None:
    for body in ({"prompt": [7] * 600}, {"prompt": [[7], [7] * 600]}):
        answer = server.post(COMPLETIONS, {**body, "stream": True})
        assert answer.status == 400
        assert "512" in answer.error["message"]
        assert (answer.error["param"], answer.error["code"]) == ("prompt", "context_length_exceeded")
    long = "a b c " * 300
    for path, field, body in (
        (CHAT, "messages", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", "input", {"input": long}),
    ):
        error = refuse(server, path, body).error
        assert "512" in error["message"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1", "/v1/chat", "/v1/completions/", "/V1/models", "/%2e%2e/etc"]
)
def test_an_unknown_path_is_not_found(server: Server, path: str) -> None:
    for method in ("GET", "POST"):
        answer = server.request(method, path, {} if method == "POST" else None)
        assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("HEAD", COMPLETIONS, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("OPTIONS", CHAT, "POST"),
        ("BREW", CHAT, "POST"),
    ],
)
def test_a_wrong_method_is_answered_with_the_right_one(
    server: Server, method: str, path: str, allowed: str
) -> None:
    if method == "BREW":  # no method of HTTP: refused before the application
        assert server.request(method, path).status == 400
        return
    answer = server.request(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert (answer.data == b"") == (method == "HEAD")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version", "/openapi.json"])
def test_head_is_get_without_its_body(server: Server, path: str) -> None:
    got, head = server.get(path), server.request("HEAD", path)
    assert (head.status, head.data) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":  # which changes
        assert head.headers["content-length"] == str(len(got.data))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": MESSAGES}),
        (EMBEDDINGS, {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_another_model_is_not_found(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, {**body, "model": "gpt-9"})
    assert answer.status == 404
    assert (answer.error["param"], answer.error["code"]) == ("model", "model_not_found")
    assert "'gpt-9'" in answer.error["message"]
    assert "'demo'" in answer.error["message"]
    few = {"max_tokens": 1} if path in (COMPLETIONS, CHAT) else {}
    pooling = {"pooling": "mean"} if path == EMBEDDINGS else {}
    for name in ("demo", "default", None):
        assert server.post(path, {**body, **few, **pooling, "model": name}).status == 200


@pytest.mark.parametrize("given", ["abc-1.2:3_4", "x" * 128])
def test_an_id_of_the_client_is_returned(server: Server, given: str) -> None:
    for method, path in (("GET", "/health"), ("GET", "/nothing"), ("POST", COMPLETIONS)):
        answer = server.request(method, path, {"prompt": 1}, {"X-Request-Id": given})
        assert answer.headers["x-request-id"] == given
    made = server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": given})
    assert made["id"] == f"cmpl-{given}"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "a\tb"])
def test_a_strange_id_of_the_client_is_replaced(server: Server, given: str) -> None:
    ids = [
        server.request("GET", "/health", headers={"X-Request-Id": given}).headers["x-request-id"]
        for _ in range(2)
    ]
    assert given not in ids
    assert ids[0] != ids[1]
