"""Threads that compute, and Ctrl+C while they do."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.native import Context, StepArrays, compute, system_info

PROMPT = [3] * 30000
GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_cuts_a_long_forward_pass(endless_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over thousands of tokens takes seconds; the signal comes when it has just begun."""
    run = Context.run

    def run_and_interrupt(context: Context, arrays: StepArrays, n_tokens: int, n_seqs: int) -> None:
        if n_tokens == len(PROMPT):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        run(context, arrays, n_tokens, n_seqs)

    with LLM(endless_model, n_ctx=32768, max_batch_tokens=32768) as llm:
        monkeypatch.setattr(Context, "run", run_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY)
        assert llm.stats().steps == 0
        assert llm.stats().blocks_used == 0
        assert len(llm.generate(PROMPT[:9], GREEDY)[0].token_ids) == 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_answers_leave_no_threads_behind(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of OpenMP live while a request runs: many idle teams would slow down the one that works."""
    if "OPENMP" not in system_info():
        pytest.skip("without OpenMP, threads end with their step")
    monkeypatch.setattr(compute, "_owner", None)  # as if no other test had computed
    monkeypatch.setattr(compute, "_shared", False)

    def n_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    with LLM(tiny_model, n_threads=3) as llm:
        llm.generate("once", GREEDY)  # brings the thread that waits for Ctrl+C
        before = n_threads()
        pieces = llm.stream("upon", GREEDY)
        next(pieces)
        during = n_threads()
        list(pieces)
        after = n_threads()
    assert during > before
    assert after == before


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_bit_depends_on_the_number_of_threads(tiny_model: Path, deterministic: bool) -> None:
    """It changes beside other processes."""
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=4)
    prompts = [[i * step % 200 + 5 for i in range(n)] for step, n in ((31, 70), (17, 33), (7, 1))]
    found = []
    for n_threads in (1, 2, 3):
        with LLM(tiny_model, n_threads=n_threads, deterministic=deterministic) as llm:
            outputs = [done.outputs[0] for done in llm.generate(prompts, params)]
            found.append([(output.token_ids, output.logprobs) for output in outputs])
    assert found[0] == found[1] == found[2]
