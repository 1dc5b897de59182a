"""Functions that velo-fuzz calls: the scan that runs before C, and damage to a document.

`fuzz/native.py` starts velo-fuzz, and makes its seeds with this module.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from pyvelo.errors import ModelError
from pyvelo.models.gguf_parts import scan_model
from scripts.fuzz._damage import damage
from scripts.fuzz._document import Document, parse_document, read_document, write_document

TOKENS = (
    b"<unk>",
    b"<s>",
    b"</s>",
    b"<0x0A>",
    b"\xe2\x96\x81",
    b"O",
    b"n",
    b"c",
    b"e",
    b"ce",
    b"\xe2\x96\x81O",
)
TYPES = (2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1)  # unknown, control, a byte, normal


def passes(path: str) -> bool:
    """Return whether the scan lets the file through to C."""
    try:
        scan_model(path)
    except ModelError:
        return False
    return True


def mutate(data: bytes, seed: int, max_size: int) -> bytes:
    """Return `data` with damage drawn from `seed`; b"" if it is no GGUF or becomes too long."""
    draw = random.Random(seed)
    try:
        document = parse_document(data)
        for _ in range(draw.choice((1, 1, 2, 3))):
            damage(draw, document)
        changed = write_document(document)
    except Exception:  # any bytes come here: they may fail to parse, to change or to be written
        return b""
    return changed if len(changed) <= max_size else b""


def without_weights(data: bytes) -> bytes:
    """Return the file `data` with zeros as weights, which compress well."""
    try:
        document = parse_document(data)
    except Exception:  # not a valid file
        return data
    for entry in document.tensors:
        entry.data = bytes(len(entry.data))
    changed = write_document(document)
    return changed if len(changed) == len(data) else data


def small_vocabulary(path: Path) -> bytes:
    """Return the model at `path` with a vocabulary of a few tokens and an embedding to match."""
    document = read_document(path)
    before = _cut_vocabulary(document)
    for index, entry in enumerate(document.tensors):
        if before in entry.shape:
            axis = entry.shape.index(before)
            shape = [len(TOKENS) if at == axis else extent for at, extent in enumerate(entry.shape)]
            data = entry.data[: len(entry.data) // before * len(TOKENS)]
            document.tensors[index] = replace(entry, shape=shape, data=data)
    return write_document(document)


def _cut_vocabulary(document: Document) -> int:
    """Cut the vocabulary; return how many tokens it had."""
    count = 0
    lists = {
        "tokens": list(TOKENS),
        "scores": [-float(n) for n in range(len(TOKENS))],
        "token_type": list(TYPES),
    }
    for name, items in lists.items():
        value = document.find(f"tokenizer.ggml.{name}")
        if value is not None:
            count, value.data = len(value.data), items
    return count
