"""Adapters on the command line: the option of run, chat, embed and bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyvelo.cli.app import execute
from pyvelo.cli.values import parse_lora
from scripts.models import lora


@pytest.fixture(scope="module")
def adapter(tiny_model_f32: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    lora.write_adapter(path, "llama", lora.random_pairs(tiny_model_f32, 4))
    return path


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.gguf", "a.gguf", 1.0),
        ("a.gguf:0.5", "a.gguf", 0.5),
        ("a.gguf:-2", "a.gguf", -2.0),
        ("a:b.gguf", "a:b.gguf", 1.0),
        ("a:b.gguf:3", "a:b.gguf", 3.0),
        (":3", ":3", 1.0),
        ("C:\\a.gguf", "C:\\a.gguf", 1.0),
    ],
)
def test_values(text: str, path: str, scale: float) -> None:
    assert parse_lora(text) == (path, scale)


def test_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "-p", "x", "--lora", ""]) == 2
    assert capsys.readouterr().err == "pyvelo: --lora '': give FILE or FILE:SCALE\n"


def test_a_file_whose_name_ends_like_a_scale(tmp_path: Path) -> None:
    path = tmp_path / "a:2"
    path.touch()
    assert parse_lora(str(path)) == (str(path), 1.0)


def test_run(tiny_model_f32: Path, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for scale in (None, "0", "1", "2.5"):
        option = [] if scale is None else ["--lora", f"{adapter}:{scale}"]
        assert execute(["run", str(tiny_model_f32), "-p", "Hello", "-n", "6", "--json", *option]) == 0
        said[scale] = tuple(json.loads(capsys.readouterr().out)["token_ids"])
    assert said[None] == said["0"]
    assert len(set(said.values())) == 3


def test_embed_and_bench(tiny_model_f32: Path, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["embed", str(tiny_model_f32), "-p", "Hello", "--pooling", "mean"]
    assert execute(command) == execute([*command, "--lora", str(adapter)]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one != other
    sizes = ["--prompt-tokens", "16", "--answer-tokens", "2", "-r", "1"]
    assert execute(["bench", str(tiny_model_f32), *sizes, "--lora", str(adapter)]) == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("absent.gguf", "cannot read absent.gguf: No such file"),
        ("{model}", "is no adapter: it is a model"),
        *(
            (f"{{adapter}}:{scale}", f": the scale '{scale}' is no number up to 1e6: give FILE[:SCALE]")
            for scale in ("foo", "nan", "1e9", "-inf")
        ),
    ],
)
def test_wrong_adapters(
    value: str, message: str, tiny_model_f32: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = value.format(model=tiny_model_f32, adapter=adapter)
    assert execute(["run", str(tiny_model_f32), "-p", "Hello", "--lora", given]) > 0
    assert message in capsys.readouterr().err
