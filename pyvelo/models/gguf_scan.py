"""An exact scan of a GGUF's header and tensor table, before any C code opens the file.

Every length is checked, with Python's unbounded integers, against the rest of the file. Tensor data is not
read and vocabularies are skipped, so a scan takes 0.1 s or less.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from pyvelo.errors import ModelError
from pyvelo.kv.types import TENSOR_TYPES, TensorType

__all__ = ["GgufArray", "GgufSummary", "GgufTensor", "QuantShare", "quantization_of", "scan"]

Scalar = int | float | bool | str

MAX_HEADER_BYTES = 256 << 20
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
MAX_LAYERS = 512
MAX_NAME_BYTES = 63
INT64_MAX = (1 << 63) - 1

STRING, ARRAY = 8, 9
# value type: name, struct code
SCALARS: Mapping[int, tuple[str, str]] = {
    0: ("u8", "<B"),
    1: ("i8", "<b"),
    2: ("u16", "<H"),
    3: ("i16", "<h"),
    4: ("u32", "<I"),
    5: ("i32", "<i"),
    6: ("f32", "<f"),
    7: ("bool", "<?"),
    10: ("u64", "<Q"),
    11: ("i64", "<q"),
    12: ("f64", "<d"),
}


@dataclass(frozen=True)
class GgufArray:
    """Type name and length of a skipped array.

    `largest` and `smallest` are set for arrays of whole numbers that are no longer than a model has layers.
    """

    type_name: str
    count: int
    largest: int | None = field(default=None, compare=False)
    smallest: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class GgufTensor:
    """Entry of a tensor. `shape` has GGUF's order, row length first; `offset` is from the file's start."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class QuantShare:
    """Share of a tensor type in a model."""

    tensors: int
    elements: int
    n_bytes: int


@dataclass(frozen=True)
class GgufSummary:
    """Metadata and tensor table of a GGUF.

    `quantization` maps a type's name to its share, largest first; `types` a key of `metadata` to its type.
    """

    path: str
    version: int
    architecture: str
    metadata: Mapping[str, Scalar]
    arrays: Mapping[str, GgufArray]
    tensors: tuple[GgufTensor, ...]
    quantization: Mapping[str, QuantShare]
    n_params: int
    tensor_bytes: int
    data_offset: int
    file_bytes: int
    types: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def of_architecture(self, key: str) -> Scalar | None:
        """Return the value of `<architecture>.<key>`, None if it is absent or an array."""
        return self.metadata.get(f"{self.architecture}.{key}")


def scan(path: str | os.PathLike[str]) -> GgufSummary:
    """Read the header of the GGUF at `path`.

    Raises:
        ModelError: the file cannot be read, or contradicts itself; the text has the place in the file.
    """
    shown = os.fspath(path)
    try:
        _check_kind(shown, os.stat(path).st_mode)  # before it is opened: a pipe would wait for its other end
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            _check_kind(shown, status.st_mode)
            return _scan(shown, _Cursor(file, shown, status.st_size))
    except OSError as error:
        raise ModelError(f"cannot read {shown}: {error.strerror or error}") from error


