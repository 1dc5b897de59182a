"""Report of gpu/check.py: sections and their outcome, time budgets, and required figures."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = [
    "FAILED",
    "NO_GPU",
    "PASSED",
    "Budget",
    "Missing",
    "OutOfTime",
    "Section",
    "alternatives",
    "backend_ops",
    "exit_code",
    "json_lines",
    "judge_checks",
    "judge_serving",
    "judge_single",
    "judge_speed",
    "run_section",
]

PASSED, FAILED, NO_GPU = 0, 1, 3
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STRICT = ("f32", "f16", "bf16")
NMSE, STRICT_NMSE = 5e-4, 1e-5
BANDWIDTH = {"f16": 0.80, "q8_0": 0.60, "q4_0": 0.50}
"""Shares of the copy bandwidth at which decode must read pages."""
VERSUS_FLASH = {"decode": 1.0, "prefill": 0.95}
EVENTS = "cuda events"
SINGLE, MANY, PEAK = 0.99, 1.5, 5.0
"""Required against stock: speed of one answer and of many, and the number that run at once."""

Outcome = Literal["passed", "failed", "not there", "out of time"]


class Missing(Exception):
    """Error of a section that lacks something on this machine; the message says what."""


class OutOfTime(Exception):
    """Error of a section that ran out of time; `out` is what its program had printed."""

    def __init__(self, message: str, out: str = "") -> None:
        super().__init__(message)
        self.out = out


@dataclass
class Section:
    """Outcome of a section: why it did not pass, its seconds, and its findings."""

    name: str
    outcome: Outcome
    why: str = ""
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Budget:
    """Seconds of a whole run; a section gets its own share, or what is left."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self, share: float) -> float:
        """Return the seconds for a section that would take up to `share`."""
        return max(0.0, min(share, self._end - self._clock()))


