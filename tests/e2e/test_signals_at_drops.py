"""Signal handlers that raise while an object is dropped: the exception is raised, and all is freed."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, SamplingParams
from tests.e2e.lifetimes import WAIT, descriptors, wait_for

PROMPT = [3, 4, 5]
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no SIGALRM here")


class Hit(BaseException):
    """Exception of the signal handler."""


@pytest.fixture
def drop_at_a_signal() -> Iterator[Callable[[list[Any]], None]]:
    """Empties a list with a signal pending: its handler raises at the first line of Python code."""

    def raise_hit(*_: object) -> None:
        raise Hit

    def drop(holder: list[Any]) -> None:
        trip = partial(ctypes.pythonapi.PyErr_SetInterruptEx, int(signal.SIGALRM))
        calls = [trip, partial(holder.clear)]
        with pytest.raises(Hit):
            run(calls)
        assert not holder

    def run(calls: list[partial[None]]) -> None:
        list(map(partial.__call__, calls))  # one call of C
        for _ in range(1000):  # the handler runs here
            pass

    ignored: list[Any] = []
    before, hook = signal.signal(signal.SIGALRM, raise_hit), sys.unraisablehook
    sys.unraisablehook = ignored.append
    try:
        yield drop
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, before)
    assert [(each.exc_type, each.object) for each in ignored] == []


Drop = Callable[[list[Any]], None]


def in_a_cycle(thing: object) -> list[Any]:
    """Return a list with the object that only a garbage collection frees."""
    cycle = [thing]
    cycle.append(cycle)
    return cycle


def test_a_signal_while_an_llm_is_dropped(tiny_model: Path, drop_at_a_signal: Drop) -> None:
    before = descriptors(tiny_model)
    llm = LLM(tiny_model, n_ctx=256, n_threads=1)
    llm.generate([PROMPT], SHORT)
    core, model = llm._engine.core, llm._engine.model  # as a traceback refers to them
    context = weakref.ref(core._context._handle)
    holder = [llm]
    del llm
    drop_at_a_signal(holder)
    assert context() is None
    assert model.closed
    assert descriptors(tiny_model) == before


def test_a_signal_while_a_stream_is_dropped(tiny_model: Path, drop_at_a_signal: Drop) -> None:
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        holder = [stream]
        del stream
        drop_at_a_signal(holder)
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_a_signal_while_a_session_is_dropped(tiny_model: Path, drop_at_a_signal: Drop) -> None:
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        session = llm.session(PROMPT)
        session.generate(SHORT)
        assert len(llm._engine.core.idle) == 1
        holder = [session]
        del session
        drop_at_a_signal(holder)
        assert llm.stats().blocks_used == 0
        assert len(llm._engine.core.idle) == 0


def test_a_signal_while_a_stream_of_a_session_is_dropped(tiny_model: Path, drop_at_a_signal: Drop) -> None:
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        session = llm.session(PROMPT)
        stream = session.stream(LONG)
        next(stream)
        holder = [stream]
        del stream
        drop_at_a_signal(holder)
        assert len(session.generate(SHORT).token_ids) == 4


def test_a_signal_while_a_submission_is_dropped(tiny_model: Path, drop_at_a_signal: Drop) -> None:
    """Its id is no longer listed."""
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        processor = llm._engine.processor
        holder = [processor.ask(SHORT)]
        assert len(processor.parents) == 1
        drop_at_a_signal(holder)
        assert not processor.parents


def test_a_signal_while_an_async_engine_is_dropped(tiny_model: Path, drop_at_a_signal: Drop) -> None:
    """The AsyncLLM goes before, because asyncio's set of tasks has a callback in Python."""

    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith(("pyvelo-e", "pyvelo-p"))}

    async def body() -> None:
        llm = AsyncLLM(tiny_model, n_ctx=256, n_threads=1)
        await llm.generate([PROMPT], SHORT)
        assert len(threads() - before) > 1
        holders.append(await llm._engine_loop())

    gc.collect()
    before, n_open = threads(), descriptors(tiny_model)
    holders: list[Any] = []
    asyncio.run(body())
    gc.collect()
    drop_at_a_signal(holders)
    wait_for(lambda: threads() <= before)
    wait_for(lambda: descriptors(tiny_model) <= n_open)


def test_a_garbage_collection_drops_as_a_count_does(tiny_model: Path) -> None:
    before = descriptors(tiny_model)
    llm = LLM(tiny_model, n_ctx=256, n_threads=1)
    stream, session = llm.stream(PROMPT, LONG), llm.session(PROMPT)
    next(stream)
    session.generate(SHORT)
    in_a_cycle(stream)
    in_a_cycle(session)
    del stream, session
    gc.collect()
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    context = weakref.ref(llm._engine.context._handle)
    in_a_cycle(llm)
    del llm
    gc.collect()
    assert context() is None
    assert descriptors(tiny_model) == before


FORKED = """
import os, sys, weakref
from pyvelo import LLM, SamplingParams

llm = LLM(sys.argv[1], n_ctx=256, n_threads=1)
(vector,) = llm.embed([[3]], pooling="mean")
model = os.path.realpath(sys.argv[1])
native = [weakref.ref(each) for each in
          (llm._engine.model._handle, llm._engine.context._handle, llm._engine.embeddings._embedder._handle)]
child = os.fork()
if not child:
    del llm
    kept = all(each() is not None for each in native)
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    os._exit(7 if kept and model not in files else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert len(llm.generate([[3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
del llm
assert not any(each() for each in native)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_frees_nothing_but_descriptors(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stderr
