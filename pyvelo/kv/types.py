"""Types of tensors: ggml's numbers and names, and the bytes of their groups of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["KV_TYPES", "TENSOR_TYPES", "KVType", "TensorType"]


@dataclass(frozen=True)
class TensorType:
    """A type by ggml's number `id`: `group` values take `group_bytes` bytes."""

    name: str
    id: int
    group: int
    group_bytes: int

    def row_bytes(self, n_values: int) -> int:
        """Return the bytes of `n_values` values, a multiple of `group`."""
        return n_values // self.group * self.group_bytes


TENSOR_TYPES: Mapping[int, TensorType] = {
    kind.id: kind
    for kind in (
        TensorType("f32", 0, 1, 4),
        TensorType("f16", 1, 1, 2),
        TensorType("q4_0", 2, 32, 18),
        TensorType("q4_1", 3, 32, 20),
        TensorType("q5_0", 6, 32, 22),
        TensorType("q5_1", 7, 32, 24),
        TensorType("q8_0", 8, 32, 34),
        TensorType("q8_1", 9, 32, 36),
        TensorType("q2_K", 10, 256, 84),
        TensorType("q3_K", 11, 256, 110),
        TensorType("q4_K", 12, 256, 144),
        TensorType("q5_K", 13, 256, 176),
        TensorType("q6_K", 14, 256, 210),
        TensorType("q8_K", 15, 256, 292),
        TensorType("iq2_xxs", 16, 256, 66),
        TensorType("iq2_xs", 17, 256, 74),
        TensorType("iq3_xxs", 18, 256, 98),
        TensorType("iq1_s", 19, 256, 50),
        TensorType("iq4_nl", 20, 32, 18),
        TensorType("iq3_s", 21, 256, 110),
        TensorType("iq2_s", 22, 256, 82),
        TensorType("iq4_xs", 23, 256, 136),
        TensorType("i8", 24, 1, 1),
        TensorType("i16", 25, 1, 2),
        TensorType("i32", 26, 1, 4),
        TensorType("i64", 27, 1, 8),
        TensorType("f64", 28, 1, 8),
        TensorType("iq1_m", 29, 256, 56),
        TensorType("bf16", 30, 1, 2),
        TensorType("tq1_0", 34, 256, 54),
        TensorType("tq2_0", 35, 256, 66),
        TensorType("mxfp4", 39, 32, 17),
        TensorType("nvfp4", 40, 64, 36),
        TensorType("q1_0", 41, 128, 18),
        TensorType("q2_0", 42, 64, 18),
    )
}
"""All types that a GGUF may hold, by number."""

KVType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
"""Name of a type that K or V can be stored in."""

_BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}

KV_TYPES: Mapping[str, TensorType] = {name: _BY_NAME[name] for name in get_args(KVType)}
"""The types that K or V can be stored in, by name."""
