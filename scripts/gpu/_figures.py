"""Sections of gpu/check.py that measure: the operator alone, and engines beside stock llama.cpp."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any

from scripts._common import ROOT
from scripts.gpu._machine import Done, Places, Run, last_line
from scripts.gpu._report import (
    Budget,
    Missing,
    OutOfTime,
    json_lines,
    judge_serving,
    judge_single,
    judge_speed,
)

SHAPES = ((32, 4096), (8, 32768))
PREFILLS = (2048, 8192)
SHARED = (32, 4096)
"""Sequences with one prefix, and its tokens."""
CHUNKS = ((512, 2048), (512, 8192), (512, 32768), (2048, 8192))
"""Rows of a chunk and the tokens up to its end, to find where gathering blocks would be faster."""
SPEED_TYPES = ("f16", "q8_0", "q4_0")

N_REQUESTS = 64
SERVING = (
    *("--requests", str(N_REQUESTS), "--rate", "1000", "--kv-bytes", str(2 << 30), "--kv-type", "f16"),
    *("--prompt-mean", "256", "--answer-mean", "128", "--shortest", "32", "--longest", "2048"),
    *("--batch", "512", "--threads", "8", "--tries", "3", "--any-length", "--gpu", "--json"),
)
"""2 GiB are 16384 tokens of an 8B shape: three of the longest requests, or two thirds of all."""
UNIFIED_SLOTS = ("8", "16", str(N_REQUESTS))

Found = tuple[Mapping[str, Any], Sequence[str]]


def measurements() -> list[str]:
    """Return the commands of velo-op-bench: ours first for each shape, the optional ones last."""
    lines = ["copy"]
    for kind in SPEED_TYPES:
        for n, length in SHAPES:
            lines += [f"decode {kind} {n} {length} {kernel}" for kernel in ("paged", "flash")]
    for length in PREFILLS:
        lines += [f"prefill f16 {length} {kernel}" for kernel in ("paged", "flash")]
    for kind in SPEED_TYPES:
        lines += [f"decode {kind} {SHARED[0]} {SHARED[1]} shared"]
    for kind in ("f16", "q8_0"):
        for rows, length in CHUNKS:
            lines += [f"chunk {kind} {rows} {length} {kernel}" for kernel in ("paged", "gathered")]
    return lines


def check_speed(run: Run, op_bench: str, device: str, seconds: float) -> Found:
    """Measure decode and prefill through the table, beside upstream's on contiguous memory and a copy."""
    late = []
    try:
        done = run([op_bench, device, "series", *measurements()], seconds, {})
    except OutOfTime as error:  # keep what was measured
        done, late = Done(0, error.out, ""), [str(error)]
    lines = json_lines(done.out)
    found, complaints = judge_speed(lines)
    if len(lines) < len(measurements()):
        complaints.append(f"not measured: {', '.join(measurements()[len(lines) :])}")
    if done.code not in (0, 1):
        complaints.append(f"velo-op-bench ended with {done.code}: {last_line(done)}")
    return found, late + complaints


def stock_program(places: Places, name: str) -> str:
    """Return the path of one of stock's programs; raise Missing if it is not there."""
    if places.stock is None:
        raise Missing("no programs of a stock CUDA build: scripts/gpu/bundle.py makes them, or --stock-bin")
    path = places.stock / name
    if not path.is_file():
        raise Missing(f"there is no {name} in {places.stock}")
    return os.fspath(path)


def stock_environment(places: Places) -> dict[str, str]:
    """Return the variables with which stock's programs find the libraries beside them."""
    return {"LD_LIBRARY_PATH": places.library_path(places.stock)}


def check_single(run: Run, places: Places, model: Path, seconds: float) -> Found:
    """Measure a single answer of a Llama-8B shape, beside stock llama-bench.

    Measures ours again with kernels that begin only when the one before has ended, without judging it.
    """
    program, time = stock_program(places, "llama-bench"), Budget(seconds)
    theirs = run(
        [
            *(program, "-m", os.fspath(model), "-ngl", "99", "-fa", "1"),
            *("-p", "512", "-n", "128", "-r", "5", "-o", "json"),
        ],
        time.left(seconds / 2),
        stock_environment(places),
    )
    command = [
        *(sys.executable, "-m", "pyvelo.cli", "bench", os.fspath(model), "--json", "--n-gpu-layers", "-1"),
        *("--prompt-tokens", "512", "--answer-tokens", "128", "--repeats", "5"),
    ]
    ours = run(command, time.left(seconds), {})
    found, complaints = judge_single(_json(ours, "pyvelo bench"), _json(theirs, "llama-bench"))
    try:
        apart = run(command, time.left(seconds), {"GGML_CUDA_PDL": "0"})
        found["one_kernel_after_the_other"] = _json(apart, "pyvelo bench")["results"]
    except (OutOfTime, RuntimeError) as error:
        found["one_kernel_after_the_other"] = str(error)
    return found, complaints


def check_serving(run: Run, places: Places, model: Path, seconds: float) -> Found:
    """Measure simultaneous requests of mixed lengths, beside both modes of llama-server, at equal bytes."""
    program = Path(stock_program(places, "llama-server"))
    done = run(
        [
            *(sys.executable, os.fspath(ROOT / "scripts/bench/serving.py"), os.fspath(model), *SERVING),
            *("--unified-slots", *UNIFIED_SLOTS, "--stock-bin", os.fspath(program.parent)),
        ],
        seconds,
        {},
    )
    return judge_serving(_json(done, "serving.py"), N_REQUESTS)


def _json(done: Done, name: str) -> Any:
    if done.code != 0:
        raise RuntimeError(f"{name} ended with {done.code}: {last_line(done)}")
    try:
        return json.loads(done.out)
    except ValueError:
        raise RuntimeError(f"{name} printed no JSON: {done.out[:80]!r}") from None


class LargeModel:
    """Model of the Llama-8B shape: the given one, or one of 5 GB that is written while other sections run."""

    def __init__(self, given: Path | None, scratch: Path) -> None:
        self._path = given or scratch / "llama-8b-q4_k_m.gguf"
        self._maker = ThreadPoolExecutor(1)
        self._made: Future[None] | None = None

    def begin(self, run: Run, seconds: float) -> None:
        """Start writing the model, within `seconds`, if none was given."""
        if not self._path.exists():
            self._made = self._maker.submit(self._make, run, seconds)

    def _make(self, run: Run, seconds: float) -> None:
        part = self._path.with_suffix(".part")
        done = run([sys.executable, os.fspath(ROOT / "scripts/gpu/_model.py"), os.fspath(part)], seconds, {})
        if done.code != 0:
            raise Missing(f"no model of the shape (--model), and none can be made: {last_line(done)}")
        part.replace(self._path)

    def path(self, seconds: float) -> Path:
        """Return its file. Raises Missing if it cannot be made, OutOfTime if that takes too long."""
        if self._made is not None:
            try:
                self._made.result(seconds)
            except TimeoutError:
                raise OutOfTime(f"a model of the shape was not written within {seconds:.0f} s") from None
        return self._path

    def close(self) -> None:
        """Wait until the writing has ended."""
        self._maker.shutdown()


def roomy_folder(n_bytes: int = 8 << 30) -> str | None:
    """Return a folder in which 5 GB are written fast: in memory, if it has room."""
    shared = Path("/dev/shm")
    try:
        room = os.statvfs(shared)
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
    return os.fspath(shared) if min(room.f_bavail * room.f_frsize, memory // 4) >= n_bytes else None
