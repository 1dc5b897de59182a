"""The embedded demo model does what is said of it: docs/DEMO_MODEL.md has the figures over more questions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pyvelo
from pyvelo import LLM
from pyvelo.models.gguf_scan import scan
from scripts.demo import quality
from scripts.demo._vocab import demo_vocab

MODEL = Path(pyvelo.__file__).parent / "assets" / "demo.gguf"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, n_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def template() -> Any:
    return quality.template_of(MODEL)


def say(llm: LLM, template: Any, *talk: str) -> str:
    """The last answer of a talk."""
    before: list[tuple[str, str]] = []
    for question in talk:
        ids = quality.ids_of(llm, template, before, question)
        before.append((question, llm.generate(ids, quality.GREEDY)[0].text))
    return before[-1][1]


def test_it_is_small_and_has_grouped_queries_of_64() -> None:
    summary = scan(MODEL)
    assert summary.file_bytes <= 12e6
    assert summary.of_architecture("attention.key_length") == 64
    assert summary.of_architecture("attention.head_count") == 2 * summary.of_architecture(
        "attention.head_count_kv"
    )
    assert summary.of_architecture("context_length") >= 2048


def test_its_vocabulary_is_the_scripts(llm: LLM) -> None:
    assert llm.vocab.n_tokens == len(demo_vocab())


def test_it_recalls_the_name_of_a_user(llm: LLM, template: Any) -> None:
    talk = ("This is Anna Berger 4821.", "Remember Tom Stone 1776.", "What is 12 + 30?")
    assert say(llm, template, *talk, "Who is Anna?") == "Anna Berger 4821."
    assert say(llm, template, *talk, "Who is Tom?") == "Tom Stone 1776."
    assert say(llm, template, *talk) == "2 + 0 = 2, 1 + 3 = 4, so 42."


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_recall_over_1500_tokens(kv_type: str, template: Any) -> None:
    cases = quality.recall_cases(demo_vocab(), 1500, 4 if kv_type == "f16" else 2)
    with LLM(MODEL, kv_type=kv_type, n_threads=1) as llm:
        share = quality.measure(llm, template, cases)
    assert share.right >= 0.9 * share.total, share.wrong


def test_sums_and_questions_about_itself(llm: LLM, template: Any) -> None:
    for cases, wanted in (
        (quality.sum_cases(demo_vocab(), False, 25), 0.9),
        (quality.sum_cases(demo_vocab(), True, 25), 0.9),
        (quality.about_cases()[::3], 0.95),
    ):
        share = quality.measure(llm, template, cases)
        assert share.right >= wanted * share.total, share.wrong


def test_it_says_what_it_is_and_how_to_get_a_real_model(llm: LLM, template: Any) -> None:
    assert "demo model of PyVelo" in say(llm, template, "who are you")
    assert "pyvelo pull" in say(llm, template, "How do I get a real model?")


@pytest.mark.parametrize("text", ["Grüß Gott, ça va?", "日本語", "😀" * 20, "x" * 200, "\n\n", "<|end|>"])
def test_any_text_gets_an_answer(llm: LLM, template: Any, text: str) -> None:
    assert say(llm, template, text)
