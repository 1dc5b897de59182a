"""The check of a GPU on a machine without one: its report, in which nothing passes that did not run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import check as command
from scripts.gpu._child import TIE, Expected, compare
from scripts.gpu._figures import CHUNKS, N_REQUESTS, PREFILLS, SHAPES, SPEED_TYPES, LargeModel, measurements
from scripts.gpu._machine import Done
from scripts.gpu._report import (
    FAILED,
    NO_GPU,
    PASSED,
    Budget,
    Missing,
    OutOfTime,
    Section,
    backend_ops,
    exit_code,
    judge_checks,
    judge_serving,
    judge_single,
    judge_speed,
    run_section,
)
from scripts.gpu._sections import SECTIONS
from scripts.gpu.check import WRONG, main

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
            return Done(0, json.dumps({"answers": 8, "runs": [{"n_gpu_layers": 0, **RIGHT}]}), "")
        if "pressure" in command:
            run = {"n_gpu_layers": -1, "swap_bytes": 1, **RIGHT, "preemptions": 3, "swaps": 2}
            return Done(0, json.dumps({"answers": 8, "runs": [run]}), "")
        if "series" in command:
            lines = [json.dumps(figure(line.split())) for line in command[command.index("series") + 1 :]]
            return Done(0, "\n".join(lines), "")
        if any(part.endswith("bench/serving.py") for part in command):
            return Done(0, json.dumps(served()), "")
        if "pyvelo.cli" in command:
            rows = [{"test": "answer", "sequences": 1, "median": 100.0}]
            return Done(0, json.dumps({"results": rows}), "")
        if "-ngl" in command:
            rows = [{"n_gen": 0, "samples_ts": [9.0]}, {"n_gen": 128, "samples_ts": [100.5, 90.0, 101.0]}]
            return Done(0, json.dumps(rows), "")
        return Done(0, "3 passed\n", "")


RIGHT: dict[str, Any] = {"wrong": [], "parted": []}


def served(speed: float = 1600.0, peak: int = 56, failed: int = 0) -> dict[str, Any]:
    """What bench/serving.py tells of a round."""
    sides = {"PyVelo": (speed, peak, failed, 0), "streams, 7 slots of 4608": (700.0, 7, 0, 0)}
    sides |= {"unified, 16 slots": (1000.0, 16, 0, 0), "unified, 64 slots": (900.0, 60, 2, 90)}
    keys = ("tokens_per_s", "peak", "failed", "broken_off")
    return {"rounds": [{name: dict(zip(keys, found, strict=True)) for name, found in sides.items()}]}


CHECKED = '{"check": "f16 64x64 8/8", "nmse": 1e-7}\n{"check": "q4_0 64x64 8/8", "nmse": 4e-4}\nnoise\n'


def figure(words: Sequence[str]) -> dict[str, Any]:
    """A card that copies 4 TB/s, read and written, and reads pages at 90 % of that, as upstream does."""
    if words[0] == "copy":
        return {"bench": "copy", "bytes": 2 << 30, "seconds": (4 << 30) / 4e12, "clock": "cuda events"}
    bench, kind, *sizes, kernel = words
    length = int(sizes[-1])
    n = int(sizes[0]) if bench == "decode" else 1
    rows = {"decode": 1, "prefill": length, "chunk": int(sizes[0])}[bench]
    size = n * length * 4096
    head = {"bench": bench, "kernel": kernel, "type": kind, "sequences": n, "rows": rows, "length": length}
    seconds = size / 3.6e12 / (2 if kernel == "shared" else 1)
    return head | {"kv_bytes": size, "seconds": seconds, "clock": "cuda events"}


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(machine: Machine, *options: str) -> tuple[int, dict[str, Any]]:
        output, given = tmp_path / "gpu.json", ["--bundle", str(tmp_path / "none")]
        (tmp_path / "model").touch()
        for name in ("llama-bench", "llama-server"):
            (tmp_path / "stock_bin").mkdir(exist_ok=True)
            (tmp_path / "stock_bin" / name).touch()
        for option in (
            "--op-bench",
            "--backend-ops",
            "--sanitizer",
            "--stock-bin",
            "--model",
            "--small-model",
        ):
            if option not in options:
                given += [option, str(tmp_path / option.strip("-").replace("-", "_"))]
        code = main(["-o", str(output), *given, *options], machine)
        return code, json.loads(output.read_text())

    return run


Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--jobs", "0"], "give 1 or more"),
        (["--seconds", "-5"], "give 0 or more"),
        (["--seconds", "nan"], "give 0 or more"),
        (["--model", "/nowhere/m.gguf"], "there is no model /nowhere/m.gguf"),
        (["-o", "/nowhere/gpu.json"], "no file in an existing folder"),
        (["--only", "ops, spee"], "there is no section 'spee'"),
    ],
)
def test_wrong_arguments_end_before_anything_runs(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> Done:
        raise AssertionError("a program ran")

    assert main(arguments, never) == WRONG
    assert why in capsys.readouterr().err


def outcomes(report: Mapping[str, Any]) -> dict[str, str]:
    return {section["name"]: section["outcome"] for section in report["sections"]}


def test_a_card_on_which_all_is_well(check: Check) -> None:
    code, report = check(Machine())
    assert code == PASSED
    assert report["passed"] is True
    assert (report["device"], report["driver"]) == (GPU, "550.54.15")
    assert outcomes(report) == dict.fromkeys(SECTIONS, "passed")
    found = next(s for s in report["sections"] if s["name"] == "speed")["found"]
    assert len(found["rows"]) == len(SPEED_TYPES) * len(SHAPES) + len(PREFILLS)
    ratios = [(row["kernel"], row["versus_paged"]) for row in found["alternatives"]]
    assert ratios == [("shared", 2.0)] * len(SPEED_TYPES) + [("gathered", 1.0)] * 2 * len(CHUNKS)


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
            {"tokens": '{"answers": 8, "runs": [{"n_gpu_layers": 2, "wrong": [5], "parted": [{}]}]}'},
            "tokens",
            "answers [5] are not the CPU's",
        ),
        (
            {
                "tokens": json.dumps(
                    {"answers": 2, "runs": [{"n_gpu_layers": 2, "wrong": [], "parted": [1, 2]}]}
                )
            },
            "tokens",
            "2 of 2 answers part from the CPU's",
        ),
        ({"tokens": Done(1, "", "Traceback\nValueError: x\n")}, "tokens", "ended with 1: ValueError: x"),
        (
            {"memcheck": Done(9, CHECKED + "ERROR SUMMARY: 4 errors", "")},
            "memcheck",
            "ERROR SUMMARY: 4 errors",
        ),
        ({"racecheck": CHECKED}, "racecheck", "no summary"),
        (
            {"series": '{"failed": "copy", "why": "no memory"}\n'},
            "speed",
            "copy: no memory; the copy bandwidth was not measured",
        ),
        ({"series": Done(134, "", "CUDA error")}, "speed", "velo-op-bench ended with 134: CUDA error"),
        (
            {"serving": json.dumps(served(speed=1499))},
            "serving",
            "64 requests: 1.50x of stock, not 1.5x",
        ),
        ({"serving": json.dumps(served(peak=34))}, "serving", "4.9x as many at once as stock, not 5x"),
        ({"serving": json.dumps(served(failed=1))}, "serving", "1 of our 64 requests failed"),
        ({"serving": "a warning"}, "serving", "serving.py printed no JSON: 'a warning'"),
        ({"-ngl": Done(1, "", "no such device")}, "single", "llama-bench ended with 1: no such device"),
        ({"pyvelo.cli": '{"results": []}'}, "single", "not measured on both sides"),
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
    assert names <= ({section, "memcheck", "racecheck", "synccheck"} if section == "foreign" else {section})
    assert why in next(found["why"] for found in failed if found["name"] == section)


def test_pressure_without_preemption_is_no_pass(check: Check) -> None:
    run = {"n_gpu_layers": -1, "swap_bytes": 1, **RIGHT, "preemptions": 0, "swaps": 0}
    _, report = check(Machine(pressure=json.dumps({"answers": 8, "runs": [run]})), "--only", "manager")
    (section,) = report["sections"]
    assert section["outcome"] == "failed"
    assert "no request was preempted" in section["why"]
    assert "nothing was swapped" in section["why"]


def test_slower_than_stock_is_no_pass(check: Check) -> None:
    slow = json.dumps({"results": [{"test": "answer", "sequences": 1, "median": 98.0}]})
    code, report = check(Machine(**{"pyvelo.cli": slow}), "--only", "single")
    assert (code, report["sections"][0]["outcome"]) == (FAILED, "failed")
    assert report["sections"][0]["why"] == "a single answer: 0.975x of stock, not 0.99x"
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
    lines = [json.dumps(figure(line.split())) for line in measurements()[:6]]
    late = OutOfTime("velo-op-bench did not end within 75 s", "\n".join(lines) + '\n{"bench": "dec')
    _, report = check(Machine(series=late), "--only", "speed")
    (section,) = report["sections"]
    assert section["outcome"] == "failed"
    assert len(section["found"]["rows"]) == 3
    assert section["why"].startswith(
        "velo-op-bench did not end within 75 s; decode q8_0 32 x 4096: upstream's"
    )
    assert "; not measured: decode q8_0 32 4096 flash, decode q8_0 8 32768 paged, " in section["why"]


def test_no_gpu_is_one_line_and_a_report(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(Machine(devices=json.dumps(CPU)))
    assert (code, report["passed"], report["device"], report["sections"]) == (NO_GPU, False, None, [])
    assert capsys.readouterr().err == f"check.py: {report['why']}\n"
    code, report = check(Machine(), "--device", "CUDA7")
    assert (code, report["why"]) == (NO_GPU, "there is no GPU CUDA7; there are CUDA0")
    code, report = check(Machine(devices=Done(1, "", "ImportError: no library\n")))
    assert (code, "ImportError: no library" in report["why"]) == (NO_GPU, True)


def test_the_driver_is_named_by_the_first_that_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(command, "KERNEL_DRIVER", version)
    silent = Machine(**{"nvidia-smi": Missing("not there")})
    assert command.driver(Machine()) == "550.54.15"
    assert command.driver(silent) is None
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n")
    assert command.driver(silent) == "580.159.04"
    version.write_text("nothing of the kind\n")
    assert command.driver(Machine(**{"nvidia-smi": Done(9, "no devices", "")})) is None


def test_without_the_package_the_operator_is_checked(check: Check) -> None:
    machine = Machine(**{"_child": Done(1, "", "ModuleNotFoundError: No module named 'pyvelo'\n")})
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
    by_host = [*lines, figure(["decode", "f16", "32", "4096", "flash"]) | {"clock": "host"}]
    assert judge_speed(by_host)[1] == ["measured by host, not by cuda events"]


def test_serving_counts_against_the_better_mode_and_the_sure_one() -> None:
    found, complaints = judge_serving(served(), N_REQUESTS)
    assert (found["versus_stock"], found["peak_versus_streams"], complaints) == (1.6, 8.0, [])
    assert found["peak_versus_unbroken"] == 3.5, "the mode that broke requests off does not count"
    rounds = {"rounds": [served(speed=s)["rounds"][0] for s in (1000, 1700, 2000)]}
    assert judge_serving(rounds, N_REQUESTS)[0]["versus_stock"] == 1.7
    alone = {"rounds": [{"PyVelo": served()["rounds"][0]["PyVelo"]}]}
    assert judge_serving(alone, N_REQUESTS)[1] == ["round 1: stock finished nothing to compare with"]
    assert judge_serving({"rounds": []}, N_REQUESTS)[1] == ["nothing was measured"]


def test_single_answers_are_compared_by_medians() -> None:
    rows = [{"test": "answer", "sequences": n, "median": 10.0 * n} for n in (64, 1)]
    found, complaints = judge_single({"results": rows}, [{"n_gen": 128, "samples_ts": [1.0, 10.1, 99.0]}])
    assert found["versus_stock"] == pytest.approx(10 / 10.1)
    assert complaints == []


def test_a_large_model_is_made_meanwhile(tmp_path: Path) -> None:
    written = threading.Event()

    def slow(command: Sequence[str], seconds: float, extra: Mapping[str, str]) -> Done:
        assert seconds == 99
        written.wait(30)
        Path(command[-1]).touch()
        return Done(0, "", "")

    model = LargeModel(None, tmp_path)
    model.begin(slow, 99)
    with pytest.raises(OutOfTime, match="not written within 0 s"):
        model.path(0.05)
    written.set()
    assert model.path(30).exists()
    model.close()
    again = LargeModel(None, tmp_path)
    again.begin(lambda *_: pytest.fail("it is there"), 99)
    assert again.path(0) == model.path(0)


def test_a_large_model_that_cannot_be_made(tmp_path: Path) -> None:
    model = LargeModel(None, tmp_path)
    model.begin(lambda *_: Done(1, "", "OSError: No space left on device\n"), 99)
    for _ in range(2):
        with pytest.raises(Missing, match="none can be made: OSError: No space left on device"):
            model.path(30)
    model.close()
    given = LargeModel(tmp_path / "mine.gguf", tmp_path)
    (tmp_path / "mine.gguf").touch()
    given.begin(lambda *_: pytest.fail("it was given"), 99)
    assert given.path(0) == tmp_path / "mine.gguf"


def test_answers_may_part_where_two_tokens_are_as_likely() -> None:
    likely = ({5: -0.5, 6: -0.9}, {7: -0.6, 8: -0.7, 9: -3.0})
    answer = Expected((5, 7), likely)
    assert compare([answer], [(5, 7)], TIE) == {"wrong": [], "parted": []}
    tied = compare([answer], [(5, 8)], TIE)
    assert tied["wrong"] == []
    assert tied["parted"] == [{"answer": 0, "token": 1, "margin": pytest.approx(0.1)}]
    assert compare([answer, answer], [(5, 7), (5, 9)], TIE)["wrong"] == [1]
    assert compare([answer], [(6, 7)], TIE)["wrong"] == [0]
    assert compare([answer], [(4, 7)], TIE) == {
        "wrong": [0],
        "parted": [{"answer": 0, "token": 0, "margin": None}],
    }
    assert compare([answer], [(5,)], TIE)["wrong"] == [0], "too short"


def test_what_upstreams_test_prints() -> None:
    found, complaints = backend_ops("  PAGED_ATTN(x=1): OK\n  ADD(x=1): FAIL\n  PAGED_ATTN(x=2): OK\n")
    assert (found["passed"], found["failed"], complaints) == (2, [], [])
    assert judge_checks([{"check": "f32 64x64 8/8", "nmse": 1e-5}]) == []
    assert len(judge_checks([{"check": "f32 64x64 8/8", "nmse": float("nan")}])) == 1
