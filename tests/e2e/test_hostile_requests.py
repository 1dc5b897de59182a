"""Hostile requests: each gets an answer or one of PyVelo's errors in one line, and every block is freed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo import LLM, SamplingParams
from pyvelo.errors import RequestError
from scripts.fuzz._hostile import HUGE, hostile
from scripts.fuzz.params import SIZES, attempt


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **SIZES) as made:
        yield made


@given(number=st.integers(0, (1 << 64) - 1))
@settings(max_examples=50, deadline=None)
def test_any_request(llm: LLM, number: int) -> None:
    kind, message = attempt(llm, hostile(number, 0))
    assert kind in ("served", "refused"), message


@pytest.mark.parametrize(
    "name", ["max_tokens", "temperature", "top_p", "seed", "timeout", "stop", "logit_bias", "n"]
)
def test_numbers_too_long_to_be_shown(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: HUGE})
    assert "some int" in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {HUGE: 1.0}},
        {"stop_token_ids": [HUGE]},
        {"json_schema": {"a": HUGE}},
        {"logit_bias": {1: HUGE}},
    ],
)
def test_numbers_too_long_inside_others(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**params)


def test_arrays_without_an_axis(llm: LLM) -> None:
    with pytest.raises(RequestError, match="give a string or a list of token ids"):
        llm.generate(np.array(2))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="give a string or"):
        llm.session(np.array(2))  # type: ignore[arg-type]
    assert len(llm.session(np.array([], np.int32))) == 0  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="give a SamplingParams"):
        llm.generate("a", np.array(2))  # type: ignore[arg-type]


def test_messages_are_one_line_and_not_long(llm: LLM) -> None:
    for call in (
        lambda: SamplingParams(stop=["", "x" * 100_000]),
        lambda: SamplingParams(temperature=np.zeros((90, 90))),  # type: ignore[arg-type]
        lambda: llm.generate("a", SamplingParams(regex="(" * 5000)),
        lambda: llm.generate("a", SamplingParams(grammar="start: " + "b" * 5000)),
        lambda: llm.generate([HUGE]),
        lambda: llm.chat([{"role": "x\n" * 5000, "content": ""}]),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700
