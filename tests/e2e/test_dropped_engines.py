"""Engines that are dropped after an error are freed without a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.errors import ComputeError, RequestError


def banned(llm: LLM | AsyncLLM) -> SamplingParams:
    return SamplingParams(logit_bias=dict.fromkeys(range(llm.vocab.n_tokens), -math.inf))


def _interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm._engine.core
    step = core.step

    def interrupted() -> bool:
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(core, "step", interrupted)
    try:
        llm.generate([3, 4, 5])
    except KeyboardInterrupt:
        monkeypatch.undo()


def _bad_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(RequestError):
        llm.generate([3, 4, 5], SamplingParams(regex="("))


def _no_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(ComputeError):
        llm.generate([3, 4, 5], banned(llm))


def _no_token_in_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(ComputeError):
        list(llm.stream([3, 4, 5], banned(llm)))


def _kept_as_an_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (output,) = llm.generate([3, 4, 5], banned(llm), return_errors=True)
    assert isinstance(output.error, ComputeError)


def _in_a_session(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = llm.session([3, 4, 5])
    with suppress(ComputeError):
        session.generate(banned(llm))


def _in_a_stream_of_a_session(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = llm.session([3, 4, 5])
    with suppress(ComputeError):
        list(session.stream(banned(llm)))


FAILURES = [
    _interrupted,
    _bad_grammar,
    _no_token,
    _no_token_in_a_stream,
    _kept_as_an_output,
    _in_a_session,
    _in_a_stream_of_a_session,
]


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("fail", FAILURES)
def test_an_engine_dropped_after_an_error_is_freed_at_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[LLM, pytest.MonkeyPatch], None]
) -> None:
    gc.collect()
    gc.disable()
    try:
        llm = LLM(tiny_model, n_ctx=256, n_threads=1)
        dropped = weakref.ref(llm)
        fail(llm, monkeypatch)
        del llm
        until = time.monotonic() + 10
        while dropped() is not None and time.monotonic() < until:  # the thread that compiles may still end
            time.sleep(0.01)
        assert dropped() is None
    finally:
        gc.enable()


async def _async_answer(llm: AsyncLLM) -> None:
    await llm.generate([3, 4, 5], banned(llm))


async def _async_stream(llm: AsyncLLM) -> None:
    async for _ in llm.stream([3, 4, 5], banned(llm)):
        pass


async def _async_session(llm: AsyncLLM) -> None:
    session = await llm.session([3, 4, 5])
    await session.generate(banned(llm))


async def _stream_of_an_async_session(llm: AsyncLLM) -> None:
    session = await llm.session([3, 4, 5])
    async for _ in session.stream(banned(llm)):
        pass


@pytest.mark.parametrize("fail", [_async_answer, _async_stream, _async_session, _stream_of_an_async_session])
def test_an_async_engine_dropped_after_an_error_is_freed_at_once(
    tiny_model: Path, fail: Callable[[AsyncLLM], Awaitable[None]]
) -> None:
    async def main() -> None:
        llm = AsyncLLM(tiny_model, n_ctx=256, n_threads=1)
        await llm.stats()
        dropped = weakref.ref(llm)
        with suppress(ComputeError):
            await fail(llm)
        del llm
        until = time.monotonic() + 10
        while dropped() is not None and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert dropped() is None

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
