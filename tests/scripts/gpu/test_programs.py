"""The programs of the check of a GPU, run on a CPU and on a device of the laboratory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import pyvelo
from pyvelo import LLM, SamplingParams
from pyvelo.models.gguf_scan import scan
from pyvelo.native import devices
from scripts.bench import serving
from scripts.bench._serving import Load, workload
from scripts.gpu import check
from scripts.gpu._figures import N_REQUESTS, check_serving, check_single
from scripts.gpu._machine import Done, Places, run_program
from scripts.gpu._model import LLAMA_8B, SPREAD, blocks, stored_type, write_large
from scripts.gpu._report import NO_GPU, Missing, json_lines, judge_checks, judge_speed
from scripts.models._shapes import tensors

LLAMA_8B_TOKEN = 32 * 2 * 8 * 128 * 2
"""Bytes of K and V in f16."""


def test_the_script_itself_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    bundle = ["--bundle", str(tmp_path / "none")]
    command = [sys.executable, check.__file__, "-o", str(output), *bundle]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == NO_GPU, done.stderr
    assert json.loads(output.read_text())["why"] in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["tokens", "pressure"])
def test_engines_of_the_check_on_a_device_of_the_laboratory(tiny_model_f32: Path, what: str) -> None:
    code = (
        f"import sys; from scripts.gpu import _child; from tests import lab_device\n"
        f"lab_device.add_device(1 << 30)\n"
        f"_child.ENGINE['n_threads'] = 1\n"
        f"sys.argv = ['', {what!r}, {os.fspath(tiny_model_f32)!r}]; sys.exit(_child.main())"
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
    lines = ["copy 1048576", "decode q8_0 2 96 paged", "decode q8_0 2 96 flash", "decode q9 1 1"]
    lines += ["prefill f16 63 paged", "prefill f16 63 flash", "decode q8_0 2 96 shared"]
    lines += ["chunk q4_0 33 70 paged", "chunk q4_0 33 70 gathered"]
    done = run_program([op_bench, "CPU", "series", *lines], 60, {})
    assert done.code == 1
    found, complaints = judge_speed(json_lines(done.out))
    assert "decode q9 1 1: there is no KV type q9" in complaints
    assert "measured by host, not by cuda events" in complaints
    assert found["copy_bytes_per_second"] > 0
    assert [(row["bench"], row["kv_bytes"]) for row in found["rows"]] == [
        ("decode", 2 * 2 * 96 * 8 * 128 * 34 // 32),
        ("prefill", 2 * 63 * 8 * 128 * 2),
    ]
    assert all(row["versus_flash"] > 0 for row in found["rows"])
    assert [(row["bench"], row["rows"], row["kernel"]) for row in found["alternatives"]] == [
        ("decode", 1, "shared"),
        ("chunk", 33, "gathered"),
    ]
    assert all(row["versus_paged"] > 0 for row in found["alternatives"])
    assert found["alternatives"][1]["nmse"] < 5e-4


def test_the_bench_lists_devices_as_the_package_does(op_bench: str) -> None:
    (found,) = json_lines(run_program([op_bench, "devices"], 30, {}).out)
    (cpu,) = (device for device in devices() if device.kind == "cpu")
    assert (found["name"], found["kind"], found["description"]) == (cpu.name, cpu.kind, cpu.description)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["CPU"],
        ["none", "copy"],
        ["CPU", "decode", "q9", "1", "1"],
        ["CPU", "decode", "f16", "0", "1"],
        ["CPU", "decode", "f16", "1"],
        ["CPU", "prefill", "f16", "6x"],
        ["CPU", "prefill", "f16", "6", "shared"],
        ["CPU", "decode", "f16", "1", "6", "dreamt"],
        ["CPU", "chunk", "f16", "7", "6"],
        ["CPU", "chunk", "iq4_nl", "1", "6", "contiguous"],
        ["CPU", "copy", "-1"],
        ["CPU", "dream"],
    ],
)
def test_the_bench_says_what_it_cannot_do(op_bench: str, words: list[str]) -> None:
    done = run_program([op_bench, *words], 30, {})
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("velo-op-bench: ")


# ---- beside stock ----


def stock_at(folder: Path) -> Places:
    """Where stock's programs would be."""
    for name in ("llama-bench", "llama-server"):
        (folder / name).touch()
    return Places(None, None, folder)


