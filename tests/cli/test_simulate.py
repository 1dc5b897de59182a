"""`pyvelo simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.kv.geometry import make_geometry
from pyvelo.native import Model
from pyvelo.trace.format import read_trace
from scripts.models import make

from .test_info import run_cli

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
SMALL = ("--requests", "12", "--prompt", "60", "--answer", "20", "--rate", "inf")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    code, out, err = run_cli(capsys, "simulate", "--json", *arguments)
    assert (code, err) == (0, "")
    content: dict[str, Any] = json.loads(out)
    return content


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(capsys, "simulate", *SMALL)
    assert (code, err) == (0, "")
    for name in (
        "pages of 32, auto",
        "reserved n_ctx",
        "reserved max",
        "streams: ",
        "unified: 256",
        "TTFT s",
    ):
        assert name in out
    assert "12 requests in 0 s, 720 tokens of prompt, 240 of answer; 2.0 GiB for 18,688 tokens" in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 132


def test_json_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--requests", "10", "--rate", "3", "--shared-prefix", "64:0.5", "--samples", "2")
    first = simulated(capsys, *settings, "--seed", "4")
    assert first == simulated(capsys, *settings, "--seed", "4")
    assert first != simulated(capsys, *settings, "--seed", "5")
    assert first["workload"]["sequences"] == 20
    assert first["outcomes"][0]["hit_rate"] > 0


def test_sizes_and_policies_are_rows(capsys: pytest.CaptureFixture[str]) -> None:
    tight = (
        "--kv-bytes-per-token",
        "1024",
        "--kv-cache-bytes",
        "512K",
        "--swap-bytes",
        "256K",
        "--ctx",
        "256",
    )
    sizes = ("--block-size", "16", "--block-size", "32", "--policy", "all")
    report = simulated(capsys, *SMALL, "--answer", "190", "--max-tokens", "190", *tight, *sizes)
    schemes = [outcome["scheme"] for outcome in report["outcomes"]]
    assert schemes[:6] == [f"pages of {n}, {p}" for n in (16, 32) for p in ("auto", "swap", "recompute")]
    assert len(schemes) == 10
    assert report["pool"] == {"token_bytes": 1024, "pool_bytes": 1 << 19, "tokens": 512, "n_ctx": 256}
    assert report["outcomes"][1]["swaps"] > 0 == report["outcomes"][2]["swaps"]


def test_bytes_of_a_model(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    for kv_type in ("f16", "q8_0"):
        with LLM(tiny_model, kv_type=kv_type, n_ctx=256) as llm:
            expected = llm.geometry.token_bytes
        size = ("--kv-cache-bytes", "16M")
        report = simulated(capsys, *SMALL, *size, "--model", tiny_model, "--kv-type", kv_type)
        assert report["pool"]["token_bytes"] == expected


def test_windows_and_recurrent_states_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A long prompt fits into a pool that is too small for all its tokens in all layers."""
    jobs = tmp_path / "jobs.json"
    turns = [{"time": 0, "prompt": 1200, "answer": 20}]
    turns += [{"time": 60, "prompt": 1300, "answer": 20, "like": 0, "shared": 1220}]
    jobs.write_text(json.dumps({"requests": turns}))
    common = ("--ctx", "2048", "--workload", jobs, "--max-batch-tokens", "64")
    for arch, window in (("gemma3", ("--window", "64")), ("lfm2", ())):
        model = tmp_path / f"{arch}.gguf"
        make.main(["--arch", arch, "--layers", "6", *window, str(model)])
        capsys.readouterr()
        with Model(model) as opened:
            geometry = make_geometry("m", opened.layers)
        size = 1024 * geometry.token_bytes * (1 if window else 2)
        report = simulated(capsys, *common, "--model", model, "--kv-cache-bytes", size)
        (paged,) = (outcome for outcome in report["outcomes"] if outcome["scheme"].startswith("pages"))
        assert paged["refused"] == 0
        assert 0.4 < paged["hit_rate"] < 0.5, "the second turn hits the first one"


