"""Parser of GGUF file names: the quantization, and the part of a split model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ModelFile", "Part", "find_models", "part_of", "quant_tag"]

# llama.cpp's own names: name-00001-of-00003.gguf
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
# a type's name between separators, with the prefix that marks a mixture of types
_TAG = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?"
    r"(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|FP16|FP32|MXFP4(?:_[A-Z]+)*|NVFP4)"
    r"(?![A-Z0-9])",
    re.IGNORECASE,
)


class Part(NamedTuple):
    """A file of a split model with `parts` files; `number` counts from 1."""

    stem: str
    number: int
    parts: int


@dataclass(frozen=True)
class ModelFile:
    """A model among the files of a folder: its tag, such as "Q4_K_M", and its files in order, with bytes.

    `tag` is the stem of the name if the name has no quantization. `missing` counts the absent parts.
    """

    tag: str
    files: tuple[tuple[str, int], ...]
    missing: int = 0

    @property
    def name(self) -> str:
        """File for the loader: the first part."""
        return self.files[0][0]

    @property
    def n_bytes(self) -> int:
        """Size of all parts."""
        return sum(size for _, size in self.files)


def part_of(name: str) -> Part | None:
    """Return the part of a split model that a file name describes, None if it is no part."""
    match = _PART.fullmatch(name)
    return Part(match["stem"], int(match["number"]), int(match["count"])) if match else None


def quant_tag(name: str) -> str | None:
    """Return the last quantization in a file's name, in capitals: "Q4_K_M", "UD-Q4_K_XL", "BF16"."""
    stem = _stem(name.rpartition("/")[2])
    tags = _TAG.findall(stem)
    return tags[-1].upper() if tags else None


def find_models(files: Mapping[str, int]) -> list[ModelFile]:
    """Return the models among files, smallest first; the parts of a split model are one model.

    Projectors of images and sounds (mmproj) and importance matrices are no text models, and left out.

    Args:
        files: names, with `/` between folders, and bytes.
    """
    groups: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for name in sorted(files):
        if not name.lower().endswith(".gguf") or _is_no_text_model(name.rpartition("/")[2].lower()):
            continue
        part = part_of(name)
        groups.setdefault((part.stem, part.parts) if part else (name, 0), []).append((name, files[name]))
    models = [_model(group, count) for (_, count), group in groups.items()]
    return sorted(models, key=lambda model: (model.n_bytes, model.name))


def matching(models: Iterable[ModelFile], wanted: str) -> list[ModelFile]:
    """Return the models that `wanted` names, in any case: by file, by tag, or by the tag without `UD-`."""
    listed = list(models)
    low = wanted.casefold()
    by_name = [m for m in listed if low in (m.name.casefold(), *(_names(m.name)))]
    by_tag = [m for m in listed if m.tag.casefold() == low]
    mixed = [m for m in listed if m.tag.casefold() == "ud-" + low]
    return by_name or by_tag or mixed


def _model(group: list[tuple[str, int]], count: int) -> ModelFile:
    name = group[0][0]
    tag = quant_tag(name) or _stem(name.rpartition("/")[2])
    return ModelFile(tag, tuple(group), max(0, count - len(group)))


def _names(name: str) -> tuple[str, str, str]:
    base = name.rpartition("/")[2].casefold()
    return base, base.removesuffix(".gguf"), _stem(base)


def _stem(base: str) -> str:
    """Return a file's name without its suffix and its number as a part."""
    part = part_of(base)
    return part.stem if part else base[: -len(".gguf")] if base.lower().endswith(".gguf") else base


def _is_no_text_model(base: str) -> bool:
    return "mmproj" in base or base.startswith("imatrix") or base.endswith((".imatrix.gguf", "-imatrix.gguf"))