def _check_kind(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise ModelError(f"{path} is a directory: name the GGUF file in it")
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is not a regular file")


class _Cursor:
    """Reader of a file's header, which loads as much as is needed; `at` is the next byte."""

    def __init__(self, file: BinaryIO, path: str, size: int) -> None:
        self.file = file
        self.path = path
        self.size = size
        self.data = bytearray()
        self.at = 0
        self.where = "header"

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {what}")

    def need(self, n_bytes: int) -> None:
        """Load `n_bytes` from `at` on; ModelError if the file is shorter."""
        end = self.at + n_bytes
        if end <= len(self.data):
            return
        if end > self.size:
            raise self.damaged(
                f"{self.where} at byte {self.at} wants {n_bytes} bytes, but only "
                f"{max(0, self.size - self.at)} are left (is the download complete?)"
            )
        if end > MAX_HEADER_BYTES:
            raise self.damaged(f"{self.where} ends beyond {MAX_HEADER_BYTES >> 20} MiB, which no header does")
        self.data += self.file.read(max(end - len(self.data), len(self.data), 1 << 16))
        if end > len(self.data):
            raise self.damaged("it became shorter while it was read")

    def skip(self, n_bytes: int) -> None:
        self.need(n_bytes)
        self.at += n_bytes

    def number(self, code: str) -> int | float | bool:
        size = struct.calcsize(code)
        self.need(size)
        value: int | float | bool = struct.unpack_from(code, self.data, self.at)[0]
        self.at += size
        return value

    def u32(self) -> int:
        return int(self.number("<I"))

    def u64(self) -> int:
        return int(self.number("<Q"))

    def text(self) -> str:
        length = self.u64()
        self.need(length)
        value = self.data[self.at : self.at + length].decode("utf-8", "replace")
        self.at += length
        return value

    def skip_texts(self, count: int) -> None:
        """Skip `count` strings. It runs for every word of a vocabulary, so it makes few calls."""
        unpack, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        last = len(data) - 8
        for _ in range(count):
            if at > last:
                self.at = at
                self.need(8)
                last = len(data) - 8
            at += 8 + unpack(data, at)[0]
        self.at = at
        self.need(0)


def _scan(path: str, cursor: _Cursor) -> GgufSummary:
    version, n_tensors, n_values = _head(cursor)
    metadata, arrays, types = _values(cursor, n_values)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise cursor.damaged("it does not name its architecture (general.architecture)")
    alignment = _alignment(cursor, metadata)
    entries = _tensor_table(cursor, n_tensors)
    cursor.where = "tensor data"
    start = -(-cursor.at // alignment) * alignment if entries else cursor.at
    tensors = tuple(_placed(cursor, entries, start, alignment))
    return GgufSummary(
        path=path,
        version=version,
        architecture=architecture,
        metadata=metadata,
        arrays=arrays,
        tensors=tensors,
        quantization=quantization_of(tensors),
        n_params=sum(_elements(t.shape) for t in tensors),
        tensor_bytes=sum(t.n_bytes for t in tensors),
        data_offset=start,
        file_bytes=cursor.size,
        types=types,
    )


def _head(cursor: _Cursor) -> tuple[int, int, int]:
    """Return version, number of tensors, and number of metadata values."""
    cursor.need(min(4, cursor.size))
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        seen = f"it starts with {magic!r}" if magic else "it is empty"
        raise ModelError(f"{cursor.path} is not a GGUF file: {seen}")
    cursor.at = 4
    version = cursor.u32()
    if version & 0xFFFF == 0 and version:
        raise ModelError(f"{cursor.path} is a big-endian GGUF; convert it to little-endian")
    if version not in (2, 3):
        raise ModelError(f"{cursor.path} is a GGUF of version {version}; versions 2 and 3 can be read")
    n_tensors, n_values = cursor.u64(), cursor.u64()
    left = cursor.size - cursor.at
    # the shortest value takes 8 (key) + 1 + 4 (type) + 1 bytes, the shortest tensor 8 + 4 + 4 + 8
    if n_values * 14 + n_tensors * 24 > left:
        raise cursor.damaged(f"{n_values} metadata values and {n_tensors} tensors cannot fit in {left} bytes")
    return version, n_tensors, n_values


def _values(cursor: _Cursor, count: int) -> tuple[dict[str, Scalar], dict[str, GgufArray], dict[str, str]]:
    """Return the metadata, its arrays, and the types of the values that are no arrays."""
    metadata: dict[str, Scalar] = {}
    types: dict[str, str] = {}
    arrays: dict[str, GgufArray] = {}
    for index in range(count):
        cursor.where = f"the key of metadata value {index}"
        key = cursor.text()
        if not key:
            raise cursor.damaged(f"metadata value {index} has an empty key")
        if key in metadata or key in arrays:
            raise cursor.damaged(f"metadata key {key!r} appears twice")
        cursor.where = f"metadata value {key!r}"
        kind = cursor.u32()
        if kind == ARRAY:
            arrays[key] = _array(cursor, key)
        elif kind == STRING:
            metadata[key], types[key] = cursor.text(), "string"
        elif kind in SCALARS:
            types[key], code = SCALARS[kind]
            metadata[key] = cursor.number(code)
        else:
            raise cursor.damaged(f"metadata value {key!r} has the unknown type {kind}")
    return metadata, arrays, types


def _array(cursor: _Cursor, key: str) -> GgufArray:
    kind, count = cursor.u32(), cursor.u64()
    if kind == STRING:
        if count * 8 > cursor.size - cursor.at:
            raise cursor.damaged(f"{cursor.where} claims {count} strings, more than the file can hold")
        cursor.skip_texts(count)
        return GgufArray("string", count)
    if kind not in SCALARS:
        raise cursor.damaged(f"metadata array {key!r} has elements of the unknown type {kind}")
    name, code = SCALARS[kind]
    size = count * struct.calcsize(code)
    cursor.need(size)
    largest = smallest = None
    if 0 < count <= MAX_LAYERS and name[0] in "ui":
        numbers = struct.unpack_from(f"<{count}{code[1]}", cursor.data, cursor.at)
        largest, smallest = max(numbers), min(numbers)
    cursor.skip(size)
    return GgufArray(name, count, largest, smallest)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Scalar]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        raise cursor.damaged(f"general.alignment must be a power of two, not {value!r}")
    if value > MAX_ALIGNMENT:
        raise cursor.damaged(f"general.alignment is {value} bytes, but at most {MAX_ALIGNMENT} makes sense")
    return value


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    layout: TensorType
    offset: int


def _tensor_table(cursor: _Cursor, count: int) -> list[_Entry]:
    names: set[str] = set()
    entries = []
    for index in range(count):
        cursor.where = f"the entry of tensor {index}"
        name = cursor.text()
        if len(name.encode()) > MAX_NAME_BYTES:
            raise cursor.damaged(f"the name of tensor {index} is longer than {MAX_NAME_BYTES} bytes")
        if name in names:
            raise cursor.damaged(f"tensor {name!r} appears twice")
        names.add(name)
        cursor.where = f"the entry of tensor {name!r}"
        n_dims = cursor.u32()
        if n_dims > MAX_DIMS:
            raise cursor.damaged(f"tensor {name!r} has {n_dims} dimensions; at most {MAX_DIMS} are possible")
        shape = tuple(cursor.u64() for _ in range(n_dims))
        if not all(1 <= extent <= INT64_MAX for extent in shape):
            raise cursor.damaged(f"tensor {name!r} cannot have the shape {list(shape)}")
        kind, offset = cursor.u32(), cursor.u64()
        if kind not in TENSOR_TYPES:
            raise cursor.damaged(f"tensor {name!r} has the unknown type {kind}")
        layout = TENSOR_TYPES[kind]
        row = shape[0] if shape else 1
        if row % layout.group:
            raise cursor.damaged(
                f"tensor {name!r} has rows of {row} elements, "
                f"no multiple of {layout.name}'s group of {layout.group}"
            )
        entries.append(_Entry(name, shape, layout, offset))
    return entries


def _placed(cursor: _Cursor, entries: list[_Entry], start: int, alignment: int) -> list[GgufTensor]:
    """Check that tensors follow each other, at multiples of the alignment, inside the file; return them."""
    tensors = []
    expected = 0
    for entry in entries:
        n_bytes = _elements(entry.shape) // entry.layout.group * entry.layout.group_bytes
        if entry.offset != expected:
            raise cursor.damaged(
                f"tensor {entry.name!r} is at offset {entry.offset}, but {expected} was expected"
            )
        end = start + entry.offset + n_bytes
        if end > cursor.size:
            raise cursor.damaged(
                f"tensor {entry.name!r} of shape {list(entry.shape)} ends at byte {end}, "
                f"but the file has {cursor.size} (is the download complete?)"
            )
        tensors.append(GgufTensor(entry.name, entry.layout.name, entry.shape, start + entry.offset, n_bytes))
        expected += -(-n_bytes // alignment) * alignment
    return tensors


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


def quantization_of(tensors: tuple[GgufTensor, ...]) -> dict[str, QuantShare]:
    """Return the share of each tensor type, the largest first."""
    shares: dict[str, QuantShare] = {}
    for tensor in tensors:
        old = shares.get(tensor.type_name, QuantShare(0, 0, 0))
        shares[tensor.type_name] = QuantShare(
            old.tensors + 1, old.elements + _elements(tensor.shape), old.n_bytes + tensor.n_bytes
        )
    return dict(sorted(shares.items(), key=lambda share: -share[1].n_bytes))
