"""Engines in a forked process: each call is refused there, and `close` and dropping do nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FORKED = """
import asyncio, faulthandler, gc, os, signal, sys, threading, time
faulthandler.register(signal.SIGALRM, chain=True)
from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.errors import EngineError

LONG = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)

def refused(call):
    try:
        call()
    except EngineError as error:
        assert "process" in str(error), error
        return
    raise AssertionError("not refused")

def child_of_llm(llm, stream, session, run):
    for call in (lambda: llm.generate([[3]]), lambda: next(stream), lambda: llm.stream([3]), llm.stats,
                 lambda: session.generate(), session.fork, lambda: llm.embed([[3]]), llm.reset_prefix_cache,
                 lambda: llm.beam_search([[3]]), lambda: llm.tokenize("a"), lambda: llm.session([3])):
        refused(call)
    stream.close()
    session.close()
    run.__exit__(None, None, None)
    llm.close()
    del llm, stream, session, run
    gc.collect()

def end_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def main(path, folder):
    with LLM(path, n_ctx=4096, n_threads=2) as llm:
        session = llm.session([3, 4])
        session.compute()
        stream = llm.stream([3, 4, 5], LONG)
        next(stream)
        thread = threading.Thread(target=lambda: llm.generate([[6, 7]], LONG), daemon=True)
        thread.start()
        run = llm.trace(folder + "/run.trace")
        run.__enter__()
        for number in range(12):
            before = llm.stats().steps
            while llm.stats().steps < before + number:
                time.sleep(0.0005)
            child = os.fork()
            if not child:
                signal.alarm(60)
                child_of_llm(llm, stream, session, run)
                with LLM(path, n_ctx=256, n_threads=2) as other:  # its own works
                    assert len(other.generate([[3]], SamplingParams(max_tokens=3))[0].token_ids)
                os._exit(7)
            assert end_of(child) == 7
        run.__exit__(None, None, None)
        assert next(stream).token_ids
        stream.close()
    thread.join()

async def main_async(path):
    llm = AsyncLLM(path, n_ctx=4096, n_threads=2)
    stream = llm.stream([3, 4, 5], LONG)
    await anext(stream)
    session = await llm.session([3])
    child = os.fork()
    if not child:
        signal.alarm(60)
        asyncio.events._set_running_loop(None)
        refused(lambda: asyncio.run(llm.generate([[3]])))
        asyncio.run(llm.close())
        del llm, stream, session
        gc.collect()
        os._exit(7)
    assert end_of(child) == 7
    await anext(stream)
    await llm.close()

def main_of_a_thread(path):
    # The main thread is inside the engine, where signals are kept, and another one forks.
    def fork():
        while llm.stats().steps < 5:
            time.sleep(0.0005)
        child = os.fork()
        if not child:
            os._exit(7 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
        ends.append(end_of(child))
        llm.close()

    ends = []
    with LLM(path, n_ctx=4096, n_threads=2) as llm:
        thread = threading.Thread(target=fork, daemon=True)
        thread.start()
        llm.generate([[3]], LONG)
        thread.join()
    assert ends == [7]

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
main(sys.argv[1], sys.argv[2])
main_of_a_thread(sys.argv[1])
asyncio.run(main_async(sys.argv[1]))
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_is_refused_and_may_close_and_drop(tiny_model_f32: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tiny_model_f32), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.stdout == "done\n", done.stderr
