"""PyVelo and a stock llama.cpp, such as llama_cpp's, in one process: each computes as it does alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.demo import DEMO_MODEL

from .contiguous import Job, run

QUESTION = "What is 12 + 30?"
JOB = Job(str(DEMO_MODEL), tokens=list(range(5, 25)), chunks=[20], n_greedy=8)

# Arguments: the order, stock's library, its job, and the path of its result. Prints PyVelo's answer.
PROGRAM = """
import ctypes, os, sys
order, library, job, out, flags = sys.argv[1:]
sys.setdlopenflags(int(flags))


def velo():
    from pyvelo import LLM, SamplingParams
    from pyvelo.demo import DEMO_MODEL

    with LLM(DEMO_MODEL) as llm:
        params = SamplingParams(max_tokens=8, temperature=0)
        print(llm.generate("What is 12 + 30?", params)[0].text, end="", flush=True)


def stock():
    from tests.e2e import contiguous

    contiguous._main(library, job, out)


def stock_for_all():
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


for name in order.split():
    globals()[name]()
"""


def both(order: str, library: Path, out: Path, flags: int = os.RTLD_NOW) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    command = [sys.executable, "-c", PROGRAM, order, str(library), json.dumps(asdict(JOB)), str(out)]
    command.append(str(flags))
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="where libraries are found by name is Linux's")
@pytest.mark.parametrize("order", ["velo stock", "stock velo", "velo stock velo"])
@pytest.mark.parametrize("flags", [os.RTLD_NOW, os.RTLD_NOW | os.RTLD_GLOBAL], ids=["local", "global"])
def test_each_answers_as_alone(stock_library: Path, tmp_path: Path, order: str, flags: int) -> None:
    alone = run(stock_library, JOB)
    with LLM(DEMO_MODEL) as llm:
        text = llm.generate(QUESTION, SamplingParams(max_tokens=8, temperature=0))[0].text
    out = tmp_path / "out.npz"
    done = both(order, stock_library, out, flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == text * order.count("velo")
    with np.load(out) as arrays:
        assert arrays["greedy"].tolist() == alone.greedy.tolist()
        assert np.array_equal(arrays["logits"], alone.logits)


@pytest.mark.skipif(sys.platform != "linux", reason="symbols of a library are for all on Linux alone")
def test_symbols_that_are_for_all_are_refused(stock_library: Path, tmp_path: Path) -> None:
    done = both("stock_for_all velo", stock_library, tmp_path / "out.npz")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("pyvelo.errors.")
    assert "libggml-base.so" in done.stderr
    assert "RTLD_GLOBAL" in done.stderr
