"""JSON of a body, with bounds on its depth and on the number of its values."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pyvelo.server.errors import HttpError
from pyvelo.server.wording import is_no_utf8

__all__ = ["MAX_DEPTH", "MAX_PARTS", "MAX_VALUES", "parse_json"]

MAX_DEPTH = 64
"""Most nested lists and objects of a body."""
MAX_PARTS = 1 << 17
"""Most strings, lists and objects of a body: 10 ms of decoding, which no other thread can interrupt."""
MAX_VALUES = 1 << 19
"""Most values of a body, such as token ids."""

_decode = msgspec.json.Decoder().decode
_ESCAPE = re.compile(rb"(?s)\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)")
"""Escape of a text; its group is one half of a surrogate pair."""
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def parse_json(body: bytes) -> Any:
    """Return the object of a body.

    Raises: HttpError if it is no JSON object, too deep, or has too many values.
    """
    _check_shape(body)
    try:
        found = _decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HttpError(400, f"the body is no JSON: {_reason(body, error)}") from None
    if not isinstance(found, dict):
        raise HttpError(400, "the body is no JSON object: give {...}")
    return found


def _reason(body: bytes, error: Exception) -> str:
    """Return what is wrong with a body that cannot be decoded."""
    if not body.strip():
        return "it is empty"
    if is_no_utf8(error):
        return "it is not UTF-8 text"
    if body.startswith(b"\xef\xbb\xbf"):
        return "it begins with a byte order mark: leave that out"
    half = next((found for found in _ESCAPE.finditer(body) if found[1]), None)
    if half is not None:
        text, at = half[0].decode(), half.start()
        return f"{text} at byte {at} is half of a surrogate pair, and no character: send both halves"
    return str(error).partition(" - at `")[0]


def _check_shape(body: bytes) -> None:
    """Raise HttpError if a body is too deep or has too many values, before it is decoded."""
    n_brackets = body.count(b"[") + body.count(b"{")
    if n_brackets <= MAX_DEPTH and body.count(b'"') <= MAX_PARTS and body.count(b",") < MAX_VALUES:
        return
    # brackets and commas in strings do not count
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    n_strings = plain.count(b'"') // 2
    _check_number(n_strings, MAX_PARTS, "strings, lists and objects")
    outside = b"".join(plain.split(b'"')[::2])
    n_brackets = outside.count(b"[") + outside.count(b"{")
    _check_number(n_strings + n_brackets, MAX_PARTS, "strings, lists and objects")
    _check_number(outside.count(b",") + 1, MAX_VALUES, "values")
    if n_brackets > MAX_DEPTH:
        _check_number(_depth(outside.translate(None, _NO_BRACKETS)), MAX_DEPTH, "nested lists and objects")


def _check_number(n: int, most: int, what: str) -> None:
    if n > most:
        raise HttpError(400, f"the body has more than {most} {what}")


def _depth(brackets: bytes) -> int:
    depth = deepest = 0
    for byte in brackets:
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest
