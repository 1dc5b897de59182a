"""The check of a GPU where there is none: what it reports, and that nothing passes that was not tried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lab_device
import pytest
from _gpu_report import (
    FAILED,
    NO_GPU,
    PASSED,
    Budget,
    Missing,
    OutOfTime,
    Section,
    backend_ops,
    exit_code,
    json_lines,
    judge_checks,
    judge_speed,
    run_section,
)
from _gpu_sections import PREFILLS, SECTIONS, SHAPES, SPEED_TYPES, Done, run_program
from gpu_check import WRONG, main

import pyvelo
from pyvelo.native import devices

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
GPU = {"name": "CUDA0", "description": "a card", "kind": "gpu", "memory_total": 80, "memory_free": 79}
CPU = GPU | {"name": "CPU", "kind": "cpu"}


# ---- a machine that is not there ----


class Machine:
    """Answers for the programs that are run; `changes` replace answers, by a word of the command."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], seconds: float, extra: Mapping[str, str]) -> Done:
        self.commands.append(list(command))
        for word, answer in self.changes.items():
            if word in command or any(Path(part).stem == word for part in command[:2]):
                if isinstance(answer, Exception):
                    raise answer
                return answer if isinstance(answer, Done) else Done(0, answer, "")
        return self._usual(command)

    def _usual(self, command: Sequence[str]) -> Done:
        if "devices" in command:
            return Done(0, json.dumps(CPU) + "\n" + json.dumps(GPU), "")
        if command[0] == "nvidia-smi":
            return Done(0, "550.54.15\n", "")
        if "PAGED_ATTN" in command:
            return Done(
                0, "  PAGED_ATTN(type_k=f16): OK\n  PAGED_ATTN(type_k=q8_0): \x1b[1;32mOK\x1b[0m\n", ""
            )
        if "--tool" in command:
            return Done(0, CHECKED + "========= ERROR SUMMARY: 0 errors\n", "")
        if "check" in command:
            return Done(0, CHECKED, "")
        if "tokens" in command:
            return Done(0, json.dumps({"answers": 8, "runs": [{"n_gpu_layers": 0, "wrong": []}]}), "")
        if "pressure" in command:
            run = {"n_gpu_layers": -1, "swap_bytes": 1, "wrong": [], "preemptions": 3, "swaps": 2}
            return Done(0, json.dumps({"answers": 8, "runs": [run]}), "")
        if command[0].endswith("op_bench"):
            return Done(0, json.dumps(figure(command[2:])), "")
        if "pyvelo.cli" in command:
            rows = [{"test": "answer", "sequences": 1, "median": 100.0}]
            return Done(0, json.dumps({"results": rows}), "")
        if "-ngl" in command:
            return Done(0, json.dumps([{"n_gen": 0, "avg_ts": 9.0}, {"n_gen": 128, "avg_ts": 100.5}]), "")
        return Done(0, "3 passed\n", "")


CHECKED = '{"check": "f16 64x64 8/8", "nmse": 1e-7}\n{"check": "q4_0 64x64 8/8", "nmse": 4e-4}\nnoise\n'


def figure(words: Sequence[str]) -> dict[str, Any]:
    """A card that copies 4 TB/s, read and written, and reads pages at 90 % of that, as upstream does."""
    if words[0] == "copy":
        return {"bench": "copy", "bytes": 2 << 30, "seconds": (4 << 30) / 4e12}
    n, length = (int(words[2]), int(words[3])) if words[0] == "decode" else (1, int(words[2]))
    size = n * length * 4096
    head = {"bench": words[0], "kernel": words[-1], "type": words[1], "sequences": n, "length": length}
    return head | {"kv_bytes": size, "seconds": size / 3.6e12}


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(machine: Machine, *options: str) -> tuple[int, dict[str, Any]]:
        output, given = tmp_path / "gpu.json", []
        for option in (
            "--op-bench",
            "--backend-ops",
            "--sanitizer",
            "--stock-bench",
            "--model",
            "--small-model",
        ):
            if option not in options:
                given += [option, str(tmp_path / option.strip("-").replace("-", "_"))]
        code = main(["-o", str(output), *given, *options], machine)
        return code, json.loads(output.read_text())

    return run


