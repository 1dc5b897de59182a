"""Claims of the pages about differences to other libraries."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.demo import DEMO_MODEL
from pyvelo.engine.request import Request

from .test_names import tables
from .test_snippets import ROOT

VLLM = ROOT / "docs" / "FROM_VLLM.md"
LLAMA_CPP_PYTHON = ROOT / "docs" / "FROM_LLAMA_CPP_PYTHON.md"


def row(page: Path, begin: str) -> list[str]:
    """Return the cells of the row that begins so."""
    (found,) = [cells for table in tables(page) for cells in table if cells[0].startswith(begin)]
    return found


def arguments(cell: str) -> dict[str, Any]:
    """Return the arguments of SamplingParams in a cell such as `f=1`."""
    call = ast.parse(f"f({cell.split('`')[1]})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_what_stands_for_json_object_gives_objects(seed: int) -> None:
    pytest.importorskip("llguidance")
    given = arguments(row(VLLM, "`json_object=True`")[1])
    ends = SamplingParams(temperature=1.0, seed=seed, max_tokens=400, **given)
    with LLM(DEMO_MODEL, n_ctx=512, n_threads=1) as llm:
        text = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], ends).text
    assert text.startswith("{")
    if text.rstrip().endswith("}"):
        assert isinstance(json.loads(text), dict)


def test_priority_has_the_sign_that_vllm_has() -> None:
    """The lower value runs first."""
    ranks = [
        Request.rank.fget(SimpleNamespace(arrival=5, params=SimpleNamespace(priority=priority)))  # type: ignore[attr-defined]
        for priority in (-1, 0, 1)
    ]
    assert ranks == sorted(ranks)
    assert "`priority=p`" in row(VLLM, "`generate(..., priority=")[1]


def test_penalties_of_llama_cpp_python_have_a_window() -> None:
    for name in ("`repeat_penalty=", "`frequency_penalty="):
        assert "the last 64 generated tokens" in row(LLAMA_CPP_PYTHON, name)[0]
