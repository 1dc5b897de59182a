"""Encoders with any number of buckets of relative positions, also where upstream aborts."""

from __future__ import annotations

from pathlib import Path

from scripts.fuzz._document import read_document, write_document
from scripts.models._shapes import Shape
from scripts.models.make import write_model

__all__ = ["Shape", "t5_with_buckets", "write_model"]


def t5_with_buckets(path: Path, buckets: int, ctx: int = 64) -> None:
    """Write a t5encoder of four heads."""
    write_model(Shape(arch="t5encoder", kv_heads=4, ctx=ctx), path)
    document = read_document(path)
    count = document.find("t5encoder.attention.relative_buckets_count")
    assert count is not None
    count.data = buckets
    bias = next(entry for entry in document.tensors if b"attn_rel_b" in entry.name)
    bias.shape = [4, buckets]
    bias.data = bytes(16 * buckets)
    path.write_bytes(write_document(document))
