"""GGUF as plain data that can be changed freely and written again, valid or not."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRING, ARRAY = 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""struct's code for each scalar type; a bool is a byte, so that it can be 2."""


@dataclass
class Value:
    """One metadata value. `data` is a number, bytes, or a list of these; `count` overrides its length."""

    key: bytes
    kind: int
    data: Any
    item_kind: int = 0
    count: int | None = None


@dataclass
class Entry:
    """One tensor. `offset` overrides its place; None: the real one."""

    name: bytes
    shape: list[int]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Document:
    """Whole file. `n_values` and `n_tensors` override the counts."""

    version: int
    values: list[Value]
    tensors: list[Entry]
    alignment: int = 32
    n_values: int | None = None
    n_tensors: int | None = None
    tail: bytes = field(default=b"", repr=False)

    def find(self, key: str) -> Value | None:
        """Return the value under `key`."""
        return next((value for value in self.values if value.key == key.encode()), None)

    @property
    def architecture(self) -> str:
        """Value of `general.architecture`, "" without one."""
        value = self.find("general.architecture")
        return value.data.decode("utf-8", "replace") if value and isinstance(value.data, bytes) else ""


class _Reader:
    """Reader of a valid file's bytes, from front to back."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += struct.calcsize("<" + code)
        return value

    def text(self) -> bytes:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at]

    def item(self, kind: int) -> Any:
        return self.text() if kind == STRING else self.number(CODES[kind])


def read_document(path: Path) -> Document:
    """Read a valid GGUF whose tensors lie one after the other."""
    return parse_document(path.read_bytes())


def parse_document(data: bytes) -> Document:
    """Read a file's bytes like `read_document`; raise any exception if they are not a valid file."""
    reader = _Reader(data)
    reader.at = 4
    version, n_tensors, n_values = reader.number("I"), reader.number("Q"), reader.number("Q")
    values = []
    for _ in range(n_values):
        key, kind = reader.text(), reader.number("I")
        if kind == ARRAY:
            item_kind, count = reader.number("I"), reader.number("Q")
            values.append(Value(key, kind, [reader.item(item_kind) for _ in range(count)], item_kind))
        else:
            values.append(Value(key, kind, reader.item(kind)))
    heads = []
    for _ in range(n_tensors):
        name, n_dims = reader.text(), reader.number("I")
        shape = [reader.number("Q") for _ in range(n_dims)]
        heads.append((name, shape, reader.number("I"), reader.number("Q")))
    start = -(-reader.at // 32) * 32
    ends = [start + head[3] for head in heads[1:]] + [len(reader.data)]
    tensors = [
        Entry(name, shape, kind, reader.data[start + offset : end])
        for (name, shape, kind, offset), end in zip(heads, ends, strict=True)
    ]
    return Document(version, values, tensors)


def write_document(document: Document) -> bytes:
    """Return the file's bytes; numbers are cut to the width of their type."""
    counts = (
        len(document.tensors) if document.n_tensors is None else document.n_tensors,
        len(document.values) if document.n_values is None else document.n_values,
    )
    parts = [b"GGUF", struct.pack("<IQQ", document.version, *counts)]
    parts += [_value(value) for value in document.values]
    align, at, data = document.alignment, 0, []
    for entry in document.tensors:
        offset = at if entry.offset is None else entry.offset
        parts.append(
            _text(entry.name)
            + struct.pack("<I", len(entry.shape))
            + b"".join(_number("Q", extent) for extent in entry.shape)
            + struct.pack("<I", entry.kind & 0xFFFFFFFF)
            + _number("Q", offset)
        )
        padding = bytes(-len(entry.data) % align)
        data += [entry.data, padding]
        at += len(entry.data) + len(padding)
    head = b"".join(parts)
    return b"".join([head, bytes(-len(head) % align), *data, document.tail])


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _number(code: str, value: float) -> bytes:
    if code in "fd":
        try:
            return struct.pack("<" + code, value)
        except OverflowError:
            return struct.pack("<" + code, float("inf"))
    size = struct.calcsize("<" + code)
    whole = int(value) if value == value and abs(value) != float("inf") else 0
    return (whole & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _item(kind: int, data: Any) -> bytes:
    if kind == STRING:
        return _text(data if isinstance(data, bytes) else str(data).encode())
    if kind not in CODES:
        return b""
    return _number(CODES[kind], data if isinstance(data, (int, float)) else 0)


def _value(value: Value) -> bytes:
    head = _text(value.key) + struct.pack("<I", value.kind & 0xFFFFFFFF)
    if value.kind == ARRAY:
        items = value.data if isinstance(value.data, list) else [value.data]
        count = len(items) if value.count is None else value.count
        body = b"".join(_item(value.item_kind, item) for item in items)
        return head + struct.pack("<I", value.item_kind) + _number("Q", count) + body
    one = value.data[0] if isinstance(value.data, list) and value.data else value.data
    return head + _item(value.kind, one)
