"""Names of other programs lead to models on the hub."""

from __future__ import annotations

import pytest

from pyvelo.errors import ConfigError, ModelError
from pyvelo.models.families import FAMILIES
from pyvelo.models.hub import locate, parse_name, pull
from pyvelo.models.suggestions import suggest


@pytest.mark.parametrize(
    ("name", "repos"),
    [
        ("qwen3:4b", ["bartowski/Qwen_Qwen3-4B-GGUF:Q4_K_M"]),
        ("qwen3:4b-q8_0", ["bartowski/Qwen_Qwen3-4B-GGUF:Q4_K_M"]),
        ("qwen3:30b", ["bartowski/Qwen_Qwen3-30B-A3B-GGUF:Q4_K_M"]),
        ("llama3.2:3b", ["bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"]),
        ("Llama-3.2-3B-Instruct", ["bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"]),
        ("gpt-oss:20b", ["ggml-org/gpt-oss-20b-GGUF:MXFP4"]),
        ("phi4-mini", ["bartowski/microsoft_Phi-4-mini-instruct-GGUF:Q4_K_M"]),
        ("mistral-nemo:latest", ["bartowski/Mistral-Nemo-Instruct-2407-GGUF:Q4_K_M"]),
        ("gpt-oss", ["ggml-org/gpt-oss-20b-GGUF:MXFP4", "ggml-org/gpt-oss-120b-GGUF:MXFP4"]),
    ],
)
def test_a_name_of_ollama(name: str, repos: list[str]) -> None:
    assert suggest(name) == f"; did you mean {' or '.join(repos)}?"


def test_up_to_three_sizes_are_listed() -> None:
    sizes = ["0.6B", "1.7B", "4B"]
    first, second, third = (f"bartowski/Qwen_Qwen3-{size}-GGUF:Q4_K_M" for size in sizes)
    assert suggest("qwen3") == f"; did you mean {first}, {second} or {third}?"


@pytest.mark.parametrize("name", ["", "q", "qw", "no such model", "deepseek-r1", "qwen9", "-", "model.gguf"])
def test_other_names_have_no_suggestion(name: str) -> None:
    assert suggest(name) == ""


def test_each_family_is_suggested_by_its_own_name() -> None:
    for family in FAMILIES:
        repo = suggest(family.name).partition("did you mean ")[2].rstrip("?")
        named = parse_name(repo)
        assert named is not None
        assert named.repo == family.repo


def test_errors_have_the_suggestion() -> None:
    with pytest.raises(
        ModelError, match=r"there is no model at qwen3:4b: .* did you mean bartowski/Qwen_Qwen3-4B"
    ):
        locate("qwen3:4b")
    with pytest.raises(ModelError, match="for the demo model leave MODEL out"):
        locate("demo")
    with pytest.raises(ConfigError, match=r"'qwen3:4b' is no name .* did you mean bartowski/Qwen_Qwen3-4B"):
        pull("qwen3:4b")
