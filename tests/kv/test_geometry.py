"""Bytes of tokens and blocks, and errors that name the head that cannot be aligned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.errors import ConfigError, UnsupportedError
from pyvelo.kv.geometry import BLOCK_SIZES, CPU_LINE, GPU_LINE, make_geometry, parse_kv_type
from pyvelo.kv.prefix import FULL, BlockLayout, Window
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


CHUNKED = 2  # `window_type`


def mixed(n: int, every: int, window: int, n_head_kv: int, dim: int, window_type: int = 1) -> list[Layer]:
    """Return layers with windows, but for the last of each `every`."""
    return [
        Layer(i, n_head_kv, dim, dim)
        if i % every == every - 1
        else Layer(i, n_head_kv, dim, dim, window, window_type)
        for i in range(n)
    ]


GEMMA3 = mixed(34, 6, 1024, 4, 256)
GPT_OSS = mixed(24, 2, 128, 8, 64)
COHERE2 = mixed(32, 4, 4096, 8, 128)
LLAMA4 = mixed(48, 4, 8192, 8, 128, CHUNKED)
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


# ---- groups ----


@pytest.mark.parametrize(
    ("layers", "window", "sizes", "block_bytes"),
    [
        (GEMMA3, Window(1024), [5, 5, 5, 5, 5, 5, 4], 32 * 5 * 4096),
        (GPT_OSS, Window(128), [12, 12], 32 * 12 * 2048),
        (COHERE2, Window(4096), [8, 8, 8, 8], 32 * 8 * 4096),
        (LLAMA4, Window(8192, chunked=True), [12, 12, 12, 12], 32 * 12 * 4096),
    ],
)
def test_groups_of_models(layers: list[Layer], window: Window, sizes: list[int], block_bytes: int) -> None:
    geometry = make_geometry("m.gguf", layers)
    assert [len(group.layers) for group in geometry.groups] == sizes
    assert geometry.windows == (FULL, *[window] * (len(sizes) - 1)), "the groups without a window first"
    assert geometry.block_bytes == 32 * geometry.slot_bytes == block_bytes
    assert geometry.token_bytes == len(sizes) * geometry.slot_bytes
    assert geometry.layout(512) == BlockLayout(32, geometry.windows, 512)
    numbers = {layer: number for number, group in enumerate(geometry.groups) for layer in group.layers}
    assert geometry.layer_groups == tuple(numbers[layer] for layer in range(len(layers)))
    assert all((numbers[shape.layer] > 0) == (shape.window > 0) for shape in layers)


@pytest.mark.parametrize("layers", [GEMMA3, GPT_OSS, COHERE2, LLAMA4])
def test_a_long_sequence_takes_little_more_than_its_windows(layers: list[Layer]) -> None:
    """32768 tokens take what their layers read at a step of 512 tokens, and at most 2 % more."""
    geometry = make_geometry("m.gguf", layers)
    row = geometry.slot_bytes // len(geometry.rows)
    needed = sum(min(32768, shape.window + 512 if shape.window else 32768) for shape in layers) * row
    held = geometry.layout(512).peak_blocks(32768) * geometry.block_bytes
    assert needed <= held <= 1.02 * needed
    assert held < 0.6 * make_geometry("m.gguf", layers, windows=False).block_bytes * 1024


@pytest.mark.parametrize(
    "layers",
    [
        QWEN3,
        [*GPT_OSS[:-1], replace(GPT_OSS[-1], n_head_kv=4)],  # shorter rows
        [*GPT_OSS[:-1], replace(GPT_OSS[-1], head_dim_v=32)],
    ],
    ids=["no windows", "unequal heads", "unequal values"],
)
def test_layers_that_cannot_share_blocks_are_one_group_without_a_window(layers: list[Layer]) -> None:
    geometry = make_geometry("m.gguf", layers)
    assert geometry.windows == (FULL,)
    assert geometry.groups[0].layers == tuple(shape.layer for shape in layers)
    assert (geometry.layer_groups, len(geometry.rows)) == ((), len(layers))
    assert geometry.token_bytes == geometry.slot_bytes
    assert geometry.blocks_for(33) == geometry.layout(512).peak_blocks(33) == 2


GEMMA4 = [
    Layer(i, 2, 512, 512) if i % 6 == 5 else Layer(i, 8, 256, 256, 1024, 1) for i in range(30)
]  # rows without a window are half as long


def test_layers_with_shorter_rows_share_a_block() -> None:
    """A block has 32 tokens of three rows: of three layers with a window, or of six without one."""
    geometry = make_geometry("gemma4.gguf", GEMMA4)
    assert [len(group.layers) for group in geometry.groups] == [5, *[3] * 7, 2, 2]
    full = {layer for group in geometry.groups if not group.window.size for layer in group.layers}
    assert full == {5, 11, 17, 23, 29}
    row = 2 * 8 * 256 * 2  # bytes of K and V
    assert geometry.slot_bytes == len(geometry.rows) * row
    for group in geometry.groups:
        assert sum(row if layer not in full else row // 2 for layer in group.layers) <= geometry.slot_bytes
    needed = 5 * 32768 * row // 2 + 25 * (1024 + 512) * row
    held = geometry.layout(512).peak_blocks(32768) * geometry.block_bytes
    assert needed <= held <= 1.17 * needed, "the five rows without a window are padded to six"


@given(
    st.sampled_from([GEMMA3, GPT_OSS, COHERE2, LLAMA4, GEMMA4]),
    st.lists(st.integers(0, 40), max_size=3).map(sorted),
)
def test_layers_on_several_devices_are_in_as_many_groups(layers: list[Layer], borders: list[int]) -> None:
    """Each group's layers of a device fit into the rows that a block has there, which are as planned."""
    one = make_geometry("m.gguf", layers)
    placed = [replace(s, device=sum(s.layer >= border for border in borders)) for s in layers]
    many = make_geometry("m.gguf", placed)
    assert many.windows == one.windows
    for device in {shape.device for shape in placed}:
        here = [shape.layer for shape in placed if shape.device == device]
        rows = [row for row in many.rows if row.device == device]
        assert sum(row.n_bytes for row in rows) == one.slot_bytes_with(here)
        counts = [sum(layer in here for layer in group.layers) for group in many.groups]
        needed = [-(-n // group.n_shares) for n, group in zip(counts, many.groups, strict=True)]
        assert max(needed) == len(rows), "no row is without a use"
    assert sorted(layer for group in many.groups for layer in group.layers) == list(range(len(layers)))
    assert all(group.layers for group in many.groups)


@pytest.mark.parametrize("n_head_kv", [3, 5, 16])
def test_rows_that_are_no_multiples_are_one_group(n_head_kv: int) -> None:
    layers = [replace(shape, n_head_kv=n_head_kv) if not shape.window else shape for shape in GEMMA4]
    geometry = make_geometry("m.gguf", layers)
    assert (len(geometry.groups) > 1) == (n_head_kv == 16), "16 heads of 512 are four times 8 of 256"
    if len(geometry.groups) == 1:
        assert geometry.windows == (FULL,)
        assert geometry.block_bytes == 32 * sum(2 * 2 * s.n_head_kv * s.head_dim_k for s in layers)


def test_windows_can_be_ignored() -> None:
    geometry = make_geometry("m.gguf", GEMMA3, windows=False)
    assert geometry.windows == (FULL,)
    assert geometry.token_bytes == 34 * 4096


def test_layers_with_the_same_window_alone_are_one_group_with_it() -> None:
    geometry = make_geometry("m.gguf", [replace(shape, window=4096) for shape in QWEN3])
    assert (geometry.windows, geometry.layer_groups) == ((Window(4096),), ())
    assert geometry.layout(512).peak_blocks(1 << 20) == (4096 + 512 - 2) // 32 + 2


def test_layers_without_a_cache_have_no_group() -> None:
    layers = [shape for shape in GPT_OSS if shape.layer not in (1, 2)]
    geometry = make_geometry("m.gguf", layers)
    assert geometry.layer_groups[:5] == (1, -1, -1, 0, 1)
    assert sorted(layer for group in geometry.groups for layer in group.layers) == [0, *range(3, 24)]


kinds = st.sampled_from([(0, 0), (128, 1), (1024, 1), (1024, CHUNKED)])


@settings(deadline=None)
@given(st.lists(kinds, min_size=1, max_size=40))
def test_each_layer_is_in_one_group_with_its_own_window(windows: list[tuple[int, int]]) -> None:
    layers = [Layer(i, 8, 64, 64, size, kind) for i, (size, kind) in enumerate(windows)]
    geometry = make_geometry("m.gguf", layers)
    found = [layer for group in geometry.groups for layer in group.layers]
    assert sorted(found) == list(range(len(layers)))
    for group in geometry.groups:
        assert {windows[layer] for layer in group.layers} == {
            (group.window.size, (1 + group.window.chunked) if group.window.size else 0)
        }
        assert 0 < len(group.layers) <= len(geometry.rows)
    whole = len(layers) * 32768
    held = sum(min(group.window.size, 32768) or 32768 for group in geometry.groups) * len(geometry.rows)
    assert held <= whole or len(geometry.groups) == 1, "no more than without groups"
