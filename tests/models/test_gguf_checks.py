"""Files with readable but impossible numbers are refused before C computes with them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pyvelo import LLM
from pyvelo.errors import ModelError
from pyvelo.kv.types import TENSOR_TYPES
from pyvelo.models.gguf_parts import scan_model
from scripts.fuzz._document import ARRAY, Document, Entry, Value, read_document, write_document
from tests.t5_models import t5_with_buckets

U32, STRING = 4, 8
TYPES = {layout.name: kind for kind, layout in TENSOR_TYPES.items()}

Change = Callable[[Document], None]
Refuse = Callable[[Change], str]


@pytest.fixture
def refuse(tiny_model_f32: Path, tmp_path: Path) -> Refuse:
    """Return a function that changes the tiny model and returns the error."""

    def changed(change: Change) -> str:
        document = read_document(tiny_model_f32)
        change(document)
        path = tmp_path / "changed.gguf"
        path.write_bytes(write_document(document))
        with pytest.raises(ModelError) as caught:
            LLM(path)
        message = str(caught.value)
        assert "\n" not in message
        assert "changed.gguf is damaged: " in message
        return message

    return changed


def retype(name: str, type_name: str) -> Change:
    """The tensor `name` with another type, and as many bytes as that takes."""

    def change(document: Document) -> None:
        entry = next(e for e in document.tensors if e.name == name.encode())
        layout = TENSOR_TYPES[TYPES[type_name]]
        elements = 1
        for extent in entry.shape:
            elements *= extent
        entry.kind = TYPES[type_name]
        entry.data = bytes(elements // layout.group * layout.group_bytes)

    return change


def put(key: str, data: int) -> Change:
    def change(document: Document) -> None:
        document.values = [value for value in document.values if value.key != key.encode()]
        document.values.append(Value(key.encode(), U32, data))

    return change


def test_the_models_of_the_tests_pass(tiny_model: Path, tiny_model_f32: Path) -> None:
    for path in (tiny_model, tiny_model_f32):
        assert scan_model(path).architecture == "llama"


@pytest.mark.parametrize("type_name", ["q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"])
def test_a_weight_of_a_type_without_a_product(refuse: Refuse, type_name: str) -> None:
    message = refuse(retype("blk.1.ffn_down.weight", type_name))
    assert f"'blk.1.ffn_down.weight' is of type {type_name}" in message


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("blk.0.ffn_norm.weight", "q5_0"),
        ("output_norm.weight", "i32"),
        ("blk.1.attn_norm.weight", "f16"),
        ("output_norm.weight", "mxfp4"),
    ],
)
def test_a_norm_that_is_not_f32(refuse: Refuse, name: str, type_name: str) -> None:
    assert f"{name!r} is of type {type_name}" in refuse(retype(name, type_name))


@pytest.mark.parametrize("name", ["blk.0.attn_k.bias", "blk.0.attn_sinks.weight", "rope_freqs.weight"])
def test_vectors_that_are_not_f32(refuse: Refuse, name: str) -> None:
    def change(document: Document) -> None:
        document.tensors.append(Entry(name.encode(), [32], TYPES["q4_0"], bytes(18)))

    assert "takes f32" in refuse(change)


def test_kinds_of_tokens_that_are_not_f32(refuse: Refuse) -> None:
    """A matrix, but its first row is added as it is."""

    def change(document: Document) -> None:
        document.tensors.append(Entry(b"token_types.weight", [32, 2], TYPES["q5_0"], bytes(44)))

    assert "takes f32" in refuse(change)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("block_count", 1 << 30, "at most 512"),
        ("context_length", 1 << 31, "at most 2147483647"),
        ("attention.sliding_window", (1 << 31) - 1, "at most 268435456"),
        ("expert_count", 1 << 30, "at most 65536"),
        ("embedding_length", 1 << 30, "no tensor is wider"),
        ("embedding_length_out", (1 << 32) - 1, "no tensor is wider"),
        ("vocab_size", 1 << 30, "no tensor is wider"),
        ("attention.key_length", 1 << 24, "no tensor is wider"),
        ("attention.value_length", 1 << 30, "no tensor is wider"),
        ("attention.head_count_kv", (1 << 32) - 1, "no tensor is wider"),
        ("attention.head_count_kv", 1000, "are wider than any tensor"),
        ("attention.key_length", 0, "there are heads"),
        ("attention.value_length", 0, "there are heads"),
        ("attention.head_count_kv", 0, "there are tensors for keys"),
        ("ssm.state_size", 1 << 30, "no tensor is wider"),
    ],
)
def test_numbers_that_nothing_in_the_file_stands_for(
    refuse: Refuse, key: str, value: int, complaint: str
) -> None:
    message = refuse(put(f"llama.{key}", value))
    assert complaint in message
    assert "llama.attention." in message or f"llama.{key}" in message


@pytest.mark.parametrize("heads", [[2, 1 << 30], [1 << 31, 2], [2, 1000]])
def test_numbers_of_each_layer(refuse: Refuse, heads: list[int]) -> None:
    def change(document: Document) -> None:
        key = b"llama.attention.head_count_kv"
        document.values = [value for value in document.values if value.key != key]
        document.values.append(Value(key, ARRAY, heads, U32))

    assert "wider than" in refuse(change)


@pytest.mark.parametrize("key", ["tokenizer.ggml.scores", "tokenizer.ggml.token_type"])
@pytest.mark.parametrize("more", [-1, 1])
def test_arrays_of_the_vocabulary_are_of_one_length(refuse: Refuse, key: str, more: int) -> None:
    def change(document: Document) -> None:
        value = document.find(key)
        assert value is not None
        value.data = (value.data * 2)[: len(value.data) + more]

    assert f"{key} has" in refuse(change)


def test_a_scale_that_needs_a_length(refuse: Refuse) -> None:
    def change(document: Document) -> None:
        document.values.append(Value(b"llama.attention.temperature_scale", 6, 0.5))
        document.values.append(Value(b"llama.attention.temperature_length", U32, 0))

    assert "there is no temperature_length" in refuse(change)


@pytest.mark.parametrize("key", ["ssm.time_step_rank", "ssm.group_count"])
def test_numbers_that_are_divided_by(refuse: Refuse, key: str) -> None:
    assert f"llama.{key} is 0" in refuse(put(f"llama.{key}", 0))


@pytest.mark.parametrize("heads", [None, 0, [0, 4]])
def test_no_architecture_divides_by_zero_heads(refuse: Refuse, heads: int | list[int] | None) -> None:
    def change(document: Document) -> None:
        for value in document.values:
            value.key = value.key.replace(b"llama.", b"olmo2.")
            value.data = b"olmo2" if value.key == b"general.architecture" else value.data
        key = b"olmo2.attention.head_count"
        document.values = [value for value in document.values if value.key != key]
        if isinstance(heads, list):
            document.values.append(Value(key, ARRAY, heads, U32))
        elif heads is not None:
            document.values.append(Value(key, U32, heads))

    assert "olmo2.attention.head_count is 0 or missing" in refuse(change)


def test_a_tokenizer_that_might_not_end(refuse: Refuse) -> None:
    def change(document: Document) -> None:
        value = document.find("tokenizer.ggml.model")
        assert value is not None
        value.data = b"rwkv"

    assert "tokenizer 'rwkv' is not of the architecture 'llama'" in refuse(change)


@pytest.mark.parametrize("shape", [[0], [64, 0], [1 << 63], [(1 << 64) - 1, 2]])
def test_shapes_of_nothing_and_beyond_all_numbers(refuse: Refuse, shape: list[int]) -> None:
    def change(document: Document) -> None:
        document.tensors.append(Entry(b"more.weight", shape, 0, b""))

    assert "cannot have the shape" in refuse(change)


def test_an_alignment_beyond_any_page(refuse: Refuse) -> None:
    def change(document: Document) -> None:
        document.values.append(Value(b"general.alignment", U32, 1 << 17))

    assert "at most 65536" in refuse(change)


def test_a_router_with_one_output_may_be_a_matrix(tiny_model_f32: Path, tmp_path: Path) -> None:
    document = read_document(tiny_model_f32)
    document.tensors.append(
        Entry(b"blk.0.ffn_gate_inp_shexp.weight", [256, 1], TYPES["f16"], struct.pack("<256e", *[0.0] * 256))
    )
    path = tmp_path / "router.gguf"
    path.write_bytes(write_document(document))
    assert scan_model(path).tensors[-1].type_name == "f16"


def test_values_of_other_types_are_left_to_c(refuse: Refuse, tiny_model_f32: Path, tmp_path: Path) -> None:
    document = read_document(tiny_model_f32)
    for key in (b"llama.block_count", b"llama.attention.head_count_kv"):
        document.values = [value for value in document.values if value.key != key]
        document.values.append(Value(key, ARRAY, [b"x"], STRING))
    path = tmp_path / "typed.gguf"
    path.write_bytes(write_document(document))
    scan_model(path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        LLM(path)


@pytest.mark.parametrize(("buckets", "fits"), [(1, False), (3, False), (4, True), (511, True), (512, False)])
def test_buckets_of_relative_positions(tmp_path: Path, buckets: int, fits: bool) -> None:
    path = tmp_path / "t5.gguf"
    t5_with_buckets(path, buckets)
    if fits:
        assert scan_model(path).architecture == "t5encoder"
        return
    said = f"t5encoder.attention.relative_buckets_count is {buckets}, but must be from 4 to 511"
    with pytest.raises(ModelError, match=said):
        scan_model(path)
