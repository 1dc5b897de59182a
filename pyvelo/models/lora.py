"""Checks of a LoRA adapter (GGUF) against its model, before C opens the file.

Upstream checks two extents of each tensor and asserts the rest while it builds a graph. These checks cover
all: architecture, kind of file, names, types and shapes. An error names the tensor and what does not fit.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyvelo.errors import ModelError, UnsupportedError, check_path, shown
from pyvelo.models.gguf_scan import GgufSummary, GgufTensor, scan

__all__ = ["AdaptedModel", "LoraFile", "check_lora"]

_log = logging.getLogger("pyvelo")

A, B = ".lora_a", ".lora_b"
NORM = "_norm.weight"
"""End of the name of a norm vector. Upstream ignores the norms of an adapter."""

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"

TYPES = frozenset(
    {"f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "q6_K", "q5_K", "q4_K", "q3_K", "q2_K"}
)
"""Types of A and B with a matrix product and a lookup of rows in every backend."""

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class AdaptedModel:
    """Model that an adapter must fit: its architecture and the shapes of its weights, row length first.

    tied: the output layer uses the token embeddings.
    """

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    tied: bool = False

    @staticmethod
    def of(summary: GgufSummary) -> AdaptedModel:
        """Return the model of a file. Encoders have neither an output layer nor generation."""
        shapes = {tensor.name: tensor.shape for tensor in summary.tensors}
        causal = summary.of_architecture("attention.causal") is not False and "encoder" not in (
            summary.architecture
        )
        return AdaptedModel(summary.architecture, shapes, causal and OUTPUT not in shapes)


@dataclass(frozen=True)
class LoraFile:
    """Checked adapter file.

    digest: SHA-256 of the file.
    n_bytes: size of the tensors.
    rank: largest rank of a pair.
    n_weights: weights of the model that it changes.
    alpha: numerator of the scale; 0: the scale does not depend on the rank.
    status: identity of the file that was checked.
    """

    path: str
    digest: bytes
    n_bytes: int
    rank: int
    n_weights: int
    alpha: float
    status: tuple[int, int, int, int]

    def check_unchanged(self) -> None:
        """Raise ModelError if the path names other content than the checked file."""
        if _status(self.path) != self.status:
            raise ModelError(f"{self.path} was changed while it was loaded: load it again")

    def check_scale(self, scale: float) -> None:
        """Raise ModelError if the scale of a product is no 32-bit float."""
        factor = scale * self.alpha if self.alpha else scale
        if not math.isfinite(_float32(factor)):
            raise ModelError(f"{self.path}: a scale of {scale:g} times alpha={self.alpha:g} overflows")


def check_lora(path: str | os.PathLike[str], model: AdaptedModel) -> LoraFile:
    """Scan an adapter, check that it fits the model, and hash it.

    Raises:
        ModelError: the file cannot be read, contradicts itself, or does not fit the model.
        UnsupportedError: it is no LoRA adapter, or one of a kind that is not supported.
    """
    name = check_path(path)
    before = _status(name)
    summary = scan(name)
    _check_kind(summary, model)
    alpha = _alpha(summary)
    pairs = _pairs(summary, model)
    for weight, (a, b) in pairs.items():
        _check_pair(name, weight, a, b, model)
    ranks = [b.shape[0] for _, b in pairs.values()]
    n_bytes = sum(a.n_bytes + b.n_bytes for a, b in pairs.values())
    found = LoraFile(name, _digest(name), n_bytes, max(ranks), len(pairs), alpha, before)
    found.check_unchanged()
    return found


def _check_kind(summary: GgufSummary, model: AdaptedModel) -> None:
    """Raise an error if the file is no LoRA adapter, or one of another architecture."""
    path, values = summary.path, summary.metadata
    kind = values.get("general.type")
    if kind != "adapter":
        said = "a model" if kind in (None, "model") else f"of the kind {shown(kind)}"
        raise UnsupportedError(f"{path} is no adapter: it is {said} (general.type)")
    if values.get("adapter.type") != "lora":
        raise UnsupportedError(
            f"{path} is no LoRA adapter: its adapter.type is {shown(values.get('adapter.type'))}"
        )
    if INVOCATION in summary.arrays or INVOCATION in values:
        raise UnsupportedError(
            f"{path} is an activated LoRA, which begins at certain tokens ({INVOCATION}): not supported"
        )
    if summary.architecture != model.architecture:
        raise ModelError(
            f"{path} is an adapter for the architecture {shown(summary.architecture)}, but the model is "
            f"{model.architecture!r}"
        )
    if values.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(f"{path} is split into parts: merge them first")


def _alpha(summary: GgufSummary) -> float:
    alpha = summary.metadata.get(ALPHA, 0.0)
    if ALPHA in summary.arrays or summary.types.get(ALPHA, "f32") != "f32":
        raise ModelError(f"{summary.path} is damaged: {ALPHA} must be a 32-bit float")
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise ModelError(f"{summary.path} is damaged: {ALPHA} is {alpha!r}")
    return alpha


def _pairs(summary: GgufSummary, model: AdaptedModel) -> dict[str, tuple[GgufTensor, GgufTensor]]:
    """Return A and B of each weight that the adapter changes."""
    path, sides = summary.path, {A: dict[str, GgufTensor](), B: dict[str, GgufTensor]()}
    norms = []
    for tensor in summary.tensors:
        weight, side = tensor.name[: -len(A)], tensor.name[-len(A) :]
        if side not in sides and tensor.name.endswith(NORM):
            weight = tensor.name
            norms.append(weight)
        elif side not in sides or A in weight or B in weight:
            raise ModelError(f"{path}: tensor {tensor.name!r} is neither A nor B of a LoRA ({A}, {B})")
        else:
            sides[side][weight] = tensor
        if weight not in model.shapes:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} is for a weight that the model lacks (another model's?)"
            )
    for here, there in ((A, B), (B, A)):
        alone = _first(weight for weight in sides[here] if weight not in sides[there])
        if alone is not None:
            raise ModelError(f"{path}: it has {alone}{here}, but not {alone}{there}")
    if not sides[A]:
        raise ModelError(f"{path} has no LoRA tensor")
    if norms:
        _log.warning("%s: %d norm vectors are ignored, such as %s", path, len(norms), norms[0])
    return {weight: (tensor, sides[B][weight]) for weight, tensor in sides[A].items()}


def _check_pair(path: str, weight: str, a: GgufTensor, b: GgufTensor, model: AdaptedModel) -> None:
    """Raise an error if a pair's types or shapes do not fit the weight of the model."""
    for tensor in (a, b):
        if tensor.type_name not in TYPES:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} is of type {tensor.type_name}, which is no weight"
            )
    if sum(extent != 1 for extent in model.shapes[weight][1:]) == 0 and len(model.shapes[weight]) < 2:
        raise ModelError(f"{path}: {weight} of the model is a vector, which LoRA does not change")
    if weight == EMBEDDING and model.tied:
        raise UnsupportedError(
            f"{path} changes {EMBEDDING}, which the model also uses as its output layer: not supported"
        )
    shape, of_a, of_b = (_shape(given) for given in (model.shapes[weight], a.shape, b.shape))
    rank = of_b[0]
    if weight == EMBEDDING:  # rows of A are looked up
        expected = (rank, shape[1], 1, 1), (rank, shape[0], 1, 1)
    else:
        expected = (shape[0], rank, *shape[2:]), (rank, *shape[1:])
    for tensor, got, want in ((a, of_a, expected[0]), (b, of_b, expected[1])):
        if got != want:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} has the shape {_shown(got)}, but rank {rank} and "
                f"{weight} of the model, {_shown(shape)}, need {_shown(want)} (another model's?)"
            )


def _shape(extents: tuple[int, ...]) -> Shape:
    a, b, c, d = (*extents, 1, 1, 1, 1)[:4]
    return a, b, c, d


def _shown(shape: Iterable[int]) -> str:
    """Return a shape without the extents of 1 at its end, of at least two."""
    extents = list(shape)
    while len(extents) > 2 and extents[-1] == 1:
        extents.pop()
    return str(extents)


def _first(names: Iterable[str]) -> str | None:
    return next(iter(names), None)


def _float32(number: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.inf
    return rounded


def _status(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _digest(path: str) -> bytes:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.digest()
