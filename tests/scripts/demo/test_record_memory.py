"""scripts/demo/record_memory.py records a run in which everything happens that the picture is to show."""

from __future__ import annotations

from pathlib import Path

from pyvelo import LLM
from pyvelo.trace.blockmap import summarize
from pyvelo.trace.format import read_trace
from scripts.demo.record_memory import N_REQUESTS, POOL_TOKENS, run


def test_requests_share_blocks_are_preempted_and_end(tiny_model: Path, tmp_path: Path) -> None:
    pool = POOL_TOKENS * 1024
    with LLM(tiny_model, n_ctx=1024, n_threads=1, kv_cache_bytes=pool, swap_bytes=pool // 4) as llm:
        assert llm.geometry.token_bytes == 1024
        with llm.trace(tmp_path / "run.trace"):
            n_pieces = run(llm)
        assert llm.stats().completion_tokens == n_pieces
    summary = summarize(read_trace(tmp_path / "run.trace"))
    assert summary.finished == summary.requests > N_REQUESTS
    # Preemptions follow measured costs: a block or two may stay free at the worst moment.
    assert summary.peak_used >= 0.9 * summary.blocks_total
    assert summary.preemptions > 0 < summary.evictions
    assert summary.saved_by_sharing > 0.2
