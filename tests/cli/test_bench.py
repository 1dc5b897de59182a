"""`pyvelo bench`: a row for every figure, in a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from pyvelo.cli.bench import draw
from pyvelo.cli.measure import BenchPlan, measure
from pyvelo.errors import VeloError

from .test_info import run_cli

SMALL = ("--prompt-tokens", "40", "--answer-tokens", "6", "--repeats", "2")


def test_every_test_has_a_row(tiny_model: Path) -> None:
    plan = BenchPlan(
        tiny_model, kv_types=["f16", "q8_0"], depths=[0, 70], sequences=[1, 3], prompt=40, answer=6, repeats=2
    )
    rows = list(measure(plan))
    wanted = [
        (kv_type, *test)
        for kv_type, depth in product(["f16", "q8_0"], [0, 70])
        for test in [("prompt", depth, 1), ("answer", depth, 1), ("answer", depth, 3)]
    ]
    assert [(row.kv_type, row.test, row.depth, row.sequences) for row in rows] == wanted
    assert all(len(row.samples) == 2 and min(row.samples) > 0 for row in rows)
    assert all(min(row.samples) <= row.median <= max(row.samples) for row in rows)


def test_every_load_tells_how_far_it_is(tiny_model: Path) -> None:
    loads: list[tuple[Path, list[float]]] = []

    @contextmanager
    def loading(path: str | os.PathLike[str]) -> Iterator[Callable[[float], object]]:
        loads.append((Path(path), []))
        yield loads[-1][1].append
        loads[-1][1].append(2.0)  # before anything is measured

    plan = BenchPlan(tiny_model, kv_types=["f16", "q8_0"], prompt=8, answer=4, repeats=1)
    for _ in measure(plan, loading):
        assert loads[-1][1][-2:] == [1.0, 2.0]
    assert [path for path, _ in loads] == [tiny_model, tiny_model]


def test_a_table_and_an_object(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    code, out, err = run_cli(capsys, "bench", tiny_model, "--depth", "0,64", *SMALL)
    assert (code, err) == (0, "")
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["f16", "prompt", "40", "0"],
        ["f16", "answer", "6", "0"],
        ["f16", "prompt", "40", "64"],
        ["f16", "answer", "6", "64"],
    ]
    code, out, err = run_cli(capsys, "bench", tiny_model, "--json", *SMALL)
    assert (code, err) == (0, "")
    results = json.loads(out)["results"]
    assert [result["test"] for result in results] == ["prompt", "answer"]
    assert all(result["median"] > 0 for result in results)


def test_a_picture_of_prompts_and_answers(tiny_model: Path, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    rows = list(measure(BenchPlan(tiny_model, sequences=[1, 2], prompt=8, answer=4, repeats=2)))
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        draw(rows, tmp_path / "speed.svg", "tiny")
    texts = "".join((tmp_path / "speed.svg").read_text(encoding="utf-8").split("\n"))
    for text in ("tiny", "prompts of 8 tokens", "answers of 4 tokens", "f16 pages, 2 sequences"):
        assert text in texts
    assert texts.count("tokens in the context before") == texts.count("tokens per second") == 2


def test_without_matplotlib_it_says_so_before_the_work(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run_cli(capsys, "bench", tiny_model, "--plot", "speed.png")
    assert (code, out) == (1, "")
    assert err == 'pyvelo: a picture needs matplotlib: pip install "pyvelo[report]"\n'


@pytest.mark.parametrize(
    "wrong",
    [
        ("--depth", "0,x"),
        ("--depth", "-1"),
        ("--sequences", "0"),
        ("--sequences", "1048576"),
        ("--kv-type", "q9"),
        ("--kv-type", "f16,"),
        ("--repeats", "0"),
        ("--prompt-tokens", "0"),
        ("--answer-tokens", "2000000"),
        ("--plot", "speed.nothing"),
        ("--plot", "no/such/folder/speed.png"),
        ("--plot", "folder.svg"),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    wrong: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    code, out, err = run_cli(capsys, "bench", tiny_model, *wrong)
    assert code in (1, 2)
    assert out == ""  # before any work
    assert err.startswith("pyvelo: ")
    assert wrong[1] in err
    assert "--kv-cache-bytes" not in err  # bench has no such option
    assert err.count("\n") == 1


def test_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run_cli(capsys, "bench", tmp_path / "nowhere.gguf")
    assert code == 1
    assert "nowhere.gguf" in err
    with pytest.raises(VeloError):
        list(measure(BenchPlan(tmp_path / "nowhere.gguf")))
