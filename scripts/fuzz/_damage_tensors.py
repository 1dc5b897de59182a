"""Seeded damage to the tensor table and the weights of a GGUF."""

from __future__ import annotations

import random

from scripts.fuzz._document import Document, Entry

NUMBERS = (
    0, 1, 2, 3, 5, 7, 16, 31, 33, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513, 1000, 4096, 65535,
    65536, 1 << 20, (1 << 24) + 1, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -32, -(1 << 31), -(1 << 63),
)  # fmt: skip
TENSOR_KINDS = (
    0, 1, 2, 3, 6, 7, 8, 9, 10, 12, 14, 15, 16, 19, 20, 23, 24, 26, 27, 28, 29, 30, 34, 39, 40, 41, 4,
    99,
)  # fmt: skip
MAX_DATA = 1 << 22


def _tensor(draw: random.Random, document: Document) -> Entry | None:
    return draw.choice(document.tensors) if document.tensors else None


def reshape(draw: random.Random, document: Document) -> None:
    """Change the extents of a tensor."""
    entry = _tensor(draw, document)
    if entry is None:
        return
    match draw.randrange(6):
        case 0:
            entry.shape.reverse()
        case 1:
            entry.shape.append(draw.choice((0, 1, 1, 2, 1 << 32)))
        case 2 if entry.shape:
            entry.shape[draw.randrange(len(entry.shape))] = draw.choice(NUMBERS)
        case 3 if entry.shape:
            entry.shape.pop()
        case 4 if len(entry.shape) > 1 and entry.shape[0] % 64 == 0:
            entry.shape[0] //= 2
            entry.shape[1] *= 2
        case _ if entry.shape:
            _resize(entry, entry.shape[-1] + draw.choice((-1, 1, 32, -32, entry.shape[-1])))


def _resize(entry: Entry, extent: int) -> None:
    """Change the number of rows of a tensor, and its data with it."""
    extent = max(0, extent)
    whole = len(entry.data) * extent // max(1, entry.shape[-1])
    if whole <= MAX_DATA:
        entry.data = (entry.data * (whole // max(1, len(entry.data)) + 1))[:whole]
    entry.shape[-1] = extent


def resize_all(draw: random.Random, document: Document) -> None:
    """Change every tensor that has a certain extent, as if the model had been made so."""
    extents = sorted({extent for entry in document.tensors for extent in entry.shape})
    if not extents:
        return
    old, new = draw.choice(extents), draw.choice((1, 2, 16, 32, 33, 64, 96, 128, 160))
    for entry in document.tensors:
        if entry.shape and entry.shape[-1] == old:
            _resize(entry, new)


def other_kind(draw: random.Random, document: Document) -> None:
    """Set another type over the same bytes, or over as many as it needs."""
    entry = _tensor(draw, document)
    if entry is None:
        return
    entry.kind = draw.choice(TENSOR_KINDS)
    if draw.random() < 0.7:
        from pyvelo.kv.types import TENSOR_TYPES

        layout = TENSOR_TYPES.get(entry.kind)
        elements = 1
        for extent in entry.shape:
            elements *= extent
        if layout is not None and 0 <= elements * 8 < MAX_DATA:
            n_bytes = elements // layout.group * layout.group_bytes
            entry.data = draw.randbytes(n_bytes) if draw.random() < 0.3 else bytes(n_bytes)


def rename(draw: random.Random, document: Document) -> None:
    """Rename a tensor, or swap two names."""
    entry, other = _tensor(draw, document), _tensor(draw, document)
    if entry is None or other is None:
        return
    match draw.randrange(4):
        case 0:
            entry.name, other.name = other.name, entry.name
        case 1:
            entry.name = other.name
        case 2:
            entry.name = draw.choice((b"", b"x" * 63, b"x" * 64, b"\xff", b"rope_freqs.weight", b"blk.99.x"))
        case _:
            entry.name = entry.name.replace(b".weight", b".bias")


def add_tensor(draw: random.Random, document: Document) -> None:
    """Add a tensor that some architecture looks for."""
    width = draw.choice((1, 8, 16, 32, 64, 96))
    names = (
        "rope_freqs.weight", "output.weight", "output_norm.bias", "token_types.weight",
        "position_embd.weight",
        "token_embd_norm.weight", "blk.0.rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.attn_k.bias",
        "blk.0.attn_qkv.weight", "blk.0.attn_sinks.weight", "blk.0.ffn_gate_inp.weight",
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_q.scale", "blk.0.ffn_gate_exps.weight", "blk.2.attn_norm.weight", "cls.weight",
    )  # fmt: skip
    shape = [width, draw.choice((1, 2, 64))][: draw.choice((1, 1, 2))]
    elements = shape[0] * (shape[1] if len(shape) > 1 else 1)
    document.tensors.append(Entry(draw.choice(names).encode(), shape, 0, draw.randbytes(4 * elements)))


def drop_tensor(draw: random.Random, document: Document) -> None:
    """Remove a tensor."""
    if document.tensors:
        document.tensors.pop(draw.randrange(len(document.tensors)))


def misplace(draw: random.Random, document: Document) -> None:
    """Set another offset."""
    entry = _tensor(draw, document)
    if entry is not None:
        entry.offset = draw.choice((*NUMBERS, 32, 96))


def weights(draw: random.Random, document: Document) -> None:
    """Set weights that are noise, NaN, infinite or zero."""
    entry = _tensor(draw, document)
    if entry is not None:
        fill = draw.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x7c", b"\x00", b"\xff"))
        size = len(entry.data)
        entry.data = draw.randbytes(size) if draw.random() < 0.4 else (fill * (size // len(fill) + 1))[:size]
