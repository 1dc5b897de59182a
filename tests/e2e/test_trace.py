"""Recording a real run, by both faces."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.errors import ClosedError, ConfigError, TraceError
from pyvelo.trace.blockmap import replay, summarize
from pyvelo.trace.format import read_trace
from pyvelo.trace.recorder import recording

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = [3 + i % 50 for i in range(70)]


def test_a_run_of_several_threads(tiny_model_f32: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    with LLM(tiny_model_f32, n_ctx=256, n_threads=1, deterministic=True) as llm:
        before = llm.generate(PROMPT, PARAMS)
        with llm.trace(path):
            with pytest.raises(ConfigError, match="already"), llm.trace(tmp_path / "other"):
                pass
            workers = [threading.Thread(target=llm.generate, args=(PROMPT, PARAMS)) for _ in range(4)]
            for worker in workers:
                worker.start()
            assert [o.token_ids for o in llm.generate([PROMPT], PARAMS)] == [before[0].token_ids]
            for worker in workers:
                worker.join()
        llm.generate(PROMPT, PARAMS)
        stats = llm.stats()
        trace = read_trace(path)
    header = trace.header
    assert (header.n_blocks, header.block_size, header.n_ctx) == (stats.blocks_total, stats.block_size, 256)
    assert header.block_bytes == stats.block_bytes
    summary = summarize(trace)
    assert (summary.requests, summary.finished) == (5, 5), "the requests before and behind are not in it"
    *_, (_, blocks) = replay(trace)
    assert (blocks.n_used, blocks.n_cached) == (0, stats.blocks_cached)


def test_an_engine_that_is_closed_meanwhile(tiny_model: Path, tmp_path: Path) -> None:
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        with llm.trace(tmp_path / "run.trace"):
            llm.generate(PROMPT, PARAMS)
            llm.close()
        assert summarize(read_trace(tmp_path / "run.trace")).finished == 1
        with pytest.raises(ClosedError), llm.trace(tmp_path / "other.trace"):
            pass


def test_a_path_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        for path, reason in ((tmp_path / "no" / "run.trace", "No such file"), (tmp_path, "Is a directory")):
            with pytest.raises(TraceError, match=f"cannot be written to .*: {reason}"), llm.trace(path):
                pass
        if os.path.exists("/dev/full"):
            with pytest.raises(TraceError, match="No space"), llm.trace("/dev/full"):
                pass
        assert len(llm.generate(PROMPT, PARAMS)[0].token_ids) == 12
        with llm.trace(tmp_path / "run.trace"):
            pass


def test_asyncio(tiny_model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_model, n_ctx=256, n_threads=1) as llm:
            async with llm.trace(tmp_path / "run.trace"):
                await asyncio.gather(*(llm.generate(PROMPT, PARAMS) for _ in range(3)))
            with pytest.raises(TraceError):
                async with llm.trace(tmp_path / "no" / "run.trace"):
                    pass

    asyncio.run(run())
    summary = summarize(read_trace(tmp_path / "run.trace"))
    assert (summary.requests, summary.finished) == (3, 3)


def test_a_recording_that_is_cancelled_as_it_begins_has_ended(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread waits for a step; then it may not record on until a garbage collection."""
    begun, go_on = threading.Event(), threading.Event()
    ended = []

    @contextmanager
    def slowly(*arguments: Any) -> Iterator[None]:
        with recording(*arguments):
            begun.set()
            assert go_on.wait(30)
            yield
        ended.append(arguments)

    async def trace(llm: AsyncLLM) -> None:
        async with llm.trace(tmp_path / "run.trace"):
            raise AssertionError("it was cancelled before")

    async def run() -> None:
        async with AsyncLLM(tiny_model, n_ctx=256, n_threads=1) as llm:
            with monkeypatch.context() as patch:
                patch.setattr("pyvelo.async_llm.recording", slowly)
                task = asyncio.create_task(trace(llm))
                assert await asyncio.to_thread(begun.wait, 30)
                task.cancel()
                asyncio.get_running_loop().call_later(0.1, go_on.set)
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert len(ended) == 1
            async with llm.trace(tmp_path / "other.trace"):
                await llm.generate(PROMPT, PARAMS)

    try:
        asyncio.run(run())
    finally:
        go_on.set()
    assert summarize(read_trace(tmp_path / "other.trace")).finished == 1
