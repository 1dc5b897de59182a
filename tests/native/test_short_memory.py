"""Memory that runs out anywhere, or threads that cannot start, raise OutOfMemory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit of address space is Linux's")

COMMON = """
import collections, os, resource, sys
from pyvelo.errors import OutOfMemory
from pyvelo.native import Context, Embedder, Model, StepArrays
from tests.native.steps import Seq, logits_of, run

path, = sys.argv[1:]

def limit(mib):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + int(mib * 2**20),) * 2)

def step(n_threads, **options):
    model = Model(path, **options)
    deterministic = options.get("deterministic", False)
    context = Context(model, n_blocks=64, max_batch_tokens=256, max_seqs=4, max_seq_len=512,
                      n_threads=n_threads, deterministic=deterministic)
    arrays = StepArrays(max_tokens=256, max_seqs=4, max_width=16, max_copies=4)
    run(context, arrays, [(Seq([0, 1]), list(range(1, 50)))])
    return logits_of(context, 1).sum()

def embed(n_threads):
    return Embedder(Model(path), max_tokens=200, n_threads=n_threads).embed([list(range(1, 200))], 1).sum()
"""


def output(code: str, model: Path) -> list[str]:
    """Run the code in its own process, outside the checkout. Return the printed lines."""
    command = [sys.executable, "-c", COMMON + code, str(model)]
    # OpenMP ends a process if its thread cannot start; a fork reuses the stack of OpenBLAS's second thread
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, cwd=model.parent, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "call", ["step(2)", "step(2, use_mmap=False)", "step(2, deterministic=True)", "embed(2)"]
)
def test_memory_that_runs_out_anywhere(packed_model: Path, call: str) -> None:
    code = f"""
def outcome(mib):
    reader, writer = os.pipe()
    if os.fork() == 0:
        limit(mib)
        try:
            {call}
            said = b"done"
        except OutOfMemory as error:
            remedy = any(each in str(error) for each in ("would do", "use a smaller", "use shorter"))
            said = b"a remedy" if remedy else str(error).encode()
        except MemoryError:
            said = b"Python's"
        except BaseException as error:
            said = repr(error).encode()
        os.write(writer, said)
        os._exit(0)
    status = os.wait()[1]
    os.close(writer)
    said = os.read(reader, 4000).decode() if status == 0 else f"status {{status}}"
    os.close(reader)
    return said

needed = 1
while outcome(needed) != "done":
    needed *= 2
n = int(24 * float(os.environ.get("VELO_TEST_EFFORT", "1")))
print(collections.Counter(outcome(needed * i / n) for i in range(n)))
"""
    (line,) = output(code, packed_model)
    seen = line.removeprefix("Counter({").partition("})")[0]
    kinds = {part.split(": ")[0].strip("'\"") for part in seen.split(", ")}
    assert "a remedy" in kinds, line
    assert kinds <= {"a remedy", "done", "Python's"}, line


@pytest.mark.parametrize("call", ["step(400)", "embed(400)"])
def test_threads_that_cannot_start(tiny_model_f32: Path, call: str) -> None:
    code = f"""
limit(500)  # each thread has a stack of 2 MiB or more
for _ in range(2):
    try:
        {call}
    except OutOfMemory as error:
        print(error)
print({call.replace("400", "2")} != 0)
"""
    *errors, works = output(code, tiny_model_f32)
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("a team of 400 threads cannot be started: use a smaller n_threads")
    assert works == "True"
