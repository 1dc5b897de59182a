"""Logprobs of prompts and echoed prompts, against llama.cpp's own logits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pyvelo import LLM, AsyncLLM, RequestOutput, SamplingParams
from pyvelo.errors import RequestError
from tests import forks

from . import contiguous

PROMPT = [3 + (37 * i + i * i) % 900 for i in range(90)]
N_BEST = 4


@pytest.fixture(scope="module")
def expected(tiny_model_f32: Path, patched_library: Path) -> np.ndarray:
    """ln of every token's probability behind every token of PROMPT, float64 [90, n_vocab]: stock's logits."""
    job = contiguous.Job(str(tiny_model_f32), PROMPT, [1] * len(PROMPT), type_k=0, type_v=0)
    logits = contiguous.run(patched_library, job, partial(forks.run, text=True)).logits.astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))


def ask(max_tokens: int = 2, prompt_logprobs: int | None = N_BEST, **others: object) -> SamplingParams:
    settings = {"temperature": 0.0, "ignore_eos": True, **others}
    return SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, **settings)  # type: ignore[arg-type]


def check(output: RequestOutput, expected: np.ndarray, n: int = len(PROMPT)) -> None:
    given = output.prompt_logprobs
    assert given is not None
    assert given[0] is None
    assert len(given) == n
    for before, token, row in zip(range(n), given[1:], expected, strict=False):
        assert token is not None
        assert token.token_id == PROMPT[before + 1]
        assert token.logprob == pytest.approx(row[token.token_id], abs=2e-4)
        best = np.argsort(-row)[:N_BEST]
        assert [logprob for _, logprob in token.top] == pytest.approx(row[best].tolist(), abs=2e-4)
        assert [row[t] for t, _ in token.top] == pytest.approx(row[best].tolist(), abs=2e-4), "but for ties"


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_batch_tokens", [7, 40, 512])
def test_they_equal_stock_for_any_chunks(
    tiny_model_f32: Path, expected: np.ndarray, max_batch_tokens: int, prefix_cache: bool
) -> None:
    settings = {"kv_type": "f32", "n_ctx": 256, "prefix_cache": prefix_cache, "max_num_seqs": 4}
    with LLM(tiny_model_f32, max_batch_tokens=max_batch_tokens, n_threads=1, **settings) as llm:  # type: ignore[arg-type]
        llm.generate(PROMPT, ask(prompt_logprobs=None))
        outputs = llm.generate([PROMPT, PROMPT[:40], PROMPT], [ask(), ask(), ask(prompt_logprobs=None)])
        check(outputs[0], expected)
        check(outputs[1], expected, 40)
        assert outputs[2].prompt_logprobs is None
        assert outputs[0].usage.cached_tokens == 0
        assert (outputs[2].usage.cached_tokens > 0) == prefix_cache
        check(llm.generate(PROMPT, ask(n=3, temperature=1.0))[0], expected)
        assert llm.generate(PROMPT[:1], ask())[0].prompt_logprobs == (None,)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 26])
def test_they_survive_a_preemption_half_way(
    tiny_model_f32: Path, expected: np.ndarray, swap_bytes: int
) -> None:
    settings = {"kv_type": "f32", "n_ctx": 256, "kv_cache_bytes": 1 << 19, "prefix_cache": False}
    with (
        LLM(tiny_model_f32, swap_bytes=swap_bytes, max_batch_tokens=24, n_threads=1, **settings) as llm,  # type: ignore[arg-type]
        llm._engine.loop.visit() as core,
    ):
        core.costs.favour_swap = lambda n_blocks, n_tokens: True  # type: ignore[method-assign]
        processor = llm._engine.processor
        low, high = processor.prepare(PROMPT, ask()), processor.prepare([*PROMPT, *PROMPT], ask(priority=-1))
        core.inbox.submit(low.requests)
        core.step()
        core.step()
        assert len(low.requests[0].prompt_logprobs) == 48
        core.inbox.submit(high.requests)
        while not (low.finished and high.finished):
            core.step()
        assert core.counters.preemptions == 1
        assert core.counters.swaps == (swap_bytes > 0)
        check(low.output(), expected)
        known = high.output().prompt_logprobs
        assert known is not None
        assert len(known) == 180


def test_a_session_has_no_logits_of_what_it_read(tiny_model_f32: Path) -> None:
    with (
        LLM(tiny_model_f32, n_threads=1, n_ctx=128) as llm,
        llm.session(PROMPT) as session,
        pytest.raises(RequestError, match="prompt_logprobs: a session"),
    ):
        session.generate(ask())


# ---- echo ----


@pytest.fixture(scope="module")
def llm(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1) as made:
        yield made


def plain(llm: LLM, prompt: str | Sequence[int], **others: object) -> RequestOutput:
    return llm.generate(prompt, ask(6, None, **others))[0]


@pytest.mark.parametrize("prompt", ["Once upon a time", "ünïcode 漢字 🙂 ", [5, 60, 700]])
def test_the_text_begins_with_the_prompt_and_all_else_stays(llm: LLM, prompt: str | list[int]) -> None:
    before = plain(llm, prompt, n=2, temperature=1.0, seed=3)
    output = plain(llm, prompt, n=2, temperature=1.0, seed=3, echo=True)
    shown = prompt if isinstance(prompt, str) else llm.detokenize(prompt)
    for was, answer in zip(before.outputs, output.outputs, strict=True):
        assert answer.text == shown + was.text
        assert answer.token_ids == was.token_ids
    assert output.usage.completion_tokens == before.usage.completion_tokens
    assert output.usage.prompt_tokens == before.usage.prompt_tokens
    assert output.prompt == (prompt if isinstance(prompt, str) else None)


def test_a_stream_gives_it_with_the_first_token(llm: LLM) -> None:
    params = ask(5, 2, n=2, echo=True)
    whole = llm.generate("Hello world", params)[0]
    pieces = list(llm.stream("Hello world", params))
    for index, answer in enumerate(whole.outputs):
        own = [piece for piece in pieces if piece.index == index]
        assert own[0].text.startswith("Hello world")
        assert len(own[0].token_ids) == 1
        assert "".join(piece.text for piece in own) == answer.text
        assert own[0].prompt_logprobs == whole.prompt_logprobs
        assert all(piece.prompt_logprobs is None for piece in own[1:])


def test_stop_strings_look_at_the_answer_alone(llm: LLM) -> None:
    answer = plain(llm, "Once upon a time").text
    stop = answer.strip()[:3]
    prompt = "Once upon a time"
    assert plain(llm, prompt, stop="upon", echo=True).text == prompt + answer
    stopped = plain(llm, prompt, stop=stop, echo=True)
    assert stopped.text == prompt + answer[: answer.index(stop)]
    assert stopped.finish_reason == "stop"


def test_a_conversation_and_a_session_echo_all_that_was_read(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, ask(4, None, echo=True))
    assert output.prompt is not None
    assert "Hi" in output.prompt
    assert output.text == output.prompt + llm.chat(messages, ask(4, None)).text
    with llm.session("Once upon") as session:
        first = session.generate(ask(4, None)).text
        said = session.text
        assert said == "Once upon" + first
        echoed = session.generate(ask(4, None, echo=True)).text
        assert echoed.startswith(said)
        assert echoed == session.text


def test_asyncio_has_both(tiny_model_f32: Path, llm: LLM) -> None:
    params = ask(4, 1, echo=True)
    expected = llm.generate("Hello world", params)[0]

    async def main() -> tuple[RequestOutput, str]:
        async with AsyncLLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1) as other:
            output = (await other.generate("Hello world", params))[0]
            text = "".join([piece.text async for piece in other.stream("Hello world", params)])
            return output, text

    output, text = asyncio.run(main())
    assert output.text == text == expected.text
    assert output.prompt_logprobs == expected.prompt_logprobs
