"""The sections of gpu_check.py: what each runs, and what it takes for a pass."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gpu_report import Missing, OutOfTime, backend_ops, json_lines, judge_checks, judge_speed

__all__ = ["SECTIONS", "Done", "Tools", "run_program"]

HERE = Path(__file__).resolve().parent
TESTS = ("tests/native/test_context.py", "tests/e2e/test_sharing.py", "tests/e2e/test_sessions.py")
SHAPES = ((32, 4096), (8, 32768))
PREFILLS = (2048, 8192)
SPEED_TYPES = ("f16", "q8_0", "q4_0")
LLAMA_8B = (
    *("--layers", "32", "--embd", "4096", "--ffn", "14336", "--heads", "32", "--kv-heads", "8"),
    *("--head-dim", "128", "--ctx", "131072", "--vocab", "llama-bpe", "--untied", "--type", "Q4_K_M"),
)

Found = tuple[Mapping[str, Any], Sequence[str]]


@dataclass(frozen=True)
class Done:
    """A program that has ended."""

    code: int
    out: str
    err: str


Run = Callable[[Sequence[str], float, Mapping[str, str]], Done]


@dataclass(frozen=True)
class Tools:
    """What the sections work with; a path that is None was not given and not found."""

    device: str
    op_bench: Path | None
    backend_ops: Path | None
    sanitizer: Path | None
    stock_bench: Path | None
    model: Path | None
    """A Llama-8B shape; None: made."""
    small_models: tuple[Path, ...]
    scratch: Path
    run: Run


def run_program(command: Sequence[str], seconds: float, extra: Mapping[str, str]) -> Done:
    """Runs a program; OutOfTime when it takes longer, Missing where there is none."""
    try:
        done = subprocess.run(
            list(command),
            env=os.environ | dict(extra),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OutOfTime(f"{Path(command[0]).name} did not end within {seconds:.0f} s") from None
    except OSError as error:
        raise Missing(f"{command[0]} cannot be run: {error.strerror}") from None
    return Done(done.returncode, done.stdout, done.stderr)


def _needed(path: Path | None, what: str) -> str:
    if path is None:
        raise Missing(what)
    return os.fspath(path)


def _last_line(done: Done) -> str:
    lines = [line for line in (done.err or done.out).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _op_bench(tools: Tools) -> str:
    return _needed(
        tools.op_bench, "no velo-op-bench: build with -DPYVELO_BUILD_TESTS=ON, or name it (--op-bench)"
    )


# ---- right ----


def check_ops(tools: Tools, seconds: float) -> Found:
    """Upstream's own test over the operator's cases."""
    program = _needed(
        tools.backend_ops,
        "no test-backend-ops: build with -DPYVELO_UPSTREAM_TESTS=ON, or name it (--backend-ops)",
    )
    done = tools.run([program, "test", "-o", "PAGED_ATTN", "-b", tools.device], seconds, {})
    found, complaints = backend_ops(done.out)
    if done.code != 0 and not complaints:
        complaints = [f"test-backend-ops ended with {done.code}: {_last_line(done)}"]
    return found, complaints


def check_foreign(tools: Tools, seconds: float) -> Found:
    """Types, head sizes, groups and ragged sequences, with NaN in every slot that no table names."""
    done = tools.run([_op_bench(tools), tools.device, "check"], seconds, {})
    cases = json_lines(done.out)
    complaints = judge_checks(cases)
    if done.code not in (0, 1):
        complaints.append(f"velo-op-bench ended with {done.code}: {_last_line(done)}")
    return {"cases": cases}, complaints


def _child(tools: Tools, what: str, path: Path, seconds: float) -> dict[str, Any]:
    done = tools.run([sys.executable, os.fspath(HERE / "_gpu_child.py"), what, os.fspath(path)], seconds, {})
    lines = json_lines(done.out)
    if done.code != 0 or not lines:
        raise RuntimeError(f"{path.name} ended with {done.code}: {_last_line(done)}")
    return lines[-1]


def _engines(tools: Tools, what: str, seconds: float) -> tuple[dict[str, Any], list[str]]:
    if not tools.small_models:
        raise Missing("no small models: name some (--small-model)")
    found, complaints = dict[str, Any](), []
    for path in tools.small_models:
        result = found[path.name] = _child(tools, what, path, seconds / len(tools.small_models))
        complaints += [
            f"{path.name}, n_gpu_layers={run['n_gpu_layers']}: answers {run['wrong']} are not the CPU's"
            for run in result["runs"]
            if run["wrong"]
        ]
    return found, complaints


def check_tokens(tools: Tools, seconds: float) -> Found:
    """Greedy answers for no layers, half and all on the GPU are the CPU's."""
    return _engines(tools, "tokens", seconds)


def check_manager(tools: Tools, seconds: float) -> Found:
    """Tenants that share and give way in a pool that is too small, by swap and by computing again."""
    found, complaints = _engines(tools, "pressure", seconds)
    for name, result in found.items():
        for run in result["runs"]:
            where = f"{name}, n_gpu_layers={run['n_gpu_layers']}, swap_bytes={run['swap_bytes']}"
            if not run["preemptions"]:
                complaints.append(f"{where}: nobody gave way, so nothing was tested")
            if run["swap_bytes"] and not run["swaps"]:
                complaints.append(f"{where}: nothing was swapped")
    return found, complaints


