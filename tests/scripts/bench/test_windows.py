"""scripts/bench/windows.py: its table is the one of docs/MEMORY.md, and a small run."""

from __future__ import annotations

import re

import pytest

from scripts._common import ROOT
from scripts.bench import windows


def test_the_table_of_the_page() -> None:
    page = (ROOT / "docs" / "MEMORY.md").read_text()
    for shape in windows.SHAPES:
        (line,) = re.findall(rf"^\| {re.escape(shape)} \| [^|]*\| (.*) \|$", page, re.M)
        short, long = (row for row in windows.rows("f16") if row.shape == shape)
        sizes = (short.flat, long.flat, short.held, long.held, short.stock, long.stock)
        assert line.split(" | ") == [f"{size / windows.MIB:,.0f}" for size in sizes]
        assert long.peak <= (1.17 if shape == "Gemma 4 26B" else 1.02) * long.stock


@pytest.mark.slow
def test_more_sequences_run_at_once() -> None:
    """A window of 512 of 2048 tokens: 4 layers of 26 keep all."""
    told = windows.run("Gemma 3 1B", pool_bytes=2 * 2048 * 26 * 256 * 4, n_tokens=2048, n_sequences=5)
    assert re.match(r"4 sequences of 2,048 tokens ran at once in 104 MiB, 0 preemptions; 2 fit", told), told