def test_a_model_by_its_name_on_the_hub(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyvelo.models.hub.locate", {"org/repo:Q4_0": str(tiny_model)}.__getitem__)
    size = ("--kv-cache-bytes", "16M")
    named = simulated(capsys, *SMALL, *size, "--model", "org/repo:Q4_0")["pool"]
    assert named == simulated(capsys, *SMALL, *size, "--kv-bytes-per-token", named["token_bytes"])["pool"]


def test_a_recorded_run_is_run_again(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    """Its requests, lengths and shared beginnings, and its pool unless another is asked for."""
    prefix = [3 + i % 90 for i in range(100)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(tiny_model, n_ctx=512, n_threads=1, kv_cache_bytes=1 << 21) as llm:
        with llm.trace(tmp_path / "run.trace"):
            llm.generate(prefix, params)
            llm.generate([[*prefix, 200 + n] for n in range(5)], params)
        stats = llm.stats()
    report = simulated(capsys, "--trace", tmp_path / "run.trace", "--record", tmp_path / "again.trace")
    assert report["workload"]["requests"] == 6
    assert report["workload"]["prompt_tokens"] == 100 + 5 * 101
    assert report["workload"]["answer_tokens"] == 6 * 40
    assert report["pool"]["tokens"] == stats.tokens_total
    assert report["pool"]["token_bytes"] * stats.block_size == stats.block_bytes
    # in whole blocks, of 32 tokens: less than before
    assert report["outcomes"][0]["hit_rate"] == pytest.approx(5 * 96 / (100 + 5 * 101), abs=0.03)
    assert read_trace(tmp_path / "again.trace").header == read_trace(tmp_path / "run.trace").header
    assert simulated(capsys, "--trace", tmp_path / "run.trace", "--ctx", "400")["pool"]["n_ctx"] == 400


def test_a_described_workload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    path.write_text(json.dumps({"requests": [{"prompt": 64, "answer": 8, "samples": 3}]}), encoding="utf-8")
    report = simulated(capsys, "--workload", path)
    assert report["workload"]["sequences"] == 3
    assert report["outcomes"][0]["saved"] > 0.3


def test_costs_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    slow = simulated(capsys, *SMALL, "--cost", "decode=0.1", "--cost", "step=1")
    assert (slow["costs"]["decode"], slow["costs"]["step"]) == (0.1, 1.0)
    assert slow["outcomes"][0]["seconds"] > 20 > simulated(capsys, *SMALL)["outcomes"][0]["seconds"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--requests", "0"], "requests 0"),
        (["--rate", "-1"], "rate -1"),
        (["--rate", "nan"], "rate nan"),
        (["--prompt", "long"], "'long' is not a length"),
        (["--answer", "uniform:9:1"], "uniform:9:1"),
        (["--max-tokens", "0"], "--max-tokens 0"),
        (["--samples", "-1"], "samples -1"),
        (["--samples", "1025"], "samples 1025: give a number from 1 to 1024"),
        (["--shared-prefix", "64"], "shared prefix"),
        (["--shared-prefix", "64:0.8", "--shared-prefix", "32:0.8"], "sum to 1"),
        (["--block-size", "0"], "block-size 0"),
        (["--block-size", "100000"], "block-size 100000"),
        (["--kv-cache-bytes", "1K"], "too little"),
        (["--kv-cache-bytes", "many"], "'many' is no size"),
        (["--kv-cache-bytes", "900000T"], "too"),
        (["--swap-bytes", "900000T"], "too many"),
        (["--kv-bytes-per-token", "0"], "kv-bytes-per-token 0"),
        (["--ctx", "1"], "--ctx 1"),
        (["--ctx", "-5"], "--ctx -5"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["--max-batch-tokens", "0"], "--max-batch-tokens 0"),
        (["--max-batch-tokens", "999999999"], "too large"),
        (["--policy", "always"], "'always'"),
        (["--parallel", "0"], "parallel 0"),
        (["--cost", "decode"], "'decode'"),
        (["--cost", "sleep=1"], "'sleep=1'"),
        (["--cost", "decode=-1"], "decode=-1"),
        (["--seed", "-1"], "seed -1"),
        (["--trace", "none"], "there is no file or folder"),
        (["--workload", "none"], "there is no file or folder"),
        (["--workload", "none", "--trace", "none"], "not both"),
        (["--trace", "none", "--requests", "5"], "give --trace or --requests, not both"),
        (["--workload", "none", "--max-tokens", "5"], "give --workload or --max-tokens, not both"),
        (["--model", "none"], "none"),
        (["--model", "none", "--kv-bytes-per-token", "7"], "not both"),
        (["--record", "no/run.trace"], "there is no folder no"),
        pytest.param(["--record", "/dev/full"], "/dev/full: No space left", marks=needs_full),
    ],
)
def test_what_cannot_be_simulated(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    drawn = () if {"--trace", "--workload"} & {*arguments} else SMALL
    code, out, err = run_cli(capsys, "simulate", *drawn, *arguments)
    unreadable = ("there is no file or folder", "there is no folder no", "none", "/dev/full: No space left")
    assert (code, out) == (1 if says in unreadable else 2, "")
    assert says in err
    assert err.startswith("pyvelo: ")
    assert err.count("\n") == 1
