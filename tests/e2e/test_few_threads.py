"""Systems that start no thread or give no descriptor: errors are PyVelo's own, and the next call works."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, SamplingParams, async_llm
from pyvelo.engine import async_loop
from pyvelo.engine.engine import Engine
from pyvelo.errors import ClosedError, OutOfMemory
from pyvelo.native import compute

SHORT = SamplingParams(max_tokens=2)
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that makes each thread fail to start whose name begins like its argument, until undone."""
    start = threading.Thread.start

    def refuse(name: str) -> None:
        def refused(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refused)

    return refuse


def test_without_the_thread_for_ctrl_c(
    tiny_model: Path, no_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "_signal_thread", None)
    no_thread("pyvelo-ctrl-c")
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        assert llm.generate([3, 4], SHORT)[0].usage.completion_tokens == 2
    assert compute._signal_thread is None


def test_without_a_descriptor_for_ctrl_c(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(compute, "_signal_thread", None)
    monkeypatch.setattr(socket, "socketpair", refuse)
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        assert llm.generate([3, 4], SHORT)[0].usage.completion_tokens == 2


@pytest.mark.parametrize("name", ["pyvelo-engine", "pyvelo-prepare"])
def test_an_async_engine_without_a_thread(
    tiny_model: Path, no_thread: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def ask() -> int:
        async with AsyncLLM(tiny_model, n_ctx=256, n_threads=1) as llm:
            return (await llm.generate([3, 4], SHORT))[0].usage.completion_tokens

    no_thread(name)
    with pytest.raises(OutOfMemory, match="thread"):
        asyncio.run(ask())
    monkeypatch.undo()
    assert asyncio.run(ask()) == 2


async def trace(llm: AsyncLLM, folder: Path) -> None:
    async with llm.trace(folder / "run.trace"):
        await llm.generate([3, 4], SHORT)


async def fork(llm: AsyncLLM, folder: Path) -> None:
    async with await llm.session([3, 4]) as session:
        await (await session.fork()).close()


CALLS: dict[str, Callable[[AsyncLLM, Path], Coroutine[Any, Any, Any]]] = {
    "chat": lambda llm, _: llm.chat(HELLO, SHORT),
    "chat_prompt": lambda llm, _: llm.chat_prompt(HELLO),
    "beam_search": lambda llm, _: llm.beam_search([3, 4]),
    "embed": lambda llm, _: llm.embed([3, 4], pooling="mean"),
    "stats": lambda llm, _: llm.stats(),
    "reset_prefix_cache": lambda llm, _: llm.reset_prefix_cache(),
    "close": lambda llm, _: llm.close(),
    "trace": trace,
    "fork": fork,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_async_call_without_a_thread(tiny_model: Path, no_thread: Any, tmp_path: Path, name: str) -> None:
    """It raises PyVelo's error, and the same call works later."""

    async def body() -> None:
        async with AsyncLLM(tiny_model, n_ctx=256, n_threads=1) as llm:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "fresh"))
            no_thread("fresh")
            with pytest.raises(OutOfMemory, match="no thread can be started"):
                await CALLS[name](llm, tmp_path)
            no_thread("none")
            await CALLS[name](llm, tmp_path)

    asyncio.run(body())


def test_a_recording_that_no_thread_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end, which has a thread, starts none either."""

    async def refuse(call: Callable[[], object]) -> None:
        monkeypatch.undo()
        raise OutOfMemory("no thread")

    async def body() -> None:
        async with AsyncLLM(tiny_model, n_ctx=256, n_threads=1) as llm:
            monkeypatch.setattr(async_llm, "run_in_thread", refuse)
            with pytest.raises(OutOfMemory, match="no thread"):
                await trace(llm, tmp_path)
            assert not list(tmp_path.iterdir())
            await trace(llm, tmp_path)

    asyncio.run(body())


@pytest.mark.parametrize("name", ["asyncio", "pyvelo-engine"])
def test_a_load_without_a_thread_is_repeated(
    tiny_model: Path, no_thread: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first load leaves no engine open, and does not run late."""
    opened: list[Engine] = []
    open_engine = async_loop.open_engine

    def open_and_note(*args: Any) -> Engine:
        opened.append(open_engine(*args))
        return opened[-1]

    async def body() -> None:
        llm = AsyncLLM(tiny_model, n_ctx=256, n_threads=1)
        no_thread(name)
        with pytest.raises(OutOfMemory, match="thread"):
            await llm.generate([3, 4], SHORT)
        for engine in opened:
            with pytest.raises(ClosedError):
                engine.check_open()
        opened.clear()
        no_thread("none")
        assert (await llm.generate([3, 4], SHORT))[0].usage.completion_tokens == 2
        await llm.close()
        assert len(opened) == 1

    monkeypatch.setattr(async_loop, "open_engine", open_and_note)
    asyncio.run(body())


def test_the_owner_of_the_team_computes_without_the_compute_thread(
    no_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's call fails, and later calls of either thread work."""
    for name, value in {"_shared": False, "_owner": None, "_jobs": None, "_worker": None}.items():
        monkeypatch.setattr(compute, name, value)

    def thread_of_call() -> str:
        return compute.compute(lambda: threading.current_thread().name, lambda: None)

    with ThreadPoolExecutor(1, "other") as other:
        here = threading.current_thread().name
        assert thread_of_call() == here
        other.submit(int).result()  # starts it
        no_thread("pyvelo-compute")
        with pytest.raises(OutOfMemory, match="pyvelo-compute cannot be started"):
            other.submit(thread_of_call).result()
        assert thread_of_call() == here
        no_thread("none")
        assert other.submit(thread_of_call).result() == "pyvelo-compute"
        assert thread_of_call() == "pyvelo-compute"


def test_work_without_the_compute_thread(no_thread: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_shared", True)
    monkeypatch.setattr(compute, "_jobs", None)
    monkeypatch.setattr(compute, "_worker", None)
    with monkeypatch.context() as inner:
        no_thread("pyvelo-compute")
        with pytest.raises(OutOfMemory, match="pyvelo-compute cannot be started"):
            compute.compute(lambda: 1, lambda: None)
        inner.setattr(threading.Thread, "start", type(threading.current_thread()).start)
    monkeypatch.undo()
    assert compute.compute(lambda: 1, lambda: None) == 1
