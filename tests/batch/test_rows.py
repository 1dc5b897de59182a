"""Lines of the input and of the output."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.batch.lines import Lines
from pyvelo.batch.rows import (
    HEAD,
    MAX_LINE,
    URLS,
    Result,
    Row,
    duplicate,
    parse_result,
    parse_row,
    result_line,
)
from pyvelo.server.routes import ENDPOINTS

from .batches import row


def fault_of(line: bytes | None) -> tuple[int, str, str | None]:
    """Return status, message and field of the fault of a line."""
    fault = parse_row(7, line).fault
    assert fault is not None
    assert fault.message.startswith("line 7: ")
    return fault.status, fault.message.removeprefix("line 7: "), fault.param


def test_a_row_is_taken_as_it_is() -> None:
    body = b'{"prompt": "x" ,  "n":1e2}'
    line = (
        b'{"body": '
        + body
        + b', "url": "/v1/completions", "more": [1], "method": "POST", "custom_id": "a"}\r'
    )
    assert parse_row(1, line) == Row(1, len(line), "a", "/v1/completions", body)
    assert parse_row(1, b"\xef\xbb\xbf" + row("é 猫")).custom_id == "é 猫"


@pytest.mark.parametrize("url", URLS)
def test_the_server_has_every_path(url: str) -> None:
    assert "POST" in ENDPOINTS[url]
    assert parse_row(1, row("a", url=url)).fault is None
    assert parse_row(1, row("a", url=url.removeprefix("/v1"))).fault is None


@pytest.mark.parametrize(
    ("line", "status", "says", "param"),
    [
        (b"nonsense", 400, "it is no JSON object of a request: JSON is malformed", None),
        (b"[]", 400, "it is no JSON object of a request: it must be an object, got a list", None),
        (row("a")[:-1], 400, "it is no JSON object of a request", None),
        (row("a") + b"x", 400, "it is no JSON object of a request", None),
        (b"\xff", 400, "it is no JSON object of a request", None),
        (b'{"custom_id": "\xff"}', 400, "it is no JSON object of a request: it is not UTF-8 text", None),
        (b"[" * 100_000, 400, "it is no JSON object of a request", None),
        (b'{"custom_id": ' + b"[" * 100_000, 400, "it is no JSON object of a request: it is nested", None),
        (None, 413, f"it is longer than {MAX_LINE} bytes", None),
        (b"{}", 400, "custom_id: give a text", "custom_id"),
        (row(1), 400, "custom_id: give a text", "custom_id"),  # type: ignore[arg-type]
        (row(""), 400, "custom_id: give a text", "custom_id"),
        (row("a", url="/v1/models"), 404, "url is '/v1/models': give one of /v1/chat", "url"),
        (row("a", url="/v1/sessions"), 404, "url is '/v1/sessions'", "url"),
        (row("a", url=None), 404, "url is missing", "url"),  # type: ignore[arg-type]
        (row("a", url=3), 404, "url is no text", "url"),  # type: ignore[arg-type]
        (row("a", method="GET"), 405, "method is 'GET': give POST", "method"),
        (row("a", method=None), 405, "method is missing", "method"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', 400, "body is missing", "body"),
        (row("a", {"prompt": "x", "stream": True}), 400, "stream: a batch has no streams", "stream"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fault_is_named(line: bytes | None, status: int, says: str, param: str | None) -> None:
    found = fault_of(line)
    assert found[0] == status
    assert found[1].startswith(says)
    assert found[2] == param


def test_a_fault_keeps_the_custom_id() -> None:
    for line in (row("a", url="x"), row("a", {"stream": True}), row("a", method="GET")):
        assert parse_row(1, line).custom_id == "a"


@pytest.mark.parametrize("body", ["x", None, [], 3, {"stream": "true"}, {"stream": False}])
def test_the_application_judges_bodies(body: Any) -> None:
    """Its errors are the server's, also for a body that is no object."""
    found = parse_row(1, row("a", body))
    assert (found.fault, json.loads(found.body)) == (None, body)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_row(line: bytes) -> None:
    found = parse_row(3, line)
    assert found.fault is not None
    assert json.loads(result_line(found, "1f", 400, b"{}"))["error"]["line"] == 3


def test_a_result_is_one_line_in_openai_s_format() -> None:
    line = result_line(Row(3, 10, 'a "quoted"\nid'), "1f", 200, b'{"x":1}')
    assert line.startswith(HEAD)
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "id": "batch_req_1f",
        "custom_id": 'a "quoted"\nid',
        "response": {"status_code": 200, "request_id": "1f", "body": {"x": 1}},
        "error": None,
    }
    assert parse_result(line) == Result('a "quoted"\nid', None, failed=False)


def test_a_result_without_a_custom_id_has_the_line() -> None:
    twice = duplicate(Row(9, 10, "a"), 4)
    assert twice.fault is not None
    line = result_line(twice, "1f", twice.fault.status, b"{}")
    message = "line 9: line 4 has the custom_id 'a', too: give another one"
    assert json.loads(line)["error"] == {"code": "duplicate_custom_id", "message": message, "line": 9}
    assert json.loads(line)["custom_id"] is None
    assert parse_result(line) == Result(None, 9, failed=True)


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"x", b"{}", b"[]", b'{"custom_id": "a"}', b'{"id": "x", "custom_id": 1, "response": null}'),
        *(row("a"), b'{"id": "x", "custom_id": null, "response": null, "error": null}'),
    ],
)
def test_what_is_no_result_is_none(line: bytes) -> None:
    assert parse_result(line) is None


@given(st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\n", b" "))), st.data())
def test_lines_are_the_same_however_they_are_read(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"\n".join(lines)
    reader, found, at = Lines(8), [], 0
    while at < len(whole):
        size = data.draw(st.integers(1, 9))
        found += reader.feed(whole[at : at + size])
        at += size
    found += reader.end()
    expected = [line if len(line) <= 8 else None for line in lines]
    if expected and expected[-1] == b"":  # no line begins behind the last end
        expected.pop()
    assert found == expected
