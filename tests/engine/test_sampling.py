"""Every value of SamplingParams is checked when it is made."""

from __future__ import annotations

import dataclasses
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pyvelo import BeamSearchParams, SamplingParams
from pyvelo.errors import RequestError
from pyvelo.sampling import chat_params


def test_defaults_are_the_documented_ones() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "max_tokens": 16,
        "min_tokens": 0,
        "n": 1,
        "best_of": None,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "skip_special_tokens": True,
        "seed": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "echo": False,
        "logit_bias": None,
        "grammar": None,
        "json_schema": None,
        "regex": None,
        "priority": 0,
        "timeout": None,
        "cache_salt": "",
        "lora": None,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("best_of", 0),
        ("grammar", 3),
        ("grammar", "x" * (1 << 20) + "x"),
        ("json_schema", "{"),
        ("json_schema", {"a": {1, 2}}),
        ("regex", b"[0-9]"),
        ("timeout", -1),
        ("timeout", "soon"),
        ("timeout", float("nan")),
        ("best_of", 1025),
        ("best_of", True),
        ("logprobs", -1),
        ("logprobs", 1025),
        ("logprobs", 1.5),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 1025),
        ("prompt_logprobs", True),
        ("echo", 1),
        ("echo", None),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "8"),
        ("max_tokens", 1 << 31),
        ("n", 0),
        ("n", 1025),
        ("n", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", False),
        ("top_k", -2),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", None),
        ("skip_special_tokens", 0),
        ("top_k", 0.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [b"a"]),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("seed", -1),
        ("seed", 1 << 64),
        ("seed", 0.5),
        ("priority", 1.5),
        ("cache_salt", b"a"),
        ("logit_bias", [1, 2]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {"a": 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: "x"}),
    ],
)
def test_a_wrong_value_is_refused_by_name_and_with_what_would_do(field: str, value: Any) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(RequestError) as refused:
        SamplingParams(**settings)
    assert field in str(refused.value)
    assert "give" in str(refused.value)


@pytest.mark.parametrize("field", ["top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [1e-50, 1e-40, 5e-324, Fraction(1, 10**60), np.float32(1e-42)])
def test_values_that_a_32_bit_float_has_no_room_for(field: str, value: Any) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(RequestError, match=rf"^{field}=.* give a number above 0 .* a 32-bit float is 0"):
        SamplingParams(**settings)


@pytest.mark.parametrize("field", ["temperature", "min_p", "presence_penalty", "frequency_penalty"])
def test_a_value_that_is_0_as_a_32_bit_float_is_0(field: str) -> None:
    settings: dict[str, Any] = {field: 1e-50}
    assert getattr(SamplingParams(**settings), field) == 0.0
    assert SamplingParams(logit_bias={3: -1e-40}).logit_bias == {3: 0.0}
    assert BeamSearchParams(length_penalty=-1e-310).length_penalty == 0.0


def test_values_are_brought_to_their_types() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.int32(7),
        stop=["a", "b"],
        stop_token_ids=np.array([4, 5]),
        logit_bias={np.int32(3): -math.inf, 4: 1},
    )
    assert (params.max_tokens, params.temperature, params.top_k) == (3, 0.5, 7)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (4, 5))
    assert params.logit_bias == {3: -math.inf, 4: 1.0}
    assert {type(value) for value in (params.max_tokens, params.top_k)} == {int}
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert BeamSearchParams(stop_token_ids=None) == BeamSearchParams()
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_the_edges_are_allowed() -> None:
    SamplingParams(
        temperature=0, top_p=1, min_p=1, seed=(1 << 64) - 1, presence_penalty=-2, frequency_penalty=2
    )


def test_it_is_a_value() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2.0})
    assert params == SamplingParams(stop=["a"], logit_bias={1: 2.0})
    assert hash(params) == hash(SamplingParams(stop=["a"], logit_bias={1: 2.0}))
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=2).n == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]


def test_the_dictionary_that_was_given_stays_with_its_owner() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[5] = 1.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize("text", ["", "warm", "nan", "inf", "0x", "1e999"])
def test_a_number_of_the_file_that_cannot_be_used_is_ignored_with_a_note(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = dict.fromkeys((f"general.sampling.{key}" for key in ("temp", "top_k", "min_p")), text)
    assert chat_params({**said, "general.sampling.penalty_repeat": "1.5"}) == SamplingParams(
        max_tokens=None, temperature=0.7, top_p=0.95, repetition_penalty=1.5
    )
    assert [record.name for record in caplog.records] == ["pyvelo"] * 3
    assert "general.sampling.temp of the model's file is ignored" in caplog.text


def test_numbers_of_the_file_beyond_an_end_are_that_end() -> None:
    said = {"temp": "-1.000000", "top_k": "-1", "top_p": "2.5", "min_p": "-0.1"}
    params = chat_params({f"general.sampling.{key}": text for key, text in said.items()})
    assert params == SamplingParams(max_tokens=None, temperature=0, top_k=0, top_p=1, min_p=0)
