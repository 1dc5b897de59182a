"""`pyvelo models`: what fits a machine of a given size and rate."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pyvelo.cli import fit
from pyvelo.cli.fit import CONTEXTS, MEMORY_SHARE, fitting, print_fitting
from pyvelo.cli.values import show_bytes
from pyvelo.errors import ConfigError
from pyvelo.memory import rate as rates
from pyvelo.memory.rate import read_rate
from pyvelo.models.families import FAMILIES
from pyvelo.models.hub import parse_name

GIB = 1 << 30
PRODUCTS = {"q4_K": 4e11, "q5_0": 2e11, "q6_K": 3e11, "q8_0": 2.5e11, "mxfp4": 1e11}  # in a second


def test_a_model_fits_if_its_weights_and_the_shorter_context_do() -> None:
    small, large = (
        fitting("Q4_K_M", "f16", 2 * GIB, 1e10, PRODUCTS),
        fitting("Q4_K_M", "f16", 200 * GIB, 1e10, PRODUCTS),
    )
    assert all(model["fits"] for model in large["models"])
    for family, model in zip(FAMILIES, small["models"], strict=True):
        tokens = min(CONTEXTS[0], family.context)
        cache = family.cache("f16").sequence_bytes(tokens) if tokens == CONTEXTS[0] else 0
        assert model["fits"] is (family.weight_bytes("Q4_K_M") + cache <= MEMORY_SHARE * 2 * GIB)
        assert [told["tokens"] for told in model["memory"]] == [n for n in CONTEXTS if n <= family.context]
    assert {model["fits"] for model in small["models"]} == {True, False}
    assert {model["fits"] for model in fitting("Q4_K_M", "f16", None, 1e10, PRODUCTS)["models"]} == {None}


def test_a_faster_memory_gives_more_tokens() -> None:
    slow, fast = (fitting("Q8_0", "f16", GIB, rate, PRODUCTS)["models"] for rate in (1e10, 3e10))
    for one, other in zip(slow, fast, strict=True):
        assert other["most_tokens_per_second"] == pytest.approx(
            3 * one["most_tokens_per_second"], rel=0.05, abs=0.2
        )


@pytest.mark.parametrize("quantization", ["Q4_K_M", "Q6_K", "Q8_0"])
def test_a_prompt_is_as_fast_as_the_products_of_its_tokens(quantization: str) -> None:
    models = {model["name"]: model for model in fitting(quantization, "f16", GIB, 1e10, PRODUCTS)["models"]}
    rate = PRODUCTS[{"Q4_K_M": "q4_K", "Q6_K": "q6_K", "Q8_0": "q8_0"}[quantization]]
    # 28 layers: queries and outputs of 16 heads, keys and values of 8, and three matrices of 3072
    in_layers = 28 * 1024 * (2 * 16 * 128 + 2 * 8 * 128 + 3 * 3072)
    assert models["Qwen3 0.6B"]["most_prompt_tokens_per_second"] == pytest.approx(rate / in_layers, rel=0.01)
    # a row of 576 values is no whole number of blocks of 256
    narrow = PRODUCTS["q5_0" if quantization == "Q4_K_M" else "q8_0"]
    assert models["SmolLM2 135M"]["most_prompt_tokens_per_second"] == pytest.approx(
        narrow / (0.135e9 - 576 * 49152), rel=0.01
    )
    assert models["gpt-oss 20B"]["most_prompt_tokens_per_second"] < 1e11 / 2.4e9


def test_a_smaller_type_of_the_cache_takes_less(capsys: pytest.CaptureFixture[str]) -> None:
    content = fitting("Q4_K_M", ("q8_0", "q4_0"), 8 * GIB, 1e10, PRODUCTS)
    plain = fitting("Q4_K_M", "f16", 8 * GIB, 1e10, PRODUCTS)
    for one, other in zip(content["models"], plain["models"], strict=True):
        for told, told_plain in zip(one["memory"], other["memory"], strict=True):
            assert told["bytes"] < told_plain["bytes"]
    print_fitting(content)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.search(" (yes|no) ", line)]) == len(FAMILIES)
    assert all(any(family.repo in line for line in lines) for family in FAMILIES)
    assert not any(line.endswith(" ") for line in lines)


def on_a_screen(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(fit, "make_console", lambda **_: Console(file=sys.stdout, width=columns))


@pytest.mark.parametrize("columns", [40, 80, 110, 200])
def test_a_wide_terminal_shows_the_repositories(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    on_a_screen(monkeypatch, columns)
    print_fitting(fitting("Q6_K", "f16", 8 * GIB, 1e10, PRODUCTS))
    text = capsys.readouterr().out
    for family in FAMILIES:
        assert (family.repo in text) == (columns == 200)
        assert parse_name(f"{family.repo}:Q6_K") is not None
    notes = text.partition("free memory:")[2].splitlines()
    assert "pyvelo chat REPOSITORY:TYPE downloads" in " ".join(notes)
    assert ("pyvelo models NAME and --json show" in " ".join(notes)) == (columns < 200)
    assert max(map(len, notes)) <= min(79, columns)
    assert {word for note in notes for word in note.split()} >= {"REPOSITORY:TYPE", "processor", "prompt:"}


@pytest.mark.parametrize("factor", [1e3, 1e9])
def test_the_table_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    faster = {kind: rate * factor for kind, rate in PRODUCTS.items()}
    print_fitting(fitting("Q4_K_M", "f16", 8 * GIB, 1e10 * factor, faster))
    width = max(len(line) for line in capsys.readouterr().out.splitlines() if "/" in line)
    for columns in (width + 1, width - 1):
        on_a_screen(monkeypatch, columns)
        print_fitting(fitting("Q4_K_M", "f16", 8 * GIB, 1e10 * factor, faster))
        lines = capsys.readouterr().out.splitlines()
        assert sum("GGUF" in line for line in lines) == (len(FAMILIES) if columns > width else 0)


def test_words_choose_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fit, "read_rate", lambda *_: 1e10)
    monkeypatch.setattr(fit, "product_rate", lambda kind, _: PRODUCTS[kind])
    on_a_screen(monkeypatch, 80)
    assert fit.show_fitting("QWEN3 0.6b", "Q4_K_M", "f16", as_json=False) == 0
    text = capsys.readouterr().out
    (family,) = (family for family in FAMILIES if family.name == "Qwen3 0.6B")
    assert f"Qwen3 0.6B: {family.repo}" in text
    assert "Llama" not in text
    with pytest.raises(ConfigError, match="no model is called 'qwen3 llama': pyvelo models shows all"):
        fit.show_fitting("qwen3 llama", "Q4_K_M", "f16", as_json=False)


@pytest.mark.parametrize("free", [None, 1 << 22, 0])
def test_the_rate_counts_the_bytes_that_all_threads_read(
    monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    times = iter(range(100))
    monkeypatch.setattr(rates, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(rates, "now", lambda: float(next(times)))
    read: list[int] = []

    def count(words: np.ndarray) -> int:
        read.append(words.nbytes)
        return 0

    monkeypatch.setattr(rates.np, "add", type("Add", (), {"reduce": staticmethod(count)}))
    rate = read_rate(3, free, seconds=0.0)
    assert sum(read) == 3 * rate  # three rounds, of a second each
    assert rate == max(24, 1 << 20 if free is None else min(1 << 20, free // 4))


def test_the_models_of_the_readme_take_what_it_says() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|`]+) \| `pyvelo chat (\S+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)
    models = {model["name"]: model for model in fitting("Q4_K_M", "f16", None, 1e10, PRODUCTS)["models"]}
    assert len(rows) == 3
    for name, hub_name, weights, memory in rows:
        assert hub_name == f"{models[name]['repo']}:Q4_K_M"
        assert weights == show_bytes(models[name]["weight_bytes"])
        assert memory == show_bytes(models[name]["memory"][0]["bytes"])
    assert f"lists {len(models)})" in text
