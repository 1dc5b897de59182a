"""scripts/bench/kv_quality.py: its divergence against the definition, and on a small model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.bench.kv_quality import compare, divergence, pieces_of


def test_divergence_is_the_definition() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5, 11)).astype(np.float32) * 3
    p, q = (
        np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (a, b)
    )
    np.testing.assert_allclose(divergence(a, b), (p * np.log(p / q)).sum(-1), rtol=1e-9)
    np.testing.assert_allclose(divergence(a, a + 2), 0, atol=1e-10)


def test_more_bits_diverge_less(tiny_model: Path) -> None:
    rng = np.random.default_rng(1)
    pieces = [rng.integers(0, 256, 300).tolist() for _ in range(2)]
    same, fine, coarse = (compare(tiny_model, pieces, kv, 8, 1) for kv in ("f16", "q8_0", "q4_0"))
    assert same.mean == 0
    assert same.same_top == 1
    assert same.positions == 2 * 292
    assert 0 < fine.mean < coarse.mean / 10
    assert fine.same_top > 0.9


def test_too_little_text_says_what_would_do(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abc")
    with pytest.raises(SystemExit, match="--context"):
        pieces_of(tiny_model, tmp_path / "text", 1024, 1)