def test_one_answer_is_measured_with_the_command_that_is_given(tiny_model: Path, tmp_path: Path) -> None:
    """Ours runs, on the CPU and with less to do; stock's is a listing as llama-bench prints it."""
    smaller = {"-1": "0", "512": "16", "128": "8", "5": "1"}
    given = []

    def run(command: Sequence[str], seconds: float, extra: Mapping[str, str]) -> Done:
        if command[0].endswith("llama-bench"):
            assert extra["LD_LIBRARY_PATH"].split(":")[0] == os.fspath(tmp_path)
            rows = [{"n_prompt": 512, "n_gen": 0, "samples_ts": [9.0]}]
            return Done(0, json.dumps([*rows, {"n_prompt": 0, "n_gen": 128, "samples_ts": [1e-3]}]), "")
        given.append(dict(extra))
        return run_program([smaller.get(word, word) for word in command], seconds, extra)

    found, complaints = check_single(run, stock_at(tmp_path), tiny_model, 60)
    assert complaints == []
    assert found["versus_stock"] > 1000
    assert given == [{}, {"GGML_CUDA_PDL": "0"}]
    for name in ("pyvelo", "one_kernel_after_the_other"):
        assert {row["test"] for row in found[name]} == {"prompt", "answer"}


def test_many_requests_are_asked_for_as_the_benchmark_understands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: Sequence[str], seconds: float, extra: Mapping[str, str]) -> Done:
        commands.append(list(command))
        return Done(0, json.dumps({"rounds": []}), "")

    check_serving(run, stock_at(tmp_path), Path("m.gguf"), 60)
    monkeypatch.setattr(sys, "argv", commands[0][1:])
    given = serving._arguments()
    assert (given.model, given.stock_bin, given.gpu, given.json) == (Path("m.gguf"), tmp_path, True, True)
    assert given.requests == N_REQUESTS
    load = Load(
        given.requests, given.rate, given.prompt_mean, given.answer_mean, given.shortest, given.longest, 0
    )
    longest = serving.context_of(load) - 2
    modes = serving.stock_modes(given.kv_bytes // LLAMA_8B_TOKEN, longest, given.unified_slots)
    assert [mode.name for mode in modes] == [
        "streams, 3 slots of 5376",
        *(f"unified, {n} slots" for n in (8, 16, 64)),
    ]
    jobs = workload(load, 128256)
    share = given.kv_bytes // LLAMA_8B_TOKEN / sum(job.n_tokens for job in jobs)
    assert 0.5 < share < 0.8, "not all fit at once"


def test_missing_stock_programs_are_reported(tmp_path: Path) -> None:
    def run(*_: object) -> Done:
        pytest.fail("there is nothing to run")

    with pytest.raises(Missing, match=r"gpu/bundle\.py makes them"):
        check_single(run, Places(None, None, None), Path("m.gguf"), 60)
    with pytest.raises(Missing, match="there is no llama-server in"):
        check_serving(run, Places(None, None, tmp_path), Path("m.gguf"), 60)


# ---- the large model ----


@pytest.mark.parametrize("name", sorted(SPREAD))
def test_random_blocks_have_the_size_that_was_asked_for(name: str) -> None:
    values = gguf.quants.dequantize(blocks(name, 1 / 64), gguf.GGMLQuantizationType[name])
    assert np.isfinite(values).all()
    assert values.std() * 64 == pytest.approx(1, abs=0.02)
    assert values.mean() * 64 == pytest.approx(0, abs=0.01)


def test_a_large_model_is_mixed_as_llama_quantize_mixes_it() -> None:
    """Half of the most sensitive matrices of an 8B shape's 32 layers get six bits; 4.9 GB in all."""
    stored = {tensor.name: (tensor, stored_type(tensor, 32)) for tensor in tensors(LLAMA_8B, 128256)}
    more = [name for name, (_, kind) in stored.items() if kind == "Q6_K"]
    assert sum(name.endswith("attn_v.weight") for name in more) == 16
    assert sum(name.endswith("ffn_down.weight") for name in more) == 16
    assert len(more) == 33
    assert "output.weight" in more
    bits = {"Q4_K": 4.5, "Q6_K": 6.5625, "F32": 32}
    size = sum(int(np.prod(tensor.shape)) * bits[kind] / 8 for tensor, kind in stored.values())
    assert size == pytest.approx(4.9e9, rel=0.01)


def test_a_large_model_runs(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    write_large(path, replace(LLAMA_8B, layers=3, embd=512, ffn=1024, heads=4, kv_heads=2), 2000)
    assert {"q4_K", "q6_K", "f32"} == set(scan(path).quantization)
    with LLM(path, n_ctx=256, n_threads=1) as llm:
        assert llm.vocab.n_tokens == 2000
        output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))[0]
        assert len(set(output.token_ids)) > 2
