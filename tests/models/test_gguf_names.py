"""Quantizations and parts in file names."""

from __future__ import annotations

import pytest

from pyvelo.models.gguf_names import ModelFile, find_models, matching, part_of, quant_tag


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("llama-3.2-1b-instruct-q8_0.gguf", "Q8_0"),
        ("Model-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model.IQ2_XXS.gguf", "IQ2_XXS"),
        ("model-F16.gguf", "F16"),
        ("model-BF16-00001-of-00002.gguf", "BF16"),
        ("UD-IQ1_S/DeepSeek-UD-IQ1_S-00001-of-00004.gguf", "UD-IQ1_S"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("bitnet-TQ1_0.gguf", "TQ1_0"),
        ("q4_0-as-q8_0.gguf", "Q8_0"),
        ("qwen2.5.gguf", None),
        ("ggml-model.gguf", None),
    ],
)
def test_tags(name: str, tag: str | None) -> None:
    assert quant_tag(name) == tag


def test_parts() -> None:
    assert part_of("a-b-00002-of-00010.gguf") == ("a-b", 2, 10)
    assert part_of("a-2-of-3.gguf") is None


FILES = {
    "README.md": 10,
    "m-Q4_K_M.gguf": 400,
    "m-Q8_0-00001-of-00002.gguf": 500,
    "m-Q8_0-00002-of-00002.gguf": 300,
    "F16/m-F16-00001-of-00003.gguf": 900,
    "mmproj-m-F16.gguf": 50,
    "m.mmproj-Q8_0.gguf": 50,
    "imatrix_m.gguf": 5,
    "m-UD-Q4_K_XL.gguf": 450,
}


def test_models_among_files() -> None:
    assert find_models(FILES) == [
        ModelFile("Q4_K_M", (("m-Q4_K_M.gguf", 400),)),
        ModelFile("UD-Q4_K_XL", (("m-UD-Q4_K_XL.gguf", 450),)),
        ModelFile("Q8_0", (("m-Q8_0-00001-of-00002.gguf", 500), ("m-Q8_0-00002-of-00002.gguf", 300))),
        ModelFile("F16", (("F16/m-F16-00001-of-00003.gguf", 900),), missing=2),
    ]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("ud-q4_k_xl", ["m-UD-Q4_K_XL.gguf"]),
        ("Q8_0", ["m-Q8_0-00001-of-00002.gguf"]),
        ("m-q8_0", ["m-Q8_0-00001-of-00002.gguf"]),
        ("f16/m-f16-00001-of-00003.gguf", ["F16/m-F16-00001-of-00003.gguf"]),
        ("Q4", []),
        ("mmproj-m-f16", []),
    ],
)
def test_names_of_models(wanted: str, names: list[str]) -> None:
    assert [model.name for model in matching(find_models(FILES), wanted)] == names


def test_an_exact_tag_goes_before_a_mixture() -> None:
    models = find_models({"m-Q4_K_M.gguf": 1, "m-UD-Q4_K_M.gguf": 2})
    assert [model.tag for model in matching(models, "q4_k_m")] == ["Q4_K_M"]