Check = Callable[..., tuple[int, dict[str, Any]]]


def outcomes(report: Mapping[str, Any]) -> dict[str, str]:
    return {section["name"]: section["outcome"] for section in report["sections"]}


def test_a_card_on_which_all_is_well(check: Check) -> None:
    code, report = check(Machine())
    assert code == PASSED
    assert report["passed"] is True
    assert (report["device"], report["driver"]) == (GPU, "550.54.15")
    assert outcomes(report) == dict.fromkeys(SECTIONS, "passed")
    rows = next(s for s in report["sections"] if s["name"] == "speed")["found"]["rows"]
    assert len(rows) == len(SPEED_TYPES) * len(SHAPES) + len(PREFILLS)


@pytest.mark.parametrize(
    ("changes", "section", "why"),
    [
        (
            {"PAGED_ATTN": "  PAGED_ATTN(a): OK\n  PAGED_ATTN(b): FAIL\n"},
            "ops",
            "1 cases of test-backend-ops",
        ),
        ({"PAGED_ATTN": "  PAGED_ATTN(a): not supported [CUDA0]\n"}, "ops", "not supported"),
        ({"PAGED_ATTN": "Backend CUDA0: OK\n"}, "ops", "no case of PAGED_ATTN"),
        ({"PAGED_ATTN": Done(139, "  PAGED_ATTN(a): OK\n", "core dumped")}, "ops", "139: core dumped"),
        ({"check": '{"check": "f16 64x64 8/8", "nmse": 2e-5}\n'}, "foreign", "above 1e-05"),
        ({"check": '{"check": "q8_0 64x64 8/8", "nmse": null}\n'}, "foreign", "NMSE None"),
        ({"check": '{"check": "q8_0 8x8 8/8", "refusal": "no kernel"}\n'}, "foreign", "no kernel"),
        ({"check": ""}, "foreign", "checked nothing"),
        (
            {"tokens": '{"runs": [{"n_gpu_layers": 2, "wrong": [5]}]}'},
            "tokens",
            "answers [5] are not the CPU's",
        ),
        ({"tokens": Done(1, "", "Traceback\nValueError: x\n")}, "tokens", "ended with 1: ValueError: x"),
        (
            {"memcheck": Done(9, CHECKED + "ERROR SUMMARY: 4 errors", "")},
            "memcheck",
            "ERROR SUMMARY: 4 errors",
        ),
        ({"racecheck": CHECKED}, "racecheck", "no summary"),
        ({"copy": Done(2, "", "no memory")}, "speed", "copy: no memory; the copy bandwidth was not measured"),
        ({"pytest": Done(1, "1 failed, 2 passed\n", "")}, "tests", "1 failed, 2 passed"),
    ],
)
def test_what_is_wrong_fails_its_section_alone(
    check: Check, changes: dict[str, Any], section: str, why: str
) -> None:
    code, report = check(Machine(**changes))
    assert code == FAILED
    assert report["passed"] is False
    failed = [found for found in report["sections"] if found["outcome"] != "passed"]
    names = {found["name"] for found in failed}
    assert section in names
    assert names <= ({section, "memcheck", "racecheck"} if section == "foreign" else {section})
    assert why in next(found["why"] for found in failed if found["name"] == section)


def test_pressure_that_pressed_nobody_is_no_pass(check: Check) -> None:
    run = {"n_gpu_layers": -1, "swap_bytes": 1, "wrong": [], "preemptions": 0, "swaps": 0}
    _, report = check(Machine(pressure=json.dumps({"runs": [run]})), "--only", "manager")
    (section,) = report["sections"]
    assert section["outcome"] == "failed"
    assert "nobody gave way" in section["why"]
    assert "nothing was swapped" in section["why"]


def test_slower_than_stock_is_no_pass(check: Check) -> None:
    slow = json.dumps({"results": [{"test": "answer", "sequences": 1, "median": 98.0}]})
    code, report = check(Machine(**{"pyvelo.cli": slow}), "--only", "end_to_end")
    assert (code, report["sections"][0]["outcome"]) == (FAILED, "failed")
    assert report["sections"][0]["found"]["versus_stock"] == pytest.approx(98 / 100.5)


