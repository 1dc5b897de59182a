"""vLLM's load generator: how it is found, called and read."""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.bench import vllm_bench

TOOL = """#!{python}
import json, pathlib, sys
given = sys.argv[1:]
option = lambda name: given[given.index(name) + 1]
words = json.loads(pathlib.Path(option("--tokenizer"), "tokenizer.json").read_text())["model"]["vocab"]
result = dict(port=int(option("--port")), n_words=len(words), limits=given[given.index("--goodput") + 1:])
pathlib.Path(option("--result-dir"), option("--result-filename")).write_text(json.dumps(result))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a script")
def test_the_program_is_called_and_its_result_read(tmp_path: Path) -> None:
    tool = tmp_path / "vllm-rs"
    tool.write_text(TOOL.format(python=sys.executable), encoding="utf-8")
    tool.chmod(0o755)
    given = argparse.Namespace(
        prompt=8, answer=4, spread=0.5, requests=3, rate=1.0, seed=0, goodput=["ttft:9", "tpot:5"]
    )
    found = vllm_bench.load(tool, 80, given)
    assert found == {"port": 80, "n_words": vllm_bench.N_VOCAB, "limits": ["ttft:9", "tpot:5"]}


def test_the_program_comes_out_of_the_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(command: list[str]) -> str:
        calls.append(command)
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "vllm.whl", "w") as archive:
            archive.writestr("vllm/vllm-rs", b"program")
        return ""

    monkeypatch.setattr(vllm_bench, "output_of", download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert vllm_bench.program(None).read_bytes() == b"program"
    assert len(calls) == 1
    assert calls[0][-1] == f"vllm=={vllm_bench.VERSION}"


def test_a_missing_program_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="there is no"):
        vllm_bench.program(tmp_path / "nothing")
