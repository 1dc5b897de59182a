"""Sections of gpu/check.py: what each runs, and what it requires."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts._common import ROOT
from scripts.gpu._figures import Found, LargeModel, check_serving, check_single, check_speed
from scripts.gpu._machine import Done, Places, Run, last_line
from scripts.gpu._report import Budget, Missing, backend_ops, json_lines, judge_checks

__all__ = ["MEASURE", "SECTIONS", "Tools"]

TESTS = ("tests/native/test_context.py", "tests/e2e/test_sharing.py", "tests/e2e/test_sessions.py")
NOT_HERE = "tests/e2e/test_sessions.py::test_text_keeps_the_spaces_in_front_of_punctuation"
"""Needs a vocabulary of the upstream distribution, which this machine cannot download."""
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Makes cuBLAS multiply floats as floats: answers are compared with a CPU's."""


@dataclass(frozen=True)
class Tools:
    """Paths that the sections work with; None: not given and not found."""

    device: str
    places: Places
    op_bench: Path | None
    backend_ops: Path | None
    sanitizer: Path | None
    model: LargeModel
    small_models: tuple[Path, ...]
    run: Run


def _needed(path: Path | None, what: str) -> str:
    if path is None:
        raise Missing(what)
    return os.fspath(path)


def _op_bench(tools: Tools) -> str:
    return _needed(
        tools.op_bench, "no velo-op-bench: scripts/gpu/bundle.py builds it, or name one (--op-bench)"
    )


# ---- correctness ----


def check_ops(tools: Tools, seconds: float) -> Found:
    """Run upstream's own test over the operator's cases."""
    program = _needed(
        tools.backend_ops,
        "no test-backend-ops: scripts/gpu/bundle.py builds it, or name one (--backend-ops)",
    )
    libraries = {"LD_LIBRARY_PATH": tools.places.library_path(tools.places.libraries)}
    done = tools.run([program, "test", "-o", "PAGED_ATTN", "-b", tools.device], seconds, libraries)
    found, complaints = backend_ops(done.out)
    if done.code != 0 and not complaints:
        complaints = [f"test-backend-ops ended with {done.code}: {last_line(done)}"]
    return found, complaints


def check_foreign(tools: Tools, seconds: float) -> Found:
    """Check types, head sizes, groups and ragged sequences, with NaN in every slot that no table names."""
    done = tools.run([_op_bench(tools), tools.device, "check"], seconds, {})
    cases = json_lines(done.out)
    complaints = judge_checks(cases)
    if done.code not in (0, 1):
        complaints.append(f"velo-op-bench ended with {done.code}: {last_line(done)}")
    return {"cases": cases}, complaints


def _child(tools: Tools, what: str, path: Path, seconds: float) -> dict[str, Any]:
    done = tools.run(
        [sys.executable, os.fspath(ROOT / "scripts/gpu/_child.py"), what, os.fspath(path)], seconds, EXACT
    )
    lines = json_lines(done.out)
    if done.code != 0 or not lines:
        raise RuntimeError(f"{path.name} ended with {done.code}: {last_line(done)}")
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
        complaints += [
            f"{path.name}, n_gpu_layers={run['n_gpu_layers']}: {len(run['parted'])} of {result['answers']} "
            f"answers part from the CPU's, though where two tokens are nearly as likely"
            for run in result["runs"]
            if 2 * len(run["parted"]) > result["answers"]
        ]
    return found, complaints


def check_tokens(tools: Tools, seconds: float) -> Found:
    """Compare greedy answers for no layers, half and all on the GPU with the CPU's."""
    return _engines(tools, "tokens", seconds)


def check_manager(tools: Tools, seconds: float) -> Found:
    """Check tenants that share blocks and are preempted in a small pool, by swap and by recomputation."""
    found, complaints = _engines(tools, "pressure", seconds)
    for name, result in found.items():
        for run in result["runs"]:
            where = f"{name}, n_gpu_layers={run['n_gpu_layers']}, swap_bytes={run['swap_bytes']}"
            if not run["preemptions"]:
                complaints.append(f"{where}: no request was preempted, so nothing was tested")
            if run["swap_bytes"] and not run["swaps"]:
                complaints.append(f"{where}: nothing was swapped")
    return found, complaints


def check_tests(tools: Tools, seconds: float) -> Found:
    """Run the project's tests of contexts, sharing and sessions, with all layers on the GPU."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise Missing("pytest and hypothesis are not installed")
    files = [os.fspath(ROOT / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    command += [f"--rootdir={ROOT}", f"--deselect={NOT_HERE}"]
    done = tools.run(command, seconds, EXACT | {"VELO_TEST_GPU_LAYERS": "-1"})
    summary = last_line(Done(done.code, done.out, ""))
    failed = [line for line in done.out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"summary": summary, "failed": failed}, [] if done.code == 0 else [summary, *failed]


def check_memory(tools: Tools, seconds: float) -> Found:
    """Run compute-sanitizer's memcheck over small calls of the operator."""
    return _sanitized(tools, "memcheck", seconds)


def check_races(tools: Tools, seconds: float) -> Found:
    """Run compute-sanitizer's racecheck over small calls of the operator."""
    return _sanitized(tools, "racecheck", seconds)


def check_barriers(tools: Tools, seconds: float) -> Found:
    """Run compute-sanitizer's synccheck over small calls of the operator."""
    return _sanitized(tools, "synccheck", seconds)


def _sanitized(tools: Tools, tool: str, seconds: float) -> Found:
    program = _needed(tools.sanitizer, "no compute-sanitizer, neither on the path nor in a CUDA toolkit")
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
    if "Device not supported" in done.out + done.err:
        raise Missing("compute-sanitizer does not work with this device here: it says 'Device not supported'")
    summary = [line.strip("= ") for line in (done.out + done.err).splitlines() if "SUMMARY" in line]
    cases = json_lines(done.out)
    complaints = judge_checks(cases)
    if done.code != 0:
        complaints.append(f"{tool} ended with {done.code}: {summary[-1] if summary else last_line(done)}")
    elif not summary:
        complaints.append(f"{tool} gave no summary")
    return {"tool": tool, "summary": summary, "cases": len(cases)}, complaints


# ---- speed ----


def speed(tools: Tools, seconds: float) -> Found:
    """Measure the operator alone, beside upstream's."""
    return check_speed(tools.run, _op_bench(tools), tools.device, seconds)


def single(tools: Tools, seconds: float) -> Found:
    """Measure one answer of a large model, beside stock."""
    return _with_model(tools, seconds, check_single)


def serving(tools: Tools, seconds: float) -> Found:
    """Measure many answers, beside both modes of stock."""
    return _with_model(tools, seconds, check_serving)


def _with_model(tools: Tools, seconds: float, check: Callable[[Run, Places, Path, float], Found]) -> Found:
    time = Budget(seconds)
    path = tools.model.path(time.left(seconds))
    found, complaints = check(tools.run, tools.places, path, time.left(seconds))
    return {"model": path.name, **found}, complaints


SECTIONS: dict[str, tuple[Callable[[Tools, float], Found], float]] = {
    "ops": (check_ops, 45),
    "foreign": (check_foreign, 45),
    "tokens": (check_tokens, 45),
    "manager": (check_manager, 50),
    "memcheck": (check_memory, 60),
    "racecheck": (check_races, 60),
    "synccheck": (check_barriers, 60),
    "tests": (check_tests, 120),
    "speed": (speed, 75),
    "single": (single, 90),
    "serving": (serving, 150),
}
"""Name, check, and the seconds it may take, in order."""
MEASURE = ("speed", "single", "serving")
"""Sections that need the machine for themselves."""
