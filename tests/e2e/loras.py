"""Adapters for tests, and the same change merged into the weights with NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.models import lora
from scripts.models.make import import_gguf

SMALL = (
    "--layers",
    "2",
    "--embd",
    "128",
    "--ffn",
    "192",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "32",
)
"""Options of a small model, for scripts/models/make.py."""


@dataclass(frozen=True)
class Adapted:
    """A model, an adapter for it, and the model with the adapter merged."""

    model: Path
    adapter: Path
    merged: Path


def rounded(pairs: lora.Pairs, type_name: str) -> lora.Pairs:
    """Return the values that a file of this type has."""
    quants, kind = import_gguf().quants, import_gguf().GGMLQuantizationType[type_name.upper()]

    def of_file(values: Any) -> Any:
        wide = import_gguf().GGML_QUANT_SIZES[kind][0] > values.shape[-1]
        stored = import_gguf().GGMLQuantizationType.F16 if wide else kind
        return quants.dequantize(quants.quantize(np.ascontiguousarray(values), stored), stored)

    return {name: (of_file(a), of_file(b)) for name, (a, b) in pairs.items()}


def adapt(
    model: Path,
    folder: Path,
    *,
    name: str = "adapter",
    weights: str = lora.MATRICES,
    rank: int = 8,
    type_name: str = "f32",
    alpha: float | None = None,
    scale: float = 1.0,
    gain: float = 0.5,
    seed: int = 0,
    merge: bool = True,
) -> Adapted:
    """Write an adapter for a model, and the merged model for this scale."""
    pairs = lora.random_pairs(model, rank, weights, seed, gain)
    assert pairs
    adapter, merged = folder / f"{name}.gguf", folder / f"{name}-merged.gguf"
    lora.write_adapter(adapter, lora.architecture_of(model), pairs, alpha=alpha, type_name=type_name)
    if merge:
        factor = scale * (alpha / rank if alpha else 1.0)
        lora.write_merged(model, merged, rounded(pairs, type_name), factor)
    return Adapted(model, adapter, merged)