def test_what_is_not_there_has_not_passed(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, report = check(Machine(memcheck=Missing("no compute-sanitizer")), "--only", "memcheck,tests")
    assert code == FAILED
    assert outcomes(report) == {"memcheck": "not there", "tests": "not there"}
    assert "pytest and hypothesis" in report["sections"][1]["why"]


def test_time_is_kept(check: Check) -> None:
    code, report = check(Machine(PAGED_ATTN=OutOfTime("did not end within 60 s")), "--only", "ops")
    assert (code, outcomes(report)) == (FAILED, {"ops": "out of time"})
    code, report = check(Machine(), "--seconds", "0", "--only", "tokens,speed")
    assert (code, outcomes(report)) == (FAILED, {"tokens": "out of time", "speed": "out of time"})


def test_a_measurement_that_hangs_keeps_the_others(check: Check) -> None:
    _, report = check(Machine(flash=OutOfTime("did not end")), "--only", "speed")
    (section,) = report["sections"]
    assert section["outcome"] == "failed"
    assert len(section["found"]["rows"]) == len(SPEED_TYPES) * len(SHAPES) + len(PREFILLS)
    assert "upstream's was not measured" in section["why"]


def test_no_gpu_is_one_line_and_a_report(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(Machine(devices=json.dumps(CPU)))
    assert (code, report["passed"], report["device"], report["sections"]) == (NO_GPU, False, None, [])
    assert capsys.readouterr().err == f"gpu_check: {report['why']}\n"
    code, report = check(Machine(), "--device", "CUDA7")
    assert (code, report["why"]) == (NO_GPU, "there is no GPU CUDA7; there are CUDA0")
    code, report = check(Machine(devices=Done(1, "", "ImportError: no library\n")))
    assert (code, "ImportError: no library" in report["why"]) == (NO_GPU, True)


def test_without_the_package_the_operator_is_checked(check: Check) -> None:
    machine = Machine(_gpu_child=Done(1, "", "ModuleNotFoundError: No module named 'pyvelo'\n"))
    code, report = check(machine, "--only", "foreign,tokens,speed")
    assert (code, report["device"]) == (FAILED, GPU)
    assert outcomes(report) == {"foreign": "passed", "tokens": "failed", "speed": "passed"}
    assert "No module named 'pyvelo'" in report["sections"][1]["why"]


def test_sections_that_do_not_exist(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "ops,dreams"], Machine()) == WRONG
    assert "no section 'dreams': choose from ops, foreign" in capsys.readouterr().err


def test_budgets() -> None:
    now = [0.0]
    budget = Budget(100, lambda: now[0])
    assert budget.left(60) == 60
    now[0] = 70.0
    assert budget.left(60) == 30
    now[0] = 130.0
    assert budget.left(60) == 0


def test_a_defect_of_a_section_is_its_own() -> None:
    def broken(_: float) -> tuple[dict[str, Any], list[str]]:
        raise KeyError("x")

    section = run_section("broken", broken, 5)
    assert (section.outcome, section.why) == ("failed", "KeyError: 'x'")
    assert exit_code([]) == FAILED
    assert exit_code([Section("a", "passed")]) == PASSED
    assert exit_code([Section("a", "passed"), Section("b", "not there")]) == FAILED


def test_figures_by_hand() -> None:
    lines = [figure(["copy"]), figure(["decode", "f16", "32", "4096", "paged"])]
    slow = figure(["decode", "f16", "32", "4096", "flash"]) | {"seconds": 1e-9}
    found, complaints = judge_speed([*lines, slow])
    assert found["copy_bytes_per_second"] == pytest.approx(4e12)
    assert found["rows"][0]["of_copy_bandwidth"] == pytest.approx(0.9)
    assert len(complaints) == 1
    assert "not 1x" in complaints[0]
    half = [line | {"seconds": 2 * line["seconds"]} for line in lines[1:]]
    assert any("45% of the copy bandwidth, not 80%" in text for text in judge_speed([lines[0], *half])[1])


def test_what_upstreams_test_prints() -> None:
    found, complaints = backend_ops("  PAGED_ATTN(x=1): OK\n  ADD(x=1): FAIL\n  PAGED_ATTN(x=2): OK\n")
    assert (found["passed"], found["failed"], complaints) == (2, [], [])
    assert judge_checks([{"check": "f32 64x64 8/8", "nmse": 1e-5}]) == []
    assert len(judge_checks([{"check": "f32 64x64 8/8", "nmse": float("nan")}])) == 1


# ---- real programs ----


def test_programs_that_hang_or_are_not_there() -> None:
    with pytest.raises(OutOfTime, match="did not end"):
        run_program([sys.executable, "-c", "import time; time.sleep(60)"], 0.2, {})
    with pytest.raises(Missing, match="cannot be run"):
        run_program(["/nonexistent/program"], 1, {})
    assert (
        run_program([sys.executable, "-c", "import os; print(os.environ['A'])"], 30, {"A": "7"}).out == "7\n"
    )


def test_the_script_itself_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "-o", str(output)]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == NO_GPU, done.stderr
    assert json.loads(output.read_text())["why"] in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["tokens", "pressure"])
