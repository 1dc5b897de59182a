"""Many sequences at once, each as if it were alone."""

from __future__ import annotations

import random
from pathlib import Path

from pyvelo import LLM, SamplingParams


def test_300_sequences_of_random_lengths(tiny_model_f32: Path) -> None:
    """Greedy and seeded draws, all running at the same time, against one at a time in another engine."""
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 1000) for _ in range(draw.randint(1, 90))] for _ in range(300)]
    params = [
        SamplingParams(max_tokens=draw.randint(1, 24), temperature=number % 2, seed=number, ignore_eos=True)
        for number in range(300)
    ]
    with LLM(
        tiny_model_f32, deterministic=True, n_ctx=128, max_num_seqs=300, kv_cache_bytes=64 << 20, n_threads=1
    ) as llm:
        together = llm.generate(prompts, params)
        stats = llm.stats()
        assert (stats.requests_finished, stats.blocks_used, stats.max_num_seqs) == (300, 0, 300)
    with LLM(tiny_model_f32, deterministic=True, n_ctx=128, max_num_seqs=1, n_threads=1) as llm:
        alone = llm.generate(prompts, params)
        assert llm.stats().steps >= sum(param.max_tokens or 0 for param in params)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.text for output in together] == [output.text for output in alone]
