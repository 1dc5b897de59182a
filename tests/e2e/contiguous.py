"""Stock llama.cpp over its contiguous cache, in a process of its own.

The same library code (native/lab/contiguous.cpp) is built against the patched tree and against the
untouched one; each build runs in a subprocess, since one process cannot hold two libllamas.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

CDEF = """
struct contiguous_params { int32_t type_k, type_v, n_ctx, n_batch, n_seqs, n_threads, flash_attn, repack; };
struct contiguous;
struct contiguous *contiguous_open(const char *model, const struct contiguous_params *params);
void contiguous_close(struct contiguous *c);
int32_t contiguous_n_vocab(const struct contiguous *c);
int32_t contiguous_decode(struct contiguous *c, const int32_t *tokens, int32_t n, int32_t first, int32_t seq);
int32_t contiguous_keep(struct contiguous *c, int32_t n, int32_t seq);
int32_t contiguous_logits(struct contiguous *c, float *logits);
int64_t contiguous_state(struct contiguous *c, int32_t seq, uint8_t *bytes, int64_t capacity);
"""


Execute = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command to its end."""


@dataclass(frozen=True)
class Job:
    """One sequence: `tokens` in `chunks`, then `n_greedy` steps that each decode the likeliest token."""

    model: str
    tokens: list[int]
    chunks: list[int]
    n_greedy: int = 0
    type_k: int = 1
    type_v: int = 1
    n_ctx: int = 2048
    n_batch: int = 512
    n_threads: int = 1
    flash_attn: bool = False
    repack: bool = True


@dataclass(frozen=True)
class Result:
    """`logits` [chunks + greedy steps, n_vocab] after each decode; `greedy` [n_greedy]; `state` as saved."""

    logits: npt.NDArray[np.float32]
    greedy: npt.NDArray[np.int32]
    state: bytes


def _execute(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run(library: Path, job: Job, execute: Execute = _execute) -> Result:
    """Put the job to the library, in a process of its own."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "out.npz")
        command = [sys.executable, __file__, str(library), json.dumps(asdict(job)), str(out)]
        done = execute(command)
        if done.returncode != 0:
            raise RuntimeError(f"the contiguous run failed ({done.returncode}): {done.stderr[-2000:]}")
        with np.load(out) as arrays:
            return Result(arrays["logits"], arrays["greedy"], arrays["state"].tobytes())


def rows_of_state(state: bytes, n_cells: int) -> list[npt.NDArray[np.uint8]]:
    """The K rows of every layer, then the V rows: arrays [n_cells, row bytes] out of a saved sequence.

    The format is as llama_kv_cache::state_write has it, with V not transposed.
    """
    at = 8  # magic, sequence id
    n_stream, cells = struct.unpack_from("<II", state, at)
    if (n_stream, cells) != (1, n_cells):
        raise ValueError(f"the state holds {cells} cells in {n_stream} streams, expected {n_cells} in 1")
    at += 8 + 12 * n_cells  # position, number of sequence ids, the id
    v_trans, n_layer = struct.unpack_from("<II", state, at)
    if v_trans:
        raise ValueError("V is transposed: run with flash attention")
    at += 8
    rows = []
    for _ in range(2 * n_layer):
        _type, row_bytes = struct.unpack_from("<iQ", state, at)
        at += 12
        size = row_bytes * n_cells
        rows.append(np.frombuffer(state, np.uint8, size, at).reshape(n_cells, row_bytes))
        at += size
    return rows


def _main(library: str, job_text: str, out: str) -> None:
    from cffi import FFI

    job = Job(**json.loads(job_text))
    ffi = FFI()
    ffi.cdef(CDEF)
    lib = ffi.dlopen(library)
    params = ffi.new("struct contiguous_params *")
    for name in ("type_k", "type_v", "n_ctx", "n_batch", "n_threads"):
        setattr(params, name, getattr(job, name))
    params.n_seqs, params.flash_attn, params.repack = 1, int(job.flash_attn), int(job.repack)
    handle = lib.contiguous_open(job.model.encode(), params)
    if handle == ffi.NULL:
        raise SystemExit("the model or the context could not be made")
    n_vocab = lib.contiguous_n_vocab(handle)

    def decode(tokens: Sequence[int], first: int) -> npt.NDArray[np.float32]:
        ids = np.asarray(tokens, np.int32)
        status = lib.contiguous_decode(handle, ffi.from_buffer("int32_t[]", ids), len(ids), first, 0)
        logits = np.empty(n_vocab, np.float32)
        if status != 0 or lib.contiguous_logits(handle, ffi.from_buffer("float[]", logits)) != 0:
            raise SystemExit(f"decode failed with {status}")
        return logits

    logits, greedy, position = [], [], 0
    for chunk in job.chunks:
        logits.append(decode(job.tokens[position : position + chunk], position))
        position += chunk
    for _ in range(job.n_greedy):
        greedy.append(int(logits[-1].argmax()))
        logits.append(decode(greedy[-1:], position))
        position += 1
    size = lib.contiguous_state(handle, 0, ffi.NULL, 0)
    state = np.zeros(size, np.uint8)
    lib.contiguous_state(handle, 0, ffi.from_buffer("uint8_t[]", state), size)
    lib.contiguous_close(handle)
    np.savez(out, logits=np.stack(logits), greedy=np.asarray(greedy, np.int32), state=state)


if __name__ == "__main__":
    _main(*sys.argv[1:])
