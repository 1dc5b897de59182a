"""Ends of answers: min_tokens, stop strings, stop tokens, the model's end, grammars, samples."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, Completion, SamplingParams

PROMPTS = ("Once upon a time", "Hello", "The old king")
N_CTX = 256


@pytest.fixture(scope="module")
def llm(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, deterministic=True, n_ctx=N_CTX, n_threads=1) as opened:
        yield opened


def said(llm: LLM, tokens: Sequence[int], special: bool) -> bytes:
    return b"".join(llm._engine.model.token_bytes(token, special=special) for token in tokens)


def ending(llm: LLM, sample: Completion, params: SamplingParams) -> tuple[int, str, int | str | None, str]:
    """Return how an answer of these tokens must end, token by token: length, reasons and text."""
    special, stops = not params.skip_special_tokens, [str(stop).encode() for stop in params.stop]
    before = 0
    for n, token in enumerate(sample.token_ids, 1):
        is_end = llm._engine.model.is_end(token) and not params.ignore_eos
        text = said(llm, sample.token_ids[: n - 1], special)
        if is_end or token in set(params.stop_token_ids):
            return n, "stop", None if is_end else token, text.decode("utf-8", "replace")
        text = said(llm, sample.token_ids[:n], special)
        found = [
            (match.end(1), match.start(), stop.decode())
            for stop in stops
            for match in re.finditer(b"(?=(%b))" % re.escape(stop), text)
            if match.end(1) > before
        ]
        if found and n > params.min_tokens:
            _, at, stop = min(found)
            return n, "stop", stop, text[:at].decode("utf-8", "replace")
        before = len(text)
    return len(sample.token_ids), "length", None, text.decode("utf-8", "replace")


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_ends_where_it_must(llm: LLM, seed: int) -> None:
    draw = random.Random(seed)
    eos = llm.vocab.eos
    assert eos is not None
    (free,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    for _ in range(12):
        middle = draw.randrange(len(free.text) - 4)
        max_tokens = draw.choice([6, 12, 30])
        likely: dict[int, float] = {eos: draw.choice([0.0, 4.0, 100.0])}
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw.choice([0, 1, 3, 6, max_tokens]) if max_tokens > 6 else draw.choice([0, 2, 6]),
            n=draw.choice([1, 1, 3]),
            temperature=draw.choice([0.0, 1.5]),
            seed=draw.randrange(9),
            ignore_eos=draw.random() < 0.3,
            stop=draw.choice([(), (), ("e",), (" ", "th"), (free.text[middle : middle + 3],), ("</s>",)]),
            stop_token_ids=draw.choice([(), (), free.token_ids[2:9:3], (eos,)]),
            skip_special_tokens=draw.random() < 0.5,
            logit_bias=likely,
        )
        prompt = draw.choice(PROMPTS)
        for sample in llm.generate(prompt, params)[0].outputs:
            reasons = (len(sample.token_ids), sample.finish_reason, sample.stop_reason, sample.text)
            assert reasons == ending(llm, sample, params), params
            assert len(sample.token_ids) > params.min_tokens or sample.finish_reason == "length", params
        pieces = list(llm.stream(prompt, params))
        for sample in llm.generate(prompt, params)[0].outputs:
            own = [piece for piece in pieces if piece.index == sample.index]
            assert "".join(piece.text for piece in own) == sample.text
            assert own[-1].stop_reason == sample.stop_reason


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_the_end_comes_right_after_the_fewest_tokens(llm: LLM, n: int, min_tokens: int) -> None:
    eos = llm.vocab.eos
    assert eos is not None
    likely = {"logit_bias": {eos: 1000.0}, "temperature": 1.5, "max_tokens": 20, "n": n, "seed": 1}
    (output,) = llm.generate("Hello", SamplingParams(min_tokens=min_tokens, **likely))
    for sample in output.outputs:
        assert (len(sample.token_ids), sample.finish_reason) == (min_tokens + 1, "stop")
        assert sample.token_ids.index(eos) == min_tokens
    if n > 1 and min_tokens > 1:
        assert len({sample.token_ids for sample in output.outputs}) > 1, "they are drawn"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"grammar": 'root ::= ("a" | "b")*'}, "[ab]{4,}"),
        ({"regex": "(ab)+"}, "(ab)+"),
        ({"regex": "ab?"}, "ab?"),
        ({"grammar": 'root ::= "abc"'}, "abc"),
        ({"json_schema": {"enum": ["yes", "no"]}}, '"(yes|no)"'),
    ],
)
def test_a_grammar_keeps_its_shape_and_ends_by_itself(
    llm: LLM, n: int, shape: dict[str, Any], text: str
) -> None:
    """If its end is one choice of several, it waits for `min_tokens`; if it is the only one, it ends."""
    eos = llm.vocab.eos
    assert eos is not None
    params = SamplingParams(
        min_tokens=4, max_tokens=60, temperature=1.0, seed=3, n=n, logit_bias={eos: 1000.0}, **shape
    )
    for sample in llm.generate("Hello", params)[0].outputs:
        assert sample.finish_reason == "stop"
        assert sample.stop_reason is None
        assert re.fullmatch(text, sample.text)
        endless = text.endswith(("+", "}"))
        assert not endless or len(sample.token_ids) > 4


@pytest.mark.parametrize("skip", [True, False])
def test_control_tokens_are_in_the_text_by_name_if_asked_for(llm: LLM, skip: bool) -> None:
    eos = llm.vocab.eos
    assert eos is not None
    params = SamplingParams(
        max_tokens=3, temperature=0, ignore_eos=True, skip_special_tokens=skip, logit_bias={eos: 1000.0}
    )
    (output,) = llm.generate("Hello", params)
    assert output.text == ("" if skip else "</s>" * 3)
    stopped = replace(params, stop="</s>")
    (output,) = llm.generate("Hello", stopped)
    assert output.stop_reason == (None if skip else "</s>")
    echoed = SamplingParams(max_tokens=1, temperature=0, echo=True, skip_special_tokens=skip)
    (output,) = llm.generate(llm.tokenize("Hello"), echoed)
    assert output.text.startswith("<s>") == (not skip)


def test_all_tokens_may_be_named_in_two_ways() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()
