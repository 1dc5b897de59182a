"""Split models: found as one, scanned whole, joined by the loader."""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.errors import ModelError, UnsupportedError
from pyvelo.models.gguf_parts import part_paths, scan_model
from pyvelo.models.gguf_scan import scan
from scripts.fuzz._document import Document, Value, read_document, write_document

U16, I32 = 2, 5


def split(model: Path, folder: Path, parts: int = 3) -> list[Path]:
    """Writes the model in parts, as llama.cpp's gguf-split does; the first has all of the metadata."""
    whole = read_document(model)
    step = -(-len(whole.tensors) // parts)
    paths = []
    for number in range(parts):
        part = Document(3, [], whole.tensors[number * step : (number + 1) * step])
        part.values = copy.copy(whole.values) if number == 0 else []
        part.values += [
            Value(b"split.no", U16, number),
            Value(b"split.count", U16, parts),
            Value(b"split.tensors.count", I32, len(whole.tensors)),
        ]
        if number:
            part.values.append(Value(b"general.architecture", 8, b"llama"))
        paths.append(folder / f"model-{number + 1:05}-of-{parts:05}.gguf")
        paths[-1].write_bytes(write_document(part))
    return paths


@pytest.fixture
def parts(tiny_model: Path, tmp_path: Path) -> list[Path]:
    return split(tiny_model, tmp_path)


def edit(path: Path, key: str, data: int) -> None:
    document = read_document(path)
    value = document.find(key)
    assert value is not None
    value.data = data
    path.write_bytes(write_document(document))


def test_the_loader_joins_what_the_scan_has_seen(parts: list[Path], tiny_model: Path) -> None:
    whole, summary = scan(tiny_model), scan_model(parts[0])
    assert [t.name for t in summary.tensors] == [t.name for t in whole.tensors]
    assert (summary.n_params, summary.tensor_bytes) == (whole.n_params, whole.tensor_bytes)
    assert summary.quantization == whole.quantization
    assert summary.file_bytes == sum(path.stat().st_size for path in parts)
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(tiny_model) as one, LLM(parts[0]) as joined:
        assert joined.info.n_params == one.info.n_params
        assert joined.generate("Once", params)[0].token_ids == one.generate("Once", params)[0].token_ids


def test_a_whole_model_is_its_own_part(tiny_model: Path) -> None:
    assert part_paths(scan(tiny_model)) == [str(tiny_model)]


def refused(path: Path) -> str:
    with pytest.raises((ModelError, UnsupportedError)) as caught:
        LLM(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("adapter", "is an adapter, no model: name the model that it was made for"),
        ("mmproj", "is no model: it is of the kind 'mmproj' (general.type)"),
    ],
)
def test_a_file_that_belongs_to_a_model_is_none(tmp_path: Path, kind: str, complaint: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert complaint in refused(tmp_path / "other.gguf")


def test_parts_that_are_missing_or_given_first(parts: list[Path]) -> None:
    assert "model-00001-of-00003.gguf" in refused(parts[1])
    parts[2].unlink()
    assert "model-00003-of-00003.gguf is not there" in refused(parts[0])


def test_a_part_under_another_name(parts: list[Path], tmp_path: Path) -> None:
    other = parts[0].rename(tmp_path / "other.gguf")
    assert "its name would end in -00001-of-00003.gguf" in refused(other)


@pytest.mark.parametrize(
    ("which", "key", "value", "complaint"),
    [
        (0, "split.count", 65535, "one of 65535 parts"),
        (0, "split.count", 4, "one of 4 parts"),
        (0, "split.no", 2, "is not the first part"),
        (1, "split.no", 2, "does not say that it is part 2"),
        (0, "split.tensors.count", 7, "not 7"),
    ],
)
def test_parts_that_contradict_each_other(
    parts: list[Path], which: int, key: str, value: int, complaint: str
) -> None:
    edit(parts[which], key, value)
    assert complaint in refused(parts[0])


def test_damage_in_a_later_part_is_seen(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-10])
    assert "model-00003-of-00003.gguf is damaged" in refused(parts[0])


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    document, first = read_document(parts[1]), read_document(parts[0])
    document.tensors[0] = first.tensors[0]
    parts[1].write_bytes(write_document(document))
    assert "is in another part too" in refused(parts[0])
