"""A child of fork() computes with its own models, whatever its parent does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

COMMON = """
import os, signal, sys, threading
from pyvelo.native import Context, Model, StepArrays, set_log
from tests.native.steps import Seq, logits_of, run

path, = sys.argv[1:]

def logits():
    with Model(path, deterministic=True) as model:
        context = Context(model, n_blocks=8, max_batch_tokens=64, max_seqs=4, max_seq_len=128, n_threads=3,
                          deterministic=True)
        arrays = StepArrays(max_tokens=64, max_seqs=4, max_width=4, max_copies=4)
        run(context, arrays, [(Seq([0]), list(range(1, 30)))])
        return logits_of(context, 1).tobytes()

def child(expected):
    pid = os.fork()
    if pid == 0:
        signal.alarm(90)
        os._exit(0 if logits() == expected else 1)
    return pid

def ended_well(pid):
    assert os.waitpid(pid, 0)[1] == 0
"""


def works(code: str, model: Path) -> None:
    """Run the code in its own process, outside the checkout."""
    command = [sys.executable, "-c", COMMON + code, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=model.parent)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_child_computes_in_the_thread_that_computed_before(tiny_model_f32: Path) -> None:
    code = """
expected = logits()
for _ in range(3):
    ended_well(child(expected))
assert logits() == expected
print("done")
"""
    works(code, tiny_model_f32)


def test_a_child_while_other_threads_load_and_compute(tiny_model_f32: Path) -> None:
    code = """
set_log(lambda level, text: None)
expected = logits()
over = threading.Event()
def work():
    while not over.is_set():
        assert logits() == expected
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(6):
    ended_well(child(expected))
over.set()
for thread in threads:
    thread.join()
print("done")
"""
    works(code, tiny_model_f32)
