"""AsyncLLM: the answers of LLM, many at once; cancelled tasks free blocks; nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.errors import ClosedError, ConfigError, EngineError, ModelError, RequestError

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
PROMPTS = [[3 + (7 * i + j) % 250 for j in range(1 + 9 * i)] for i in range(12)]


@pytest.fixture(scope="module")
def expected(tiny_model_f32: Path) -> list[tuple[int, ...]]:
    with LLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_a_deadline_ends_a_stream_with_what_it_has(run: Callable[..., None]) -> None:
    async def body(llm: AsyncLLM) -> None:
        limited = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True, timeout=0.3)
        pieces = [piece async for piece in llm.stream(PROMPTS[1], limited)]
        assert pieces[-1].finish_reason == "timeout"
        (output,) = await llm.generate(PROMPTS[2], limited)
        assert output.finish_reason == "timeout"

    run(body, n_ctx=4096)


def test_answers_equal_the_ones_of_llm(run: Callable[..., None], expected: list[tuple[int, ...]]) -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = await llm.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        pieces = [piece async for piece in llm.stream(PROMPTS[5], GREEDY)]
        assert tuple(token for piece in pieces for token in piece.token_ids) == expected[5]
        assert pieces[-1].finish_reason == "length"
        assert "".join(piece.text for piece in pieces) == outputs[5].text

    run(body)


def test_hundreds_at_once(run: Callable[..., None], expected: list[tuple[int, ...]]) -> None:
    async def one(llm: AsyncLLM, number: int) -> None:
        prompt, tokens = PROMPTS[number % 12], expected[number % 12]
        if number % 2:
            pieces = [piece async for piece in llm.stream(prompt, GREEDY)]
            assert tuple(token for piece in pieces for token in piece.token_ids) == tokens
        else:
            assert (await llm.generate(prompt, GREEDY))[0].token_ids == tokens

    async def body(llm: AsyncLLM) -> None:
        await asyncio.gather(*(one(llm, number) for number in range(200)))

    run(body)


def test_a_cancelled_task_frees_its_blocks(run: Callable[..., None]) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.stream(PROMPTS[3], LONG)
        await anext(stream)
        await stream.aclose()

        task = asyncio.create_task(llm.generate(PROMPTS[4], LONG))
        while not (await llm.stats()).running:
            await asyncio.sleep(0)
        steps = (await llm.stats()).steps
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = await llm.stats()
        assert stats.blocks_used == 0
        assert stats.steps - steps < 100
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.generate(PROMPTS[5], LONG), 0.01)
        assert (await llm.stats()).requests_aborted == 3

    run(body, n_ctx=4000)


def test_closing_ends_requests_with_their_text(tiny_model_f32: Path) -> None:
    async def listen(llm: AsyncLLM) -> str | None:
        reason = None
        async for piece in llm.stream(PROMPTS[2], LONG):
            reason = piece.finish_reason
        return reason

    async def body() -> None:
        llm = AsyncLLM(tiny_model_f32, n_ctx=4000, n_threads=1)
        tasks = [asyncio.create_task(listen(llm)) for _ in range(5)]
        answer = asyncio.create_task(llm.generate(PROMPTS[:2], LONG))
        while (await llm.stats()).running < 7:
            await asyncio.sleep(0)
        await llm.close()
        await llm.close()
        assert await asyncio.gather(*tasks) == ["abort"] * 5
        assert [output.finish_reason for output in await answer] == ["abort"] * 2
        with pytest.raises(ClosedError):
            await llm.generate("a")

    asyncio.run(asyncio.wait_for(body(), 120))


def test_errors_reach_the_caller(run: Callable[..., None]) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            await llm.generate([[]])
        with pytest.raises(RequestError):
            await anext(llm.stream("a", "b"))  # type: ignore[arg-type]
        everything = dict.fromkeys(range(4096), -float("inf"))
        vocabulary = {token: bias for token, bias in everything.items() if token < 1096}
        banned = SamplingParams(logit_bias=vocabulary)
        good, bad = await llm.generate(["a", "b"], [GREEDY, banned], return_errors=True)
        assert good.error is None
        assert bad.error is not None
        assert len(good.token_ids) == 12

    run(body)


def test_samples(run: Callable[..., None]) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)
        (output,) = await llm.generate(PROMPTS[6], params)
        assert len(output.outputs) == 3
        pieces = [piece async for piece in llm.stream(PROMPTS[6], params)]
        assert sorted({piece.index for piece in pieces}) == [0, 1, 2]

    run(body)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"nothing")

    async def body() -> None:
        llm = AsyncLLM(tmp_path / "no.gguf")
        for _ in range(2):
            with pytest.raises(ModelError):
                await llm.generate("a")
        await llm.close()

    asyncio.run(body())
    with pytest.raises(ConfigError):
        AsyncLLM(tmp_path, block_size=5)
    with pytest.raises(TypeError, match=r"no argument 'block'.*block_size"):
        AsyncLLM(tmp_path, block=5)


def test_a_defect_leaves_no_task_waiting(tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1) as llm:
            await llm.generate("a", GREEDY)
            engine_loop = await llm._engine_loop()

            def broken() -> bool:
                raise RuntimeError("broken")

            monkeypatch.setattr(engine_loop.engine.core, "step", broken)
            with pytest.raises(RuntimeError, match="broken"):
                await llm.generate("a", GREEDY)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_broken_engine_leaves_no_task_waiting(
    tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a step, and another one while the engine recovers: no step can end the requests."""

    async def body() -> None:
        async with AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1) as llm:
            await llm.generate("a", GREEDY)
            core = (await llm._engine_loop()).engine.core

            def broken(*args: object) -> bool:
                raise RuntimeError("broken twice")

            monkeypatch.setattr(core, "step", broken)
            monkeypatch.setattr(core, "recover", broken)
            answers = [llm.generate(prompt, GREEDY) for prompt in PROMPTS[:3]]
            for outcome in await asyncio.gather(*answers, return_exceptions=True):
                assert isinstance(outcome, EngineError)
                assert "this engine is broken" in str(outcome)
            with pytest.raises(EngineError, match="this engine is broken"):
                await llm.generate("a", GREEDY)

    asyncio.run(asyncio.wait_for(body(), 60))
