"""Grammars beside everything else that a request may have."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.grammar.compiler import GrammarCompiler
from pyvelo.native import Model
from tests.upstream_models import models_folder

PROMPT = "Once upon a time"
WORDS = 'root ::= ("fox" | "bear" | "wolf") (" and " ("fox" | "bear")){6,9}'
WORDS_RE = r"(fox|bear|wolf)( and (fox|bear)){6,9}"
NESTED = 'root ::= "[" (root | [0-9]+ ","){2,3} "]" | "x"'


@pytest.fixture(scope="module")
def llm(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, deterministic=True, n_threads=1) as llm:
        yield llm


def guided(grammar: str = WORDS, **others: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": grammar, "max_tokens": 200, "seed": 11} | others)


def test_a_stop_string_cuts_the_answer(llm: LLM) -> None:
    answer = llm.generate(PROMPT, guided(stop=" and "))[0].outputs[0]
    assert answer.text in ("fox", "bear", "wolf")
    assert answer.finish_reason == "stop"
    whole = llm.generate(PROMPT, guided(stop="no such text"))[0].outputs[0]
    assert re.fullmatch(WORDS_RE, whole.text)
    assert whole.text.startswith(answer.text)


def test_every_sample_follows_it(llm: LLM) -> None:
    output = llm.generate(PROMPT, guided(n=6, best_of=9, logprobs=1))[0]
    assert len(output.outputs) == 6
    for answer in output.outputs:
        assert re.fullmatch(WORDS_RE, answer.text)
    assert len({answer.text for answer in output.outputs}) > 1


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_preempted_answers_are_the_same(tiny_model_f32: Path, swap_bytes: int) -> None:
    """What a grammar has read is kept while a request waits."""
    prompts = [f"Once upon a time there were {n} animals" for n in range(6)]
    params = [
        guided('root ::= ("fox" | "bear" | "[" root "]"){40,60}', seed=n, max_tokens=90) for n in range(6)
    ]
    with LLM(tiny_model_f32, deterministic=True, n_threads=1) as llm:
        alone = [llm.generate(prompt, param)[0].text for prompt, param in zip(prompts, params, strict=True)]
        block_bytes = llm.geometry.block_bytes
    small: dict[str, Any] = {"kv_cache_bytes": 10 * block_bytes, "n_ctx": 256, "swap_bytes": swap_bytes}
    with LLM(tiny_model_f32, deterministic=True, n_threads=1, prefix_cache=False, **small) as llm:
        together = [output.text for output in llm.generate(prompts, params)]
        assert llm.stats().preemptions > 0
        assert llm.stats().blocks_used == 0
    assert together == alone


def test_sessions_and_forks_follow_their_own(llm: LLM) -> None:
    with llm.session(PROMPT) as session:
        assert re.fullmatch(WORDS_RE, session.generate(guided()).text)
        twins = [session.fork() for _ in range(3)]
        kinds: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
            ({"grammar": NESTED}, lambda text: re.fullmatch(r"[][0-9x,]+", text)),
            ({"regex": "[0-9]{4}"}, lambda text: re.fullmatch("[0-9]{4}", text)),
            ({"json_schema": {"enum": ["a", 1, None]}}, lambda text: json.loads(text) in ("a", 1, None)),
        ]
        for twin, (kind, follows) in zip(twins, kinds, strict=True):
            answer = twin.generate(SamplingParams(max_tokens=200, seed=3, **kind))
            assert answer.finish_reason == "length" or follows(answer.text)
            twin.close()
        assert len(session.generate(SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4
    assert llm.stats().blocks_used == 0


def test_after_one_that_was_cancelled(tiny_model_f32: Path) -> None:
    """A grammar that was followed half way begins anew for the next one."""

    async def body() -> None:
        async with AsyncLLM(tiny_model_f32, deterministic=True, n_threads=1) as llm:
            expected = (await llm.generate(PROMPT, guided()))[0].text
            for n in range(1, 5):
                pieces = llm.stream(PROMPT, guided())
                for _ in range(n):
                    await anext(pieces)
                await pieces.aclose()
                assert (await llm.generate(PROMPT, guided()))[0].text == expected

    asyncio.run(asyncio.wait_for(body(), 120))


def test_nothing_is_valid_json_and_all_is(llm: LLM) -> None:
    for schema in (True, {}, "true"):
        for output in llm.generate([PROMPT] * 3, [SamplingParams(json_schema=schema, max_tokens=60, seed=n)
                                                  for n in range(3)]):  # fmt: skip
            if output.outputs[0].finish_reason == "stop":
                json.loads(output.text)
    with pytest.raises(ValueError, match="json_schema"):
        llm.generate(PROMPT, SamplingParams(json_schema=False))


# ---- other vocabularies ----

VOCABS = ["llama-spm", "phi-3", "gpt-2", pytest.param("deepseek-llm", marks=pytest.mark.slow), "falcon"]
TEXT = '日本🦊é\u200dñ\n\t"\\漢字€𝄞'


@pytest.mark.parametrize("vocab", VOCABS)
def test_characters_of_many_bytes_in_any_vocabulary(vocab: str) -> None:
    """By tokens of bytes if no others exist; every kind of grammar forces the same text."""
    escaped = "".join(f"\\U{ord(character):08x}" for character in TEXT)
    with Model(models_folder() / f"ggml-vocab-{vocab}.gguf", vocab_only=True) as model:
        compiler = GrammarCompiler(model)
        pieces = enumerate(model.all_token_bytes())
        parts = {token: piece for token, piece in pieces if piece and piece in TEXT.encode()}
        for params in (
            SamplingParams(grammar=f'root ::= "{escaped}"'),
            SamplingParams(grammar=f'root ::= "(" root ")" | "{escaped}"'),
            SamplingParams(regex=re.escape(TEXT)),
        ):
            matcher = compiler.compile(params)
            assert matcher is not None
            for last in (False, True):
                assert follow(matcher.copy(), model, parts, last) == TEXT.encode()


def follow(matcher: Any, model: Model, parts: dict[int, bytes], last: bool) -> bytes:
    """Return the text that is forced, by the first or the last token that each mask has.

    Args:
        parts: the bytes of the tokens that may be a part of the text.
    """
    text, wanted = b"", TEXT.encode()
    for _ in range(2 * len(wanted)):
        mask = matcher.mask()
        fitting = [
            token
            for token, part in parts.items()
            if mask[token // 8] >> token % 8 & 1 and wanted.startswith(part, len(text))
        ]
        if not fitting:
            assert text == wanted
            assert any(mask[token // 8] >> token % 8 & 1 for token in model.end_tokens)
            return text
        token = fitting[-1 if last else 0]
        text += parts[token]
        if matcher.accept(token):
            break
    return text
