"""The memory of conversations as `pyvelo info` tells it: by hand, by the engine, and in docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pyvelo import LLM

from .stand_ins import SHAPES, stand_in
from .test_info import run_cli

ROOT = Path(__file__).resolve().parents[2]
# of a value, with its share of what its group of 32 has in common: a scale of 16 bits, or that and a minimum
BITS = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "q8_0": 8 + 16 / 32,
    "q5_1": 5 + 32 / 32,
    "q5_0": 5 + 16 / 32,
    "q4_1": 4 + 32 / 32,
    "q4_0": 4 + 16 / 32,
    "iq4_nl": 4 + 16 / 32,
}
GIB = 2**30


def rows_of(text: str, split: str) -> dict[str, list[str]]:
    """The cells behind each KV type, in the last table of the text that has one."""
    cells = [re.split(split, line.strip("| ")) for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row[0] in BITS and len(row) > 5}


@pytest.mark.parametrize("name", SHAPES)
def test_by_hand(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    layers, heads, size, ctx = SHAPES[name]
    code, out, _ = run_cli(capsys, "info", stand_in(tmp_path / f"{name}.gguf"), "--json")
    costs = json.loads(out)["kv_types"]
    assert (code, set(costs)) == (0, set(BITS))
    for kind, bits in BITS.items():
        token = layers * heads * (size + size) * bits / 8
        assert costs[kind]["token_bytes"] == token
        told = {row["tokens"]: row["bytes"] for row in costs[kind]["conversations"]}
        assert told == {n: n * token for n in (4096, 32768, ctx)}
        tokens = costs[kind]["tokens_in_a_gib"]
        assert tokens % 256 == 0
        assert tokens * token <= GIB < (tokens + 256) * token


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_in_the_docs_is_what_the_command_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    page = (ROOT / "docs/MEMORY.md").read_text(encoding="utf-8")
    table = re.search(rf"\| {re.escape(name)} \|.*?\n\n", page, re.DOTALL | re.IGNORECASE)
    assert table is not None
    written = rows_of(table[0], r" \| ")
    _, out, _ = run_cli(capsys, "info", stand_in(tmp_path / f"{name}.gguf"))
    shown = rows_of(out, r"\s{2,}")
    assert list(written) == list(BITS)
    assert written == {kind: cells[:5] for kind, cells in shown.items()}
    heading = next(line for line in out.splitlines() if line.startswith("type  ") and "in 1 GiB" in line)
    titles = re.split(r"\s{2,}", heading.strip())[1:5]
    assert table[0].splitlines()[0].endswith(f" | {' | '.join(titles)} | tokens in 1 GiB |")


def test_short_contexts_are_listed_whole(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    _, out, _ = run_cli(capsys, "info", tiny_model, "--json")
    for cost in json.loads(out)["kv_types"].values():
        assert [told["tokens"] for told in cost["conversations"]] == [4096]


@pytest.mark.parametrize("kind", ["f32", "q8_0", "iq4_nl"])
def test_a_pool_of_these_bytes_holds_the_conversation(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, kind: str
) -> None:
    _, out, _ = run_cli(capsys, "info", tiny_model, "--json")
    (told,) = json.loads(out)["kv_types"][kind]["conversations"]
    with LLM(tiny_model, kv_type=kind, kv_cache_bytes=told["bytes"]) as llm:
        assert llm.stats().tokens_total == llm.n_ctx == told["tokens"]
        assert llm.stats().pool_bytes >= told["bytes"]
    with LLM(tiny_model, kv_type=kind, kv_cache_bytes=told["bytes"] - 1) as llm:
        assert llm.stats().tokens_total < told["tokens"]
