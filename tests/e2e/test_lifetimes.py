"""LLM and AsyncLLM that are dropped, closed while they load, or used from a second event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from pyvelo.engine.async_loop import AsyncEngineLoop
from pyvelo.errors import ClosedError, EngineError
from tests.e2e.lifetimes import WAIT, descriptors, wait_for

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
PROMPT = [3, 4, 5]


class Hard(BaseException):
    """Exception that no code catches."""


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "pyvelo-engine"}


# ---- dropped ----


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_an_llm_that_is_dropped_frees_everything(tiny_model_f32: Path) -> None:
    llm = LLM(tiny_model_f32, n_ctx=256, n_threads=1)
    llm.generate([PROMPT], GREEDY)
    context = weakref.ref(llm._engine.context._handle)  # type: ignore[arg-type]
    before = descriptors(tiny_model_f32)
    del llm
    assert context() is None
    assert descriptors(tiny_model_f32) < before


def test_what_was_made_of_a_dropped_llm_goes_on(tiny_model_f32: Path) -> None:
    expected = LLM(tiny_model_f32, n_ctx=256, n_threads=1).generate([PROMPT], GREEDY)[0].token_ids
    stream = LLM(tiny_model_f32, n_ctx=256, n_threads=1).stream(PROMPT, GREEDY)
    session = LLM(tiny_model_f32, n_ctx=256, n_threads=1).session(PROMPT)
    gc.collect()
    assert tuple(token for piece in stream for token in piece.token_ids) == expected
    assert session.generate(GREEDY).token_ids == expected


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_an_async_llm_that_is_dropped_frees_everything(tiny_model_f32: Path) -> None:
    threads, before = engine_threads(), descriptors(tiny_model_f32)

    async def body() -> None:
        llm = AsyncLLM(tiny_model_f32, n_ctx=256, n_threads=1)
        await llm.generate([PROMPT], GREEDY)
        await llm.session(PROMPT)
        async for _ in llm.stream(PROMPT, LONG):
            break

    asyncio.run(body())
    gc.collect()
    wait_for(lambda: engine_threads() <= threads)
    assert descriptors(tiny_model_f32) <= before


def test_a_session_of_a_dropped_async_llm_goes_on(tiny_model_f32: Path) -> None:
    async def body() -> None:
        session = await AsyncLLM(tiny_model_f32, n_ctx=256, n_threads=1).session(PROMPT)
        gc.collect()
        assert len((await session.generate(GREEDY)).token_ids) == 4

    asyncio.run(asyncio.wait_for(body(), WAIT))


def test_a_stream_whose_loop_was_closed_ends(tiny_model_f32: Path) -> None:
    """No task can listen any more, so nothing is computed."""
    llm = AsyncLLM(tiny_model_f32, n_ctx=4096, n_threads=1)

    async def begin() -> Any:
        stream = llm.stream(PROMPT, LONG)
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    assert llm._loading is not None
    core = llm._loading.result().engine.core
    loop.close()
    wait_for(lambda: not core.has_work)
    asyncio.run(asyncio.wait_for(llm.close(), WAIT))
    del stream


# ---- two loops, and closing ----


def test_a_second_event_loop_is_refused_by_name(tiny_model_f32: Path) -> None:
    llm = AsyncLLM(tiny_model_f32, n_ctx=256, n_threads=1)

    async def use() -> None:
        await llm.generate([PROMPT], GREEDY)

    asyncio.run(use())
    with pytest.raises(EngineError, match="another one in this loop"):
        asyncio.run(asyncio.wait_for(use(), WAIT))
    asyncio.run(asyncio.wait_for(llm.close(), WAIT))
    with pytest.raises(ClosedError):
        asyncio.run(use())


def test_a_loop_that_ends_while_it_loads_leaves_a_clear_error(tiny_model_f32: Path) -> None:
    llm = AsyncLLM(tiny_model_f32, n_ctx=256, n_threads=1)

    async def begin() -> None:
        task = asyncio.create_task(llm.generate([PROMPT], GREEDY))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(begin())
    with pytest.raises(EngineError, match="event loop"):
        asyncio.run(asyncio.wait_for(llm.stats(), WAIT))
    asyncio.run(asyncio.wait_for(llm.close(), WAIT))


def slow_load(started: threading.Event, go_on: threading.Event) -> Callable[[float], None]:
    def progress(share: float) -> None:
        started.set()
        assert go_on.wait(WAIT)

    return progress


def test_closing_ends_a_load(tiny_model_f32: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    async def body() -> None:
        llm = AsyncLLM(tiny_model_f32, n_ctx=256, progress=slow_load(started, go_on))
        waiting = asyncio.create_task(llm.generate([PROMPT], GREEDY))
        await asyncio.to_thread(started.wait, WAIT)
        closing = asyncio.create_task(llm.close())
        await asyncio.sleep(0.05)
        go_on.set()
        await closing
        with pytest.raises(ClosedError):
            await waiting

    threads = engine_threads()
    asyncio.run(asyncio.wait_for(body(), WAIT))
    assert engine_threads() <= threads


def test_cancelling_close_does_not_cancel_the_load(tiny_model_f32: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    async def body() -> None:
        llm = AsyncLLM(tiny_model_f32, n_ctx=256, progress=slow_load(started, go_on))
        waiting = asyncio.create_task(llm.generate([PROMPT], GREEDY))
        await asyncio.to_thread(started.wait, WAIT)
        closing = asyncio.create_task(llm.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        go_on.set()
        with pytest.raises(ClosedError):  # `close` finishes, and no task is cancelled
            await waiting
        await llm.close()

    asyncio.run(asyncio.wait_for(body(), WAIT))


def test_closing_ends_a_beam_search(tiny_model_f32: Path) -> None:
    with LLM(tiny_model_f32, n_ctx=4096, n_threads=1) as llm:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4000, ignore_eos=True))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        wait_for(lambda: llm.stats().steps > 3)
        llm.close()
        thread.join(WAIT)
    assert [type(error) for error in errors] == [ClosedError]


def test_closing_ends_an_async_beam_search(tiny_model_f32: Path) -> None:
    async def body() -> None:
        llm = AsyncLLM(tiny_model_f32, n_ctx=4096, n_threads=1)
        params = BeamSearchParams(beam_width=2, max_tokens=4000, ignore_eos=True)
        searching = asyncio.create_task(llm.beam_search([PROMPT], params))
        while (await llm.stats()).steps < 4:
            await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(ClosedError):
            await searching

    asyncio.run(asyncio.wait_for(body(), WAIT))


# ---- errors in AsyncLLM's thread ----


def test_an_internal_error_is_raised_once(tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1) as llm:
            (expected,) = await llm.generate([PROMPT], GREEDY)
            core = (await llm._engine_loop()).engine.core
            build = core._batches.build

            def broken(plan: Any) -> Any:
                core._batches.build = build  # type: ignore[method-assign]
                raise RuntimeError("broken")

            core._batches.build = broken  # type: ignore[method-assign]
            answers = [llm.generate([[number]], GREEDY) for number in range(3, 9)]
            outcomes = await asyncio.gather(*answers, return_exceptions=True)
            assert any(isinstance(outcome, RuntimeError) for outcome in outcomes)
            assert (await llm.generate([PROMPT], GREEDY))[0].token_ids == expected.token_ids
            core.manager.audit()

    asyncio.run(asyncio.wait_for(body(), WAIT))


@pytest.mark.parametrize("where", ["step", "consumer"])
def test_an_uncaught_exception_does_not_end_the_thread(
    tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Such as SystemExit out of `progress`, which the first step may call."""

    async def body() -> None:
        async with AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1) as llm:
            await llm.generate([PROMPT], GREEDY)
            core = (await llm._engine_loop()).engine.core

            def broken(*args: Any) -> Any:
                raise Hard

            with monkeypatch.context() as patch:
                target, name = (core, "_call_run") if where == "step" else (core._output, "_accept")
                patch.setattr(target, name, broken)
                answers = [llm.generate([PROMPT], GREEDY) for _ in range(3)]
                outcomes = await asyncio.gather(*answers, return_exceptions=True)
                for outcome in outcomes:
                    assert isinstance(outcome, EngineError) or outcome[0].finish_reason == "abort"  # type: ignore[index]
            assert len((await llm.generate([PROMPT], GREEDY))[0].token_ids) == 4

    asyncio.run(asyncio.wait_for(body(), WAIT))


