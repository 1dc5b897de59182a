"""Rows of a batch: lines of the input, what they ask, and the lines of their results.

The format is OpenAI's for batch files. A line of the input is a request::

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A line of the output is its result, with `error` only if the row itself is wrong, and no request::

    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct

from pyvelo.server.errors import HttpError
from pyvelo.server.routes import Router
from pyvelo.server.wording import in_words, is_no_utf8

__all__ = [
    "HEAD",
    "MAX_LINE",
    "URLS",
    "Result",
    "Row",
    "duplicate",
    "parse_result",
    "parse_row",
    "result_line",
]

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/input_tokens",
    "/completion",
    "/apply-template",
    "/tokenize",
    "/detokenize",
)
"""Paths of the server that answer one body with one body, and keep nothing that another row could need."""

MAX_LINE = (8 << 20) + (64 << 10)
"""Longest line of the input in bytes: a server's longest body, and what is around it."""

HEAD = b'{"id":"batch_req_'
"""First bytes of each line of the output."""

_BOM = b"\xef\xbb\xbf"
_route_of = Router(URLS)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Row:
    """Line of the input.

    number: of the line, from 1.
    size: of the line in bytes.
    custom_id: None if the line has none, or a wrong one.
    fault: what is wrong with the row itself; it is not run then.
    """

    number: int
    size: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    fault: HttpError | None = None


class _Fields(Struct):
    custom_id: Raw = Raw(b"null")
    method: Raw = Raw(b"null")
    url: Raw = Raw(b"null")
    body: Raw = Raw()


class _Stream(Struct):
    stream: Any = False


class _Response(Struct):
    status_code: int


class _Error(Struct):
    line: int | None = None


class _Result(Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


@dataclass(frozen=True)
class Result:
    """Line of the output.

    line: number of the line of the input, if the result has no custom_id.
    failed: whether it has another status than 200.
    """

    custom_id: str | None
    line: int | None
    failed: bool


_fields = msgspec.json.Decoder(_Fields)
_stream = msgspec.json.Decoder(_Stream)
_result = msgspec.json.Decoder(_Result)
_plain = msgspec.json.Decoder()


def parse_row(number: int, line: bytes | None) -> Row:
    """Return the row of a line, with its fault if it is no request; None is a line that is too long."""
    if line is None:
        return Row(number, 0, fault=_fault(number, f"it is longer than {MAX_LINE} bytes", status=413))
    if number == 1:
        line = line.removeprefix(_BOM)
    size, custom_id = len(line), None
    try:
        given = _fields.decode(line)
        custom_id = _custom_id(number, _plain.decode(given.custom_id))
        url = _url(number, _plain.decode(given.method), _plain.decode(given.url))
        if not given.body:
            raise _fault(number, "body is missing: give the body of the request", "body")
        body = bytes(given.body)
        _check_stream(number, body)
    except HttpError as error:
        return Row(number, size, custom_id, fault=error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fault = _fault(number, f"it is no JSON object of a request: {_reason(error)}")
        return Row(number, size, custom_id, fault=fault)
    return Row(number, size, custom_id, url, body)


def _custom_id(number: int, given: Any) -> str:
    if isinstance(given, str) and given:
        return given
    raise _fault(number, "custom_id: give a text that no other row has, and not an empty one", "custom_id")


def _url(number: int, method: Any, url: Any) -> str:
    """Return the path of a request; raise HttpError if a batch has none such."""
    if not isinstance(url, str) or not _route_of(url)[0]:
        given = repr(url[:100]) if isinstance(url, str) else "missing" if url is None else "no text"
        raise _fault(number, f"url is {given}: give one of {', '.join(URLS)}", "url", status=404)
    if method != "POST":
        given = repr(method[:100]) if isinstance(method, str) else "missing" if method is None else "no text"
        raise _fault(number, f"method is {given}: give POST", "method", status=405)
    return url


def _check_stream(number: int, body: bytes) -> None:
    """Raise HttpError for a body that asks for a stream; the application finds all other faults of a body."""
    try:
        streams = _stream.decode(body).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if streams is True:
        raise _fault(number, "stream: a batch has no streams: leave it out, or give false", "stream")


def _fault(number: int, message: str, param: str | None = None, status: int = 400) -> HttpError:
    return HttpError(status, f"line {number}: {message}", param, code="invalid_row")


def duplicate(row: Row, first: int) -> Row:
    """Return a row whose custom_id an earlier line has: it is not run, and its result has no custom_id.

    So each custom_id of the output has one result.
    """
    message = f"line {first} has the custom_id {str(row.custom_id)[:100]!r}, too: give another one"
    fault = HttpError(409, f"line {row.number}: {message}", "custom_id", code="duplicate_custom_id")
    return Row(row.number, row.size, fault=fault)


def _reason(error: Exception) -> str:
    if is_no_utf8(error):
        return "it is not UTF-8 text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return in_words(error)[0]


def result_line(row: Row, request_id: str, status: int, body: bytes) -> bytes:
    """Return the line of a result; `body` is JSON without line ends."""
    error: Mapping[str, Any] | None = None
    if row.fault is not None:
        error = {"code": row.fault.code, "message": row.fault.message, "line": row.number}
    name = request_id.encode()
    return b'%s%s","custom_id":%s,"response":{"status_code":%d,"request_id":"%s","body":%s},"error":%s}\n' % (
        HEAD,
        name,
        _encode(row.custom_id),
        status,
        name,
        body,
        _encode(error),
    )


def parse_result(line: bytes) -> Result | None:
    """Return the result of a line of the output; None if it is none."""
    try:
        found = _result.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    number = None if found.error is None else found.error.line
    if found.custom_id is None and number is None:
        return None
    failed = found.response is None or found.response.status_code != 200
    return Result(found.custom_id, number if found.custom_id is None else None, failed)
