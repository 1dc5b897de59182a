"""`pyvelo report`: a recorded run in numbers and as a picture."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pyvelo.cli.draw import CACHED, FREE, OWNERS, SHARED, block_picture
from pyvelo.simulate.engine import Setup, simulate
from pyvelo.simulate.workload import Job
from pyvelo.trace.blockmap import replay, summarize
from pyvelo.trace.format import TraceHeader, TraceWriter, read_trace

from .test_info import run_cli


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A run with shared blocks, preemptions and cached blocks."""
    jobs = [Job(0.1 * i, 60 + i, 80, 100, 1 + i % 3, 0 if i else None, 40 if i else 0) for i in range(8)]
    setup = Setup(n_blocks=40, block_size=16, block_bytes=1024, n_ctx=256, n_swap_blocks=12)
    simulate(setup, jobs, record=tmp_path / "run.trace", audit=True)
    return tmp_path / "run.trace"


def test_numbers(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, out, err = run_cli(capsys, "report", trace)
    assert (code, err) == (0, "")
    for fact in ("40 blocks of 16 tokens, 40.0 KiB", "15 requests, 15 ended", "n_ctx for each"):
        assert fact in out
    code, out, err = run_cli(capsys, "report", trace, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["summary"] == asdict(summarize(read_trace(trace)))
    assert report["summary"]["preemptions"] > 0 < report["summary"]["peak_shared"]
    assert report["pool"]["n_swap_blocks"] == 12


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_a_picture(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, ending: str) -> None:
    """The same trace, the same file."""
    contents = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.{ending}"
        code, out, err = run_cli(capsys, "report", trace, "-o", path, "--steps")
        assert (code, err) == (0, "")
        assert path.name in out
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert len(contents[0]) > 5000
    if ending == "svg":
        assert run_cli(capsys, "report", trace, "-o", tmp_path / "seconds.svg")[0] == 0
        assert (tmp_path / "seconds.svg").read_bytes() != contents[0]


def test_the_colors_equal_the_block_map(trace: Path) -> None:
    content = read_trace(trace)
    n = len(content.steps)
    picture = block_picture(content, np.arange(n, dtype=float), n)
    seen = set()
    for column, (_, blocks) in enumerate(replay(content)):
        for block in range(content.header.n_blocks):
            holders = [owner for owner, table in blocks.tables.items() if block in table.blocks]
            if len(holders) > 1:
                expected = SHARED
            elif holders:
                expected = OWNERS[holders[0] % len(OWNERS)]
            else:
                expected = CACHED if block in blocks.published else FREE
            assert tuple(picture[block, column]) == expected
            seen.add(expected)
    assert len(seen) > 6


def test_without_matplotlib(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pyvelo.cli.draw", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_cli(capsys, "report", trace)[0] == 0
    code, out, err = run_cli(capsys, "report", trace, "-o", tmp_path / "run.svg")
    assert (code, out) == (1, "")
    assert err == 'pyvelo: a picture needs matplotlib: pip install "pyvelo[report]"\n'


def test_what_cannot_be_reported(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, tiny_model: Path
) -> None:
    empty = tmp_path / "empty.trace"
    TraceWriter(empty, TraceHeader(8, 16, 1024, 64, 0)).close()
    assert run_cli(capsys, "report", empty)[0] == 0
    lines = trace.read_text(encoding="utf-8").splitlines()
    (tmp_path / "cut.trace").write_text("\n".join(lines)[:-5], encoding="utf-8")
    for arguments, expected, says in (
        ([tmp_path / "none"], 1, "there is no file or folder"),
        ([tiny_model], 1, "line 1"),
        ([tmp_path / "cut.trace"], 1, f"line {len(lines)}"),
        ([trace, "-o", tmp_path / "run.txt"], 2, ".svg"),
        ([trace, "-o", tmp_path / "no" / "run.svg"], 2, "no folder"),
        ([empty, "-o", tmp_path / "run.svg"], 1, "nothing"),
    ):
        code, out, err = run_cli(capsys, "report", *arguments)
        assert (code, out) == (expected, "")
        assert says in err
        assert err.count("\n") == 1


def test_states_differ_in_lightness_and_requests_are_no_gray() -> None:
    lightness = sorted(sum(color) / 3 / 255 for color in (FREE, CACHED, SHARED))
    assert min(high - low for low, high in pairwise(lightness)) > 0.3
    assert all(max(color) - min(color) > 30 for color in OWNERS)
    assert len(set(OWNERS)) == len(OWNERS) == 18