def test_an_engine_that_cannot_recover_says_so_to_every_task(
    tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        llm = AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1)
        await llm.generate([PROMPT], GREEDY)
        core = (await llm._engine_loop()).engine.core

        def broken(*args: Any) -> Any:
            raise RuntimeError("for good")

        monkeypatch.setattr(core.manager, "commit", broken)
        monkeypatch.setattr(core.manager, "clear", broken)
        answers = [llm.generate([PROMPT], GREEDY) for _ in range(3)]
        for outcome in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(outcome, (RuntimeError, EngineError))
            assert "for good" in str(outcome)
        with pytest.raises(EngineError, match="for good"):
            await llm.generate([PROMPT], GREEDY)
        await llm.close()

    threads = engine_threads()
    asyncio.run(asyncio.wait_for(body(), WAIT))
    assert engine_threads() <= threads


def test_ctrl_c_in_an_event_loop_leaves_the_engine_free(
    tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio raises the second KeyboardInterrupt at any line, also where a request is submitted."""
    submit = AsyncEngineLoop._submit

    def leave(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def interrupted(*args: Any) -> None:
        count = 0

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                signal.raise_signal(signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            submit(*args)
        finally:
            sys.settrace(None)

    async def body() -> None:
        nonlocal at
        before = signal.signal(signal.SIGINT, leave)
        try:
            async with AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1) as llm:
                for line in range(1, 120, 3):
                    at = line
                    with monkeypatch.context() as patch:
                        patch.setattr(AsyncEngineLoop, "_submit", interrupted)
                        with suppress(KeyboardInterrupt):
                            await llm.generate([PROMPT], GREEDY)
                    assert len((await llm.generate([PROMPT], GREEDY))[0].token_ids) == 4
                    stats = await llm.stats()
                    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        finally:
            signal.signal(signal.SIGINT, before)

    at = 0
    asyncio.run(asyncio.wait_for(body(), WAIT))
