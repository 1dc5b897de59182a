"""Sessions and beam search through AsyncLLM: what LLM says, many at once; nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, AsyncSession, BeamSearchParams, SamplingParams
from pyvelo.errors import ClosedError, OutOfBlocks, RequestError

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6)
PROMPTS = [[3 + (7 * i + j) % 250 for j in range(20 + 9 * i)] for i in range(8)]


async def _two_turns(llm: AsyncLLM, prompt: list[int]) -> list[tuple[int, ...]]:
    """What a session says, and then it and its fork, each to something else."""
    async with await llm.session(prompt) as session:
        first = await session.generate(GREEDY)
        async with await session.fork() as fork:
            await session.append([5, 6])
            await fork.append([7])
            second, third = await asyncio.gather(session.generate(GREEDY), fork.generate(GREEDY))
            assert second.usage.cached_tokens == len(prompt) + 10 - 1
            assert session.token_ids == (*prompt, *first.token_ids, 5, 6, *second.token_ids)
            assert len(fork) == len(prompt) + 10 + 1 + 10
    return [first.token_ids, second.token_ids, third.token_ids]


def test_answers_equal_the_ones_of_sessions_of_llm(tiny_model_f32: Path, run: Callable[..., None]) -> None:
    expected = []
    with LLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1) as llm:
        for prompt in PROMPTS:
            one = llm.generate(prompt, GREEDY)[0].token_ids
            turns = [[*prompt, *one, 5, 6], [*prompt, *one, 7]]
            expected.append([one, *(output.token_ids for output in llm.generate(turns, GREEDY))])

    async def body(llm: AsyncLLM) -> None:
        assert await asyncio.gather(*(_two_turns(llm, prompt) for prompt in PROMPTS)) == expected

    run(body)


def test_a_stream_may_be_left_and_the_session_goes_on(run: Callable[..., None]) -> None:
    async def body(llm: AsyncLLM) -> None:
        session = await llm.session(PROMPTS[2])
        async with aclosing(session.stream(LONG)) as pieces:
            async for _ in pieces:
                with pytest.raises(RequestError, match="is answering"):
                    await session.append([1])
                break
        before = session.token_ids
        assert before[: len(PROMPTS[2])] == tuple(PROMPTS[2])
        await session.append([9])
        before = session.token_ids
        output = await session.generate(GREEDY)
        (again,) = await llm.generate(list(before), GREEDY)
        assert output.token_ids == again.token_ids
        await session.close()
        await session.close()
        assert session.closed
        with pytest.raises(ClosedError):
            await session.generate(GREEDY)

    run(body)


def test_a_session_goes_on_after_its_time_was_up(run: Callable[..., None]) -> None:
    """Sessions with a deadline, some heard as streams and some forks, beside one that has none."""
    late = [SamplingParams(max_tokens=None, temperature=0, ignore_eos=True, timeout=t) for t in (0.0, 0.05)]

    async def heard(session: AsyncSession, params: SamplingParams) -> None:
        pieces = [piece async for piece in session.stream(params)]
        last = pieces[-1]
        assert (last.finish_reason, last.stop_reason, last.token_ids) == ("timeout", None, ())
        assert last.usage is not None
        assert last.usage.completion_tokens == len(pieces) - 1
        assert last.times is not None
        assert last.times.end - last.times.queued >= (params.timeout or 0.0)
        assert (last.times.first_token is None) == (len(pieces) == 1)

    async def answered(session: AsyncSession, params: SamplingParams) -> None:
        output = await session.generate(params)
        assert (output.finish_reason, output.stop_reason) == ("timeout", None)
        assert output.usage.completion_tokens == len(output.token_ids)
        assert (output.times.first_token is None) == (not output.token_ids)

    async def body(llm: AsyncLLM) -> None:
        (alone,) = await llm.generate(PROMPTS[0], GREEDY)
        sessions = [await llm.session(PROMPTS[n % 3]) for n in range(5)]
        sessions.append(await sessions[1].fork())
        calls = [
            (heard if number % 2 else answered)(session, late[number % 3 > 0])
            for number, session in enumerate(sessions)
        ]
        _, (beside,) = await asyncio.gather(asyncio.gather(*calls), llm.generate(PROMPTS[0], GREEDY))
        assert beside.token_ids == alone.token_ids
        assert (await llm.stats()).requests_timed_out == 6
        for session in sessions:
            before = session.token_ids
            output, (again,) = await asyncio.gather(
                session.generate(GREEDY), llm.generate(list(before), GREEDY)
            )
            assert output.token_ids == again.token_ids
            await session.close()

    run(body, n_ctx=4096)


def test_a_cancelled_task_holds_nothing(run: Callable[..., None]) -> None:
    async def cancelled(work: Coroutine[Any, Any, Any], after: float) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.sleep(after)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def body(llm: AsyncLLM) -> None:
        sessions: list[AsyncSession] = [await llm.session(prompt) for prompt in PROMPTS]
        for number, session in enumerate(sessions):
            await cancelled(session.generate(LONG), 0.01 * number)
            await cancelled(session.fork(), 0.002 * number)
            await cancelled(llm.beam_search(PROMPTS[:2], BEAMS), 0.01 * number)
        answering = asyncio.ensure_future(sessions[0].generate(LONG))
        await asyncio.sleep(0.05)
        await sessions[0].close()  # in the middle of an answer
        assert (await answering).finish_reason == "abort"
        del sessions, session, answering

    run(body, n_ctx=2048)


def test_closing_cancels_an_answer_that_is_still_prepared(run: Callable[..., None]) -> None:
    async def body(llm: AsyncLLM) -> None:
        for n_turns in range(4):
            session = await llm.session(PROMPTS[3])
            answering = asyncio.ensure_future(session.generate(LONG))
            for _ in range(n_turns):
                await asyncio.sleep(0)
            await session.close()
            result = (await asyncio.gather(answering, return_exceptions=True))[0]
            assert isinstance(result, ClosedError) or result.finish_reason == "abort"
            assert (await llm.stats()).idle == 0

    run(body)


def test_errors_equal_the_ones_of_llm(run: Callable[..., None]) -> None:
    async def body(llm: AsyncLLM) -> None:
        session = await llm.session()
        with pytest.raises(RequestError, match="no tokens"):
            await session.generate(GREEDY)
        with pytest.raises((RequestError, OutOfBlocks)):
            await session.append([3] * 600)
        assert len(session) == 0
        assert session
        with pytest.raises(RequestError, match="two names of one argument"):
            await session.generate(GREEDY, sampling_params=GREEDY)
        with pytest.raises(RequestError, match="does not exist"):
            await llm.session([1 << 40])
        with pytest.raises(RequestError):
            await llm.beam_search(["Hi"], "wide")  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            await llm.beam_search([[3] * 600], BEAMS)
        await session.compute()

    run(body)


def test_a_beam_search_finds_the_answers_of_llm(tiny_model_f32: Path, run: Callable[..., None]) -> None:
    with LLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1) as llm:
        expected = llm.beam_search(PROMPTS, BEAMS)

    async def body(llm: AsyncLLM) -> None:
        both = await asyncio.gather(llm.beam_search(PROMPTS[:3], BEAMS), llm.beam_search(PROMPTS[3:], BEAMS))
        found = [output for outputs in both for output in outputs]
        assert [[c.token_ids for c in o.outputs] for o in found] == [
            [c.token_ids for c in o.outputs] for o in expected
        ]

    run(body)


def test_a_session_that_was_computed_goes_on_beside_others_with_its_own_blocks(
    run: Callable[..., None], tiny_model_f32: Path
) -> None:
    """A session of a block and a token: idle, it frees its second block, which another request takes."""
    rng, answer = random.Random(1), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def text(n_tokens: int) -> list[int]:
        return [rng.randrange(5, 250) for _ in range(n_tokens)]

    rounds = [(text(33), text(3), text(5), text(20)) for _ in range(8)]
    with LLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1, prefix_cache=False) as llm:
        alone = [t for begin, more, _, other in rounds for t in (begin + more, other)]
        expected = [output.token_ids for output in llm.generate(alone, answer)]

    async def body(llm: AsyncLLM) -> None:
        got = []
        for begin, more, first, other in rounds:
            async with await llm.session(begin) as session:
                await asyncio.gather(llm.generate([first], SamplingParams(max_tokens=1)), session.compute())
                await session.append(more)
                (another,), mine = await asyncio.gather(
                    llm.generate([other], answer), session.generate(answer)
                )
                got += [mine.token_ids, another.token_ids]
        assert got == expected

    run(body)
