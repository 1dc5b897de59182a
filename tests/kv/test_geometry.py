"""Bytes of tokens and blocks, and errors that name the head that cannot be aligned."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.errors import ConfigError, UnsupportedError
from pyvelo.kv.geometry import BLOCK_SIZES, CPU_LINE, GPU_LINE, make_geometry, parse_kv_type
from pyvelo.kv.types import KV_TYPES


@dataclass(frozen=True)
class Layer:
    layer: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    window_type: int = 0
    device: int = 0


QWEN3 = [Layer(i, 8, 128, 128) for i in range(28)]


def test_the_types_of_k_and_v() -> None:
    assert list(KV_TYPES) == ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
    assert [kind.id for kind in KV_TYPES.values()] == [0, 1, 30, 8, 7, 6, 3, 2, 20]


@pytest.mark.parametrize(
    ("kv_type", "token_bytes"),
    [("f32", 229376), ("f16", 114688), ("q8_0", 60928), ("q4_0", 32256), (("q8_0", "q4_0"), 46592)],
)
def test_bytes_of_a_real_shape(kv_type: str, token_bytes: int) -> None:
    geometry = make_geometry("qwen3.gguf", QWEN3, kv_type, 64)
    assert geometry.token_bytes == token_bytes
    assert geometry.block_bytes == 64 * token_bytes


def test_a_view_of_k_takes_no_bytes_and_no_type() -> None:
    geometry = make_geometry("mla.gguf", [Layer(0, 1, 576, 0)], ("q8_0", "f16"))
    assert geometry.type_v is geometry.type_k is KV_TYPES["q8_0"]
    assert geometry.token_bytes == 576 // 32 * 34


dims = st.sampled_from([32, 64, 80, 96, 112, 128, 192, 256, 576])
layers = st.lists(
    st.builds(Layer, st.integers(0, 99), st.integers(1, 9), dims, dims),
    min_size=1,
    max_size=4,
    unique_by=lambda shape: shape.layer,
)


@settings(deadline=None)
@given(
    layers,
    st.sampled_from(list(KV_TYPES)),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from([CPU_LINE, GPU_LINE]),
)
def test_a_block_is_whole_lines_and_rows_are_whole_groups(
    shapes: list[Layer], kv_type: str, block_size: int, line: int
) -> None:
    group, group_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kv_type.upper()]]
    fits = all(s.head_dim_k % group == 0 and s.head_dim_v % group == 0 for s in shapes)
    if not fits:
        with pytest.raises(UnsupportedError):
            make_geometry("m.gguf", shapes, kv_type, block_size, line_bytes=line)
        return
    geometry = make_geometry("m.gguf", shapes, kv_type, block_size, line_bytes=line)
    for shape, row in zip(shapes, geometry.rows, strict=True):
        assert row.k_bytes == shape.n_head_kv * shape.head_dim_k // group * group_bytes
        assert row.v_bytes == shape.n_head_kv * shape.head_dim_v // group * group_bytes
        assert row.k_bytes * geometry.block_size % line == 0
        assert row.v_bytes * geometry.block_size % line == 0
    assert geometry.block_size in BLOCK_SIZES
    assert geometry.block_size >= block_size
    if line == CPU_LINE:
        assert geometry.block_size == block_size, "32 tokens of any type are whole CPU lines"
    assert geometry.grain_blocks * geometry.block_size == 256


def test_a_gpu_raises_the_block_size() -> None:
    odd = [Layer(0, 1, 32, 32)]
    assert make_geometry("m", odd, "q5_0", 32).block_size == 32
    assert make_geometry("m", odd, "q5_0", 32, line_bytes=GPU_LINE).block_size == 64
    assert make_geometry("m", odd, "f16", 32, line_bytes=GPU_LINE).block_size == 32


def test_a_head_that_cannot_be_packed_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as refused:
        make_geometry("phi.gguf", [Layer(0, 4, 128, 128), Layer(7, 4, 128, 80)], ("f16", "q4_0"))
    message = str(refused.value)
    assert "phi.gguf, layer 7: a head of V has 80 values" in message
    assert "q4_0" in message
    assert message.endswith("kv_type f32, f16, bf16 would fit")


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"mamba\.gguf: no layer has a KV cache"):
        make_geometry("mamba.gguf", [])


@pytest.mark.parametrize("kv_type", ["q3_0", "F16", ("f16", "x"), ("f16",), ("f16",) * 3, ""])
def test_a_kv_type_that_does_not_exist(kv_type: str) -> None:
    with pytest.raises(ConfigError, match="kv_type"):
        parse_kv_type(kv_type)


@pytest.mark.parametrize("block_size", [0, 16, 33, 512])
def test_a_block_size_that_does_not_exist(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size={block_size} tokens; choose from 32, 64, 128, 256"):
        make_geometry("m", QWEN3, "f16", block_size)
