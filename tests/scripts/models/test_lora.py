"""The script that makes adapters."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pyvelo.models.gguf_parts import scan_model
from pyvelo.models.lora import AdaptedModel, check_lora
from scripts.models import lora
from scripts.models.make import import_gguf


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["lora.py", *map(str, arguments)])
    return lora.main()


def test_an_adapter_and_the_merged_model(
    tiny_model_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, merged = tmp_path / "a.gguf", tmp_path / "merged.gguf"
    options = ("--weights", r"blk\.1\.attn_(q|v)\.weight", "--rank", 4, "--alpha", 8, "--merge", merged)
    assert run(monkeypatch, tiny_model_f32, adapter, *options) == 0
    assert "2 weights" in capsys.readouterr().out
    found = check_lora(adapter, AdaptedModel.of(scan_model(tiny_model_f32)))
    assert (found.n_weights, found.rank, found.alpha) == (2, 4, 8.0)
    readers = [
        {t.name: t.data for t in import_gguf().GGUFReader(path).tensors} for path in (tiny_model_f32, merged)
    ]
    changed = {name for name in readers[0] if not np.array_equal(readers[0][name], readers[1][name])}
    assert changed == {"blk.1.attn_q.weight", "blk.1.attn_v.weight"}
    pairs = {t.name: t.data for t in import_gguf().GGUFReader(adapter).tensors}
    for name in changed:
        product = 2.0 * pairs[f"{name}.lora_b"] @ pairs[f"{name}.lora_a"]  # alpha / rank
        np.testing.assert_allclose(readers[1][name], readers[0][name] + product, atol=1e-6)


def test_the_same_arguments_give_the_same_bytes(
    tiny_model_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        assert run(monkeypatch, tiny_model_f32, path, "--seed", seed, "--type", "f16") == 0
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "nothing"), "no weight that matches"),
        (("--merge", "merged.gguf"), "only f32 can be merged"),
    ],
)
def test_wrong_arguments(
    options: tuple[str, ...], message: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, tiny_model, tmp_path / "a.gguf", *options)
