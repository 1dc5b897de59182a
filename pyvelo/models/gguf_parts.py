"""Scan and checks of a whole model on disk: one GGUF, or all parts of a split one."""

from __future__ import annotations

import dataclasses
import os

from pyvelo.errors import ModelError, UnsupportedError, shown
from pyvelo.models.gguf_checks import check
from pyvelo.models.gguf_names import part_of
from pyvelo.models.gguf_scan import GgufSummary, quantization_of, scan

__all__ = ["part_paths", "scan_model"]

MAX_PARTS = 9999


def scan_model(path: str | os.PathLike[str]) -> GgufSummary:
    """Scan the model at `path`; if it is the first part of a split model, also the other parts.

    The summary has the metadata of the first part and the tensors of all parts. `offset` counts from the
    start of the tensor's part; `file_bytes` is the sum.

    Raises:
        ModelError: a part cannot be read, contradicts itself or another part, or is missing.
        UnsupportedError: the file is no model, but an adapter or something else that belongs to one.
    """
    first = scan(path)
    kind = first.metadata.get("general.type", "model")
    if kind == "adapter":
        raise UnsupportedError(f"{first.path} is an adapter, no model: name the model that it was made for")
    if kind != "model":
        raise UnsupportedError(f"{first.path} is no model: it is of the kind {shown(kind)} (general.type)")
    paths = part_paths(first)
    if len(paths) > 1:
        first = _joined(first, [scan(other) for other in paths[1:]])
    check(first)
    return first


def part_paths(first: GgufSummary) -> list[str]:
    """Return the files of a model by its first part, in order; ModelError if `first` is no first part."""
    count, number = _split(first, "split.count"), _split(first, "split.no")
    if not count or count == 1:
        return [first.path]
    folder, base = os.path.split(first.path)
    part = part_of(base)
    if part is None or part.parts != count or count > MAX_PARTS:
        raise ModelError(
            f"{first.path} says that it is one of {count} parts, "
            f"but then its name would end in -00001-of-{min(count, 99999):05}.gguf"
        )
    names = [os.path.join(folder, f"{part.stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if number != 0 or part.number != 1:
        raise ModelError(f"{first.path} is not the first part of its model: give {names[0]}")
    missing = [os.path.basename(name) for name in names if not os.path.exists(name)]
    if missing:
        raise ModelError(
            f"{first.path} is the first of {count} parts, but {', '.join(missing[:3])} is not there"
        )
    return names


def _joined(first: GgufSummary, others: list[GgufSummary]) -> GgufSummary:
    names = {tensor.name for tensor in first.tensors}
    for number, other in enumerate(others, start=1):
        if _split(other, "split.no") != number:
            raise ModelError(f"{other.path} is damaged: it does not say that it is part {number + 1}")
        twice = names.intersection(tensor.name for tensor in other.tensors)
        if twice:
            raise ModelError(f"{other.path} is damaged: tensor {min(twice)!r} is in another part too")
        names.update(tensor.name for tensor in other.tensors)
    wanted = _split(first, "split.tensors.count")
    if wanted is not None and wanted != len(names):
        raise ModelError(f"{first.path} is damaged: its parts have {len(names)} tensors, not {wanted}")
    everything = [first, *others]
    tensors = tuple(tensor for part in everything for tensor in part.tensors)
    return dataclasses.replace(
        first,
        tensors=tensors,
        quantization=quantization_of(tensors),
        n_params=sum(part.n_params for part in everything),
        tensor_bytes=sum(part.tensor_bytes for part in everything),
        file_bytes=sum(part.file_bytes for part in everything),
    )


def _split(summary: GgufSummary, key: str) -> int | None:
    value = summary.metadata.get(key)
    return value if isinstance(value, int) else None