def run_section(
    name: str,
    check: Callable[[float], tuple[Mapping[str, Any], Sequence[str]]],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Section:
    """Run `check` within `seconds`; it returns its findings and what is wrong with them."""
    if seconds <= 0:
        return Section(name, "out of time", "the sections before it took all the time")
    start = clock()
    found: Mapping[str, Any] = {}
    try:
        found, complaints = check(seconds)
        outcome, why = ("failed", "; ".join(complaints)) if complaints else ("passed", "")
    except Missing as missing:
        outcome, why = "not there", str(missing)
    except OutOfTime as late:
        outcome, why = "out of time", str(late)
    except Exception as error:  # one section's failure must not hide the others
        outcome, why = "failed", f"{type(error).__name__}: {error}"
    return Section(name, outcome, why, round(clock() - start, 2), dict(found))  # type: ignore[arg-type]


def exit_code(sections: Iterable[Section]) -> int:
    """Return 0 if there are sections and all passed; a missing or unreached one did not pass."""
    outcomes = [section.outcome for section in sections]
    return PASSED if outcomes and all(outcome == "passed" for outcome in outcomes) else FAILED


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a program's output, one on a line; other lines are skipped."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def backend_ops(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the passed, failed and skipped cases of test-backend-ops, and what is wrong."""
    lines = [COLOUR.sub("", line).strip() for line in text.splitlines()]
    cases = [line for line in lines if line.startswith("PAGED_ATTN(")]
    failed = [line for line in cases if line.endswith("FAIL")]
    refused = [line for line in cases if "not supported" in line]
    passed = sum(line.endswith("OK") for line in cases)
    complaints = []
    if failed:
        complaints.append(f"{len(failed)} cases of test-backend-ops fail, the first {failed[0]}")
    if refused:
        complaints.append(f"{len(refused)} cases are not supported, the first {refused[0]}")
    if not passed:
        complaints.append("test-backend-ops ran no case of PAGED_ATTN")
    return {"passed": passed, "failed": failed, "not_supported": refused}, complaints


def judge_checks(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the cases of velo-op-bench's check."""
    if not checks:
        return ["velo-op-bench checked nothing"]
    wrong = []
    for case in checks:
        limit = STRICT_NMSE if str(case["check"]).split()[0] in STRICT else NMSE
        error = case.get("nmse")
        if error is None or not error <= limit:
            wrong.append(f"{case['check']}: {case.get('refusal') or f'NMSE {error}, above {limit:g}'}")
    return wrong


def judge_speed(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return velo-op-bench's shares of the copy bandwidth and of upstream's speed, and what is too slow."""
    copies = [line for line in lines if line.get("bench") == "copy"]
    bandwidth = max((2 * line["bytes"] / line["seconds"] for line in copies), default=0.0)
    runs = {
        (line["bench"], line["type"], line["sequences"], line["length"], line["kernel"]): line
        for line in lines
        if line.get("bench") in VERSUS_FLASH
    }
    rows: list[dict[str, Any]] = []
    complaints = [f"{line['failed']}: {line['why']}" for line in lines if "failed" in line]
    if not bandwidth:
        complaints.append("the copy bandwidth was not measured")
    clocks = {str(line.get("clock")) for line in [*copies, *runs.values()]}
    if others := sorted(clocks - {EVENTS}):
        complaints.append(f"measured by {', '.join(others)}, not by {EVENTS}")
    for (bench, kind, n, length, kernel), line in runs.items():
        if kernel != "paged":
            continue
        shown = f"{bench} {kind} {n} x {length}"
        row: dict[str, Any] = {**line, "bytes_per_second": line["kv_bytes"] / line["seconds"]}
        other = runs.get((bench, kind, n, length, "flash"))
        row["versus_flash"] = other["seconds"] / line["seconds"] if other else None
        if row["versus_flash"] is None:
            complaints.append(f"{shown}: upstream's was not measured")
        elif row["versus_flash"] < VERSUS_FLASH[bench]:
            complaints.append(
                f"{shown}: {row['versus_flash']:.2f}x of upstream's, not {VERSUS_FLASH[bench]:g}x"
            )
        if bench == "decode" and bandwidth:
            row["of_copy_bandwidth"] = row["bytes_per_second"] / bandwidth
            wanted = BANDWIDTH.get(kind, 0.0)
            if row["of_copy_bandwidth"] < wanted:
                complaints.append(
                    f"{shown}: {row['of_copy_bandwidth']:.0%} of the copy bandwidth, not {wanted:.0%}"
                )
        rows.append(row)
    if not rows:
        complaints.append("nothing was measured")
    return {"copy_bytes_per_second": bandwidth, "rows": rows, "alternatives": alternatives(lines)}, complaints


def alternatives(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the gain of each alternative over reading pages one by one.

    The alternatives are one read of a shared prefix, and blocks gathered for upstream's kernel.
    """
    shape = ("bench", "type", "sequences", "rows", "length")
    runs = {(*(line.get(key) for key in shape), line["kernel"]): line for line in lines if "kernel" in line}
    found = []
    for (*of, kernel), line in runs.items():
        if kernel in ("shared", "gathered") and (paged := runs.get((*of, "paged"))):
            ratio = paged["seconds"] / line["seconds"]
            found.append({**line, "seconds_paged": paged["seconds"], "versus_paged": ratio})
    return found


def judge_single(
    ours: Mapping[str, Any], stock: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Compare one answer at a time: the JSON of `pyvelo bench` with llama-bench's."""
    mine = [row["median"] for row in ours["results"] if row["test"] == "answer" and row["sequences"] == 1]
    theirs = [statistics.median(row["samples_ts"]) for row in stock if row["n_gen"] > 0]
    found: dict[str, Any] = {"pyvelo": ours["results"], "stock": [_brief(row) for row in stock]}
    if not mine or not theirs:
        return found, ["an answer was not measured on both sides"]
    share = mine[0] / theirs[0]
    found["versus_stock"] = share
    return found, [] if share >= SINGLE else [f"a single answer: {share:.3f}x of stock, not {SINGLE:g}x"]


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in ("n_prompt", "n_gen", "samples_ts", "backends", "build_commit")}


def judge_serving(report: Mapping[str, Any], n_requests: int) -> tuple[dict[str, Any], list[str]]:
    """Judge many requests at equal bytes of cache from the JSON of bench/serving.py.

    Speed is compared with the better of all stock modes, the number that run at once with the mode whose
    slots always suffice: fixed streams that each hold the longest request. The figures against the modes that
    happened to abort nothing are reported too.
    """
    complaints, speeds, peaks, unbroken = list[str](), list[float](), list[float](), list[float]()
    for number, summaries in enumerate(report["rounds"]):
        mine = summaries["PyVelo"]
        stock = {name: summary for name, summary in summaries.items() if name != "PyVelo"}
        streams = [summary["peak"] for name, summary in stock.items() if name.startswith("streams")]
        if mine["failed"]:
            complaints.append(f"round {number + 1}: {mine['failed']} of our {n_requests} requests failed")
        best = max((summary["tokens_per_s"] for summary in stock.values()), default=0.0)
        if not best or not streams or not streams[0]:
            complaints.append(f"round {number + 1}: stock finished nothing to compare with")
            continue
        speeds.append(mine["tokens_per_s"] / best)
        peaks.append(mine["peak"] / streams[0])
        calm = [summary["peak"] for summary in stock.values() if not summary["broken_off"]]
        unbroken.append(mine["peak"] / max(calm, default=streams[0]))
    found: dict[str, Any] = {**report, "versus_stock": None, "peak_versus_streams": None}
    if not speeds:
        return found, complaints or ["nothing was measured"]
    found["versus_stock"], found["peak_versus_streams"] = statistics.median(speeds), statistics.median(peaks)
    found["peak_versus_unbroken"] = statistics.median(unbroken)
    if found["versus_stock"] < MANY:
        complaints.append(f"{n_requests} requests: {found['versus_stock']:.2f}x of stock, not {MANY:g}x")
    if found["peak_versus_streams"] < PEAK:
        complaints.append(f"{found['peak_versus_streams']:.1f}x as many at once as stock, not {PEAK:g}x")
    return found, complaints
