"""`pyvelo info` and what all commands share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyvelo import LLM, __version__
from pyvelo.cli import main
from pyvelo.cli.info import describe
from pyvelo.cli.values import show_bytes
from pyvelo.kv.types import KV_TYPES
from tests import forks
from tests.cli_schema import check

DREAM = b"\x05\0\0\0\0\0\0\0dream"


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    if "--json" in arguments and out:
        check(str(arguments[0]), out)
    return int(done.value.code or 0), out, err


def test_text(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    code, out, err = run_cli(capsys, "info", tiny_model)
    assert (code, err) == (0, "")
    for fact in (
        "llama",
        "2 layers of 256, 4 heads, 2 KV heads, head size 64",
        "q8_0",
        "1.0 KiB",
        "32 tokens",
        "cores",
    ):
        assert fact in out
    assert "?B" not in out, "upstream does not know the size of this model"
    assert all(name in out for name in KV_TYPES)


def test_json_agrees_with_the_engine(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    code, out, _ = run_cli(capsys, "info", tiny_model, "--json", "--block-size", "64")
    report = json.loads(out)
    assert code == 0
    assert report["paged"] == {"possible": True, "refusal": None}
    assert report["model"]["file_bytes"] == tiny_model.stat().st_size
    assert (
        report["quantization"]["q8_0"]["n_bytes"] + report["quantization"]["f32"]["n_bytes"]
        == (report["model"]["weight_bytes"])
    )
    for name in ("f16", "q8_0", "iq4_nl"):
        with LLM(tiny_model, kv_type=name, block_size=64, n_ctx=512) as llm:
            assert report["kv_types"][name]["block_bytes"] == llm.stats().block_bytes
            assert report["model"]["parameters"] == llm.info.n_params
            assert report["model"]["vocabulary"] == llm.vocab.n_tokens
    tokens = [report["kv_types"][name]["tokens_that_fit"] for name in ("f32", "f16", "q8_0", "q4_0")]
    assert tokens == sorted(tokens)
    assert tokens[0] > 0


def test_what_would_run_where(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    report = json.loads(run_cli(capsys, "info", tiny_model, "--json")[1])
    (cpu,) = report["placement"]["devices"]
    with LLM(tiny_model) as llm:
        assert report["placement"]["tokens"] == llm.stats().tokens_total
        assert cpu["pool_bytes"] == llm.stats().tokens_total * report["kv_types"]["f16"]["token_bytes"]
    assert (cpu["name"], cpu["layers"]) == ("CPU", 2)
    assert "CPU: 2 layers" in run_cli(capsys, "info", tiny_model)[1]
    assert "nothing: there is no GPU" in run_cli(capsys, "info", tiny_model, "--n-gpu-layers", "2")[1]
    code, _, err = run_cli(capsys, "info", tiny_model, "--n-gpu-layers", "some")
    assert (code != 0, "give a number, -1 for all, or auto" in err) == (True, True)


def test_what_would_run_on_a_gpu(tiny_model: Path) -> None:
    code = (
        "from tests import lab_device; lab_device.add_device(1 << 30)\n"
        f"from pyvelo.cli import main; main(['info', {str(tiny_model)!r}, '--json', '--n-gpu-layers', '2'])"
    )
    done = forks.run([forks.PYTHON, "-c", code], text=True, check=True)
    report = json.loads(done.stdout)
    assert [device["kind"] for device in report["machine"]["devices"]] == ["cpu", "gpu"]
    cpu, gpu = report["placement"]["devices"]
    assert (cpu["name"], cpu["layers"], gpu["name"], gpu["layers"]) == ("CPU", 1, "LAB0", 1)
    assert cpu["pool_bytes"] == gpu["pool_bytes"] == report["placement"]["tokens"] * 512


def make(path: Path, *options: str) -> Path:
    script = Path(__file__).resolve().parents[2] / "scripts/models/make.py"
    forks.run([forks.PYTHON, str(script), *options, str(path)], check=True)
    return path


def test_types_that_do_not_fit_a_head_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = make(tmp_path / "model.gguf", "tiny", "--head-dim", "80")
    report = describe(path, 32)
    assert "refusal" in report["kv_types"]["q8_0"]
    assert "80" in report["kv_types"]["q8_0"]["refusal"]
    assert report["kv_types"]["f16"]["token_bytes"] == 2 * 2 * 2 * 80 * 2
    assert "cannot be cut" in run_cli(capsys, "info", path)[1]


def test_windows_and_latent_attention(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sliding = make(tmp_path / "gemma3.gguf", "tiny", "--arch", "gemma3", "--layers", "7", "--window", "96")
    assert "6 layers with a window of 96 tokens" in run_cli(capsys, "info", sliding)[1]
    lone = make(tmp_path / "gemma4.gguf", "tiny", "--arch", "gemma4", "--window", "1024")
    assert "head size 64 or 128, 1 layer with a window of 1,024 tokens" in run_cli(capsys, "info", lone)[1]
    latent = make(tmp_path / "deepseek2.gguf", "tiny", "--arch", "deepseek2", "--type", "f16")
    assert describe(latent, 32)["kv_types"]["f16"]["token_bytes"] == 2 * (4 * 64 + 32) * 2


def test_a_model_without_a_cache_has_memory_for_snapshots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = make(tmp_path / "mamba2.gguf", "tiny", "--arch", "mamba2", "--type", "f16")
    assert describe(path, 32)["placement"]["tokens"] is None
    text = run_cli(capsys, "info", path)[1]
    assert " for snapshots" in text
    assert "of the cache of" not in text


def test_a_model_that_cannot_be_paged_is_described_and_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = make(tmp_path / "model.gguf", "tiny", "--type", "f32")
    # same tensors, but a model that fills in blanks: it has no cache
    path.write_bytes(
        path.read_bytes().replace(b"llama.", b"dream.").replace(b"\x05\0\0\0\0\0\0\0llama", DREAM, 1)
    )
    report = describe(path, 32)
    assert report["paged"]["possible"] is False
    assert report["kv_types"] == {}
    assert report["paged"]["refusal"] in run_cli(capsys, "info", path)[1]
    code, out, err = run_cli(capsys, "run", path, "-p", "x")
    assert (code, out) == (1, "")
    assert err == f"pyvelo: {report['paged']['refusal']}\n"


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"nothing of the kind")
    for complaint, arguments in {
        "there is no model": [tmp_path / "absent.gguf"],
        "is not a GGUF file": [junk],
        "--block-size 33": [tiny_model, "--block-size", "33"],
    }.items():
        code, out, err = run_cli(capsys, "info", *arguments)
        assert (code, out) == (2 if complaint.startswith("--") else 1, "")
        assert complaint in err
        assert (err[:8], err.count("\n")) == ("pyvelo: ", 1)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(capsys, "--version") == (0, f"pyvelo {__version__}\n", "")
    code, out, err = run_cli(capsys, "run", "--help")
    assert (code, err) == (0, "")
    assert all(
        option in out for option in ("--kv-type", "--kv-cache-bytes", "--deterministic", "--json", "-n")
    )


def test_a_missing_extra_is_one_line() -> None:
    script = "import sys; sys.modules['typer'] = None; from pyvelo.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == 'pyvelo: the command line needs typer: pip install "pyvelo[cli]"\n'


def test_ctrl_c_while_the_command_line_is_loaded_is_silent() -> None:
    script = (
        "import sys\nfrom pyvelo.cli import main\n"
        "class Interrupted:\n"
        "    def find_spec(self, *_):\n        raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\nmain(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_command_line_asks_for_help_without_loading_the_library() -> None:
    script = (
        "import sys\nfrom pyvelo.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit('pyvelo.native' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 41, "2.0 TiB")],
)
def test_show_bytes(size: int, text: str) -> None:
    assert show_bytes(size) == text
