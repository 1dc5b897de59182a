"""Sizes of well-known models, beside the files that their makers and the hub publish."""

from __future__ import annotations

import pytest

from pyvelo.models.families import FAMILIES, QUANTIZATIONS, Family

BY_NAME = {family.name: family for family in FAMILIES}

# bytes of published files, in 1e9
PUBLISHED = {
    ("SmolLM2 135M", "Q4_K_M"): 0.105,
    ("Qwen2.5 0.5B", "Q4_K_M"): 0.398,
    ("Qwen3 0.6B", "Q8_0"): 0.639,
    ("Qwen3 0.6B", "Q4_K_M"): 0.397,
    ("Gemma 3 1B", "Q4_K_M"): 0.806,
    ("Llama 3.2 1B", "Q4_K_M"): 0.808,
    ("Llama 3.2 1B", "Q8_0"): 1.32,
    ("Llama 3.2 3B", "Q4_K_M"): 2.02,
    ("Llama 3.2 3B", "Q6_K"): 2.64,
    ("Gemma 3 4B", "Q4_K_M"): 2.49,
    ("Mistral 7B v0.3", "Q4_K_M"): 4.37,
    ("Qwen2.5 7B", "Q4_K_M"): 4.68,
    ("Llama 3.1 8B", "Q4_K_M"): 4.92,
    ("Llama 3.1 8B", "Q6_K"): 6.60,
    ("Llama 3.1 8B", "Q8_0"): 8.54,
    ("Qwen3 8B", "Q4_K_M"): 5.03,
    ("Gemma 2 9B", "Q4_K_M"): 5.76,
    ("Phi-4 14B", "Q4_K_M"): 9.05,
    ("gpt-oss 20B", "Q4_K_M"): 12.1,
    ("Gemma 3 27B", "Q4_K_M"): 16.5,
    ("Qwen3 32B", "Q4_K_M"): 19.8,
    ("Llama 3.3 70B", "Q4_K_M"): 42.5,
}


@pytest.mark.parametrize(("name", "quantization"), PUBLISHED)
def test_weights_are_as_large_as_published_files(name: str, quantization: str) -> None:
    published = PUBLISHED[name, quantization] * 1e9
    assert BY_NAME[name].weight_bytes(quantization) == pytest.approx(published, rel=0.04)


@pytest.mark.parametrize(
    ("name", "tokens", "mebibytes"),
    [
        ("Gemma 3 4B", 4096, 200),  # as in docs/MEMORY.md
        ("Gemma 3 4B", 32768, 760),
        ("Gemma 3 1B", 32768, 140),
        ("Qwen3 0.6B", 8192, 2 * 2 * 28 * 8 * 128 * 8192 / 2**20),
        ("Llama 3.3 70B", 8192, 2 * 2 * 80 * 8 * 128 * 8192 / 2**20),
    ],
)
def test_caches_of_published_shapes(name: str, tokens: int, mebibytes: float) -> None:
    cache = BY_NAME[name].cache("f16")
    assert cache.sequence_bytes(tokens) == pytest.approx(mebibytes * 2**20, rel=0.01)


@pytest.mark.parametrize(
    ("name", "shape", "experts"),
    [
        ("gpt-oss 20B", (24, 2880, 64, 8, 64), (4, 2880, 32)),
        ("gpt-oss 120B", (36, 2880, 64, 8, 64), (4, 2880, 128)),
        ("Qwen3 30B-A3B", (48, 2048, 32, 4, 128), (8, 768, 128)),
    ],
)
def test_products_of_a_token_with_its_experts(
    name: str, shape: tuple[int, ...], experts: tuple[int, ...]
) -> None:
    layers, width, heads, kv_heads, head_dim = shape
    used, inner, n_experts = experts
    attention = width * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * used * width * inner + width * n_experts
    assert BY_NAME[name].prompt_products == pytest.approx(layers * layer, rel=0.01)


def test_what_a_token_reads() -> None:
    tied = Family("tied", 1.0, 1, 1, 64, 1024, 100_000, 4096, tied=True)
    assert tied.read_bytes("Q8_0") == tied.weight_bytes("Q8_0") == int(1e9 * 8.5 / 8)
    untied = Family("untied", 1.0, 1, 1, 64, 1024, 100_000, 4096)
    assert untied.weight_bytes("Q8_0") - untied.read_bytes("Q8_0") == 1024 * 100_000 * 8.5 / 8
    experts = Family("experts", 2.0, 1, 1, 64, 1024, 100_000, 4096, active=1.0)
    assert experts.read_bytes("Q8_0") == untied.read_bytes("Q8_0")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_plausible(family: Family) -> None:
    sizes = [family.weight_bytes(quantization) for quantization in QUANTIZATIONS]
    assert sizes == sorted(sizes)
    assert 0 < family.read_bytes("Q4_K_M") <= sizes[0]
    assert family.cache("f16").sequence_bytes(2048) > family.cache("q8_0").sequence_bytes(2048)
    # the embeddings are a part of the parameters, and layers of this many heads fit into the rest
    tables = family.vocabulary * family.width * (1 if family.tied else 2)
    attention = 2 * family.layers * family.width * family.kv_heads * family.head_dim
    assert tables + attention < family.parameters * 1e9
