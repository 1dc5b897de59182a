"""Encoders with any number of buckets of relative positions, also where upstream aborts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from gguf_document import read_document, write_document
from make_model import write_model
from model_shapes import Shape

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