def test_engines_of_the_check_on_a_device_of_the_laboratory(tiny_model_f32: Path, what: str) -> None:
    code = (
        f"import sys; sys.path[:0] = [{os.path.dirname(lab_device.__file__)!r}, {os.fspath(SCRIPTS)!r}]\n"
        f"import lab_device, _gpu_child; lab_device.add_device(1 << 30)\n"
        f"_gpu_child.ENGINE['n_threads'] = 1\n"
        f"sys.argv = ['', {what!r}, {os.fspath(tiny_model_f32)!r}]; sys.exit(_gpu_child.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["answers"] == 8
    assert [run["wrong"] for run in result["runs"]] == [[]] * len(result["runs"])
    if what == "pressure":
        assert all(run["preemptions"] > 0 for run in result["runs"])
        assert all((run["swaps"] > 0) == (run["swap_bytes"] > 0) for run in result["runs"])


@pytest.fixture(scope="module")
def op_bench() -> str:
    program = Path(pyvelo.__file__).parent / "native/lib/velo-op-bench"
    assert program.exists(), f"{program} is missing: install with -C cmake.define.PYVELO_BUILD_TESTS=ON"
    return os.fspath(program)


def test_the_operator_is_checked_and_measured_on_any_device(op_bench: str) -> None:
    done = run_program([op_bench, "CPU", "check", "quick"], 120, {})
    checks = json_lines(done.out)
    assert (done.code, len(checks), judge_checks(checks)) == (0, 18, [])
    sizes = {"copy": ["1048576"], "decode": ["q8_0", "2", "96"], "prefill": ["f16", "64"]}
    lines = []
    for command, size in sizes.items():
        for kernel in ([],) if command == "copy" else (["paged"], ["flash"]):
            lines += json_lines(run_program([op_bench, "CPU", command, *size, *kernel], 60, {}).out)
    found, _ = judge_speed(lines)
    assert found["copy_bytes_per_second"] > 0
    assert [(row["bench"], row["kv_bytes"]) for row in found["rows"]] == [
        ("decode", 2 * 2 * 96 * 8 * 128 * 34 // 32),
        ("prefill", 2 * 64 * 8 * 128 * 2),
    ]
    assert all(row["versus_flash"] > 0 for row in found["rows"])


def test_the_bench_lists_devices_as_the_package_does(op_bench: str) -> None:
    (found,) = json_lines(run_program([op_bench, "devices"], 30, {}).out)
    (cpu,) = (device for device in devices() if device.kind == "cpu")
    assert (found["name"], found["kind"], found["description"]) == (cpu.name, cpu.kind, cpu.description)


@pytest.mark.parametrize("words", [[], ["CPU"], ["none", "copy"], ["CPU", "decode", "q9", "1", "1"]])
def test_the_bench_says_what_it_cannot_do(op_bench: str, words: list[str]) -> None:
    done = run_program([op_bench, *words], 30, {})
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("velo-op-bench: ")