def check_tests(tools: Tools, seconds: float) -> Found:
    """The project's tests of contexts, sharing and sessions, with all layers on the GPU."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise Missing("pytest and hypothesis are not installed")
    files = [os.fspath(HERE.parent / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = tools.run(command, seconds, {"VELO_TEST_GPU_LAYERS": "-1"})
    summary = _last_line(Done(done.code, done.out, ""))
    return {"summary": summary}, [] if done.code == 0 else [summary]


def check_memory(tools: Tools, seconds: float) -> Found:
    """compute-sanitizer's memcheck over small calls of the operator."""
    return _sanitized(tools, "memcheck", seconds)


def check_races(tools: Tools, seconds: float) -> Found:
    """compute-sanitizer's racecheck over small calls of the operator."""
    return _sanitized(tools, "racecheck", seconds)


def _sanitized(tools: Tools, tool: str, seconds: float) -> Found:
    program = _needed(tools.sanitizer, "no compute-sanitizer on the path (it comes with the CUDA toolkit)")
    command = [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        _op_bench(tools),
        tools.device,
        "check",
        "quick",
    ]
    done = tools.run(command, seconds, {})
    summary = [line.strip("= ") for line in (done.out + done.err).splitlines() if "SUMMARY" in line]
    cases = json_lines(done.out)
    complaints = judge_checks(cases)
    if done.code != 0:
        complaints.append(f"{tool} ended with {done.code}: {summary[-1] if summary else _last_line(done)}")
    elif not summary:
        complaints.append(f"{tool} gave no summary")
    return {"tool": tool, "summary": summary, "cases": len(cases)}, complaints


# ---- fast ----


def check_speed(tools: Tools, seconds: float) -> Found:
    """Decode and prefill through the table, beside upstream's on contiguous memory and a plain copy."""
    program, lines, failed = _op_bench(tools), list[dict[str, Any]](), list[str]()
    runs: list[tuple[str, ...]] = [("copy",)]
    for kernel in ("paged", "flash"):
        shapes = [(kind, n, size) for kind in SPEED_TYPES for n, size in SHAPES]
        runs += [("decode", kind, str(n), str(size), kernel) for kind, n, size in shapes]
        runs += [("prefill", "f16", str(size), kernel) for size in PREFILLS]
    end = time.monotonic() + seconds
    for run in runs:
        try:
            done = tools.run([program, tools.device, *run], max(0.1, end - time.monotonic()), {})
        except OutOfTime as late:  # what was measured is kept
            failed.append(f"{' '.join(run)}: {late}")
            break
        lines += json_lines(done.out)
        if done.code != 0:
            failed.append(f"{' '.join(run)}: {_last_line(done)}")
    found, complaints = judge_speed(lines)
    return found, failed + complaints


def check_end_to_end(tools: Tools, seconds: float) -> Found:
    """A single answer of a Llama-8B shape, beside stock llama-bench."""
    stock = _needed(tools.stock_bench, "no llama-bench of a stock CUDA build was named (--stock-bench)")
    model = os.fspath(tools.model or _make_8b(tools, seconds / 2))
    ours = tools.run(
        [
            *(sys.executable, "-m", "pyvelo.cli", "bench", model, "--json", "--n-gpu-layers", "-1"),
            *("--prompt-tokens", "512", "--answer-tokens", "128", "--sequences", "1,64", "--repeats", "3"),
        ],
        seconds / 2,
        {},
    )
    theirs = tools.run(
        [stock, "-m", model, "-ngl", "99", "-p", "512", "-n", "128", "-r", "3", "-o", "json"], seconds / 2, {}
    )
    for name, done in (("pyvelo bench", ours), ("llama-bench", theirs)):
        if done.code != 0:
            raise RuntimeError(f"{name} ended with {done.code}: {_last_line(done)}")
    rows = json.loads(ours.out)["results"]
    one = next(row["median"] for row in rows if row["test"] == "answer" and row["sequences"] == 1)
    stock_one = next(row["avg_ts"] for row in json.loads(theirs.out) if row["n_gen"] == 128)
    share = one / stock_one
    found = {"model": model, "pyvelo": rows, "stock_tokens_per_second": stock_one, "versus_stock": share}
    return found, [] if share >= 0.99 else [f"a single answer: {share:.3f}x of stock, not 0.99x"]


def _make_8b(tools: Tools, seconds: float) -> Path:
    path = tools.scratch / "llama-8b-q4_k_m.gguf"
    if not path.exists():
        command = [sys.executable, os.fspath(HERE / "make_model.py"), *LLAMA_8B, os.fspath(path)]
        done = tools.run(command, seconds, {})
        if done.code != 0:
            raise Missing(f"no model of the shape, and none can be made: {_last_line(done)}")
    return path


SECTIONS: dict[str, tuple[Callable[[Tools, float], Found], float]] = {
    "ops": (check_ops, 60),
    "foreign": (check_foreign, 45),
    "tokens": (check_tokens, 45),
    "manager": (check_manager, 60),
    "memcheck": (check_memory, 45),
    "racecheck": (check_races, 45),
    "speed": (check_speed, 90),
    "tests": (check_tests, 90),
    "end_to_end": (check_end_to_end, 240),
}
"""Name, check, and the seconds it may take, in the order in which they run."""
