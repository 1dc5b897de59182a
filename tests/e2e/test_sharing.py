"""Shared prefixes through LLM: the tokens of a run without them, and less work."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.errors import InternalError

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
PREFIX = [3 + 11 * i % 200 for i in range(150)]
PROMPTS = [
    PREFIX,
    [*PREFIX, 9],
    PREFIX[:75],
    [*PREFIX[:75], 9, 8, 7],
    [*PREFIX[:40], 5],
    PREFIX,
    [5, *PREFIX],
]


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_the_same_tokens_with_and_without(tiny_model_f32: Path, kv_type: str) -> None:
    """Bit for bit in deterministic mode, one after the other and all at once."""
    with LLM(tiny_model_f32, n_threads=1, kv_type=kv_type, deterministic=True, prefix_cache=False) as llm:
        expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
        assert llm.stats().hit_tokens == llm.stats().blocks_cached == 0
    with LLM(tiny_model_f32, n_threads=1, kv_type=kv_type, deterministic=True) as llm:
        one_by_one = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        assert [output.token_ids for output in one_by_one] == expected
        assert [output.usage.cached_tokens for output in one_by_one] == [0, 150, 74, 75, 40, 149, 0]
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        stats = llm.stats()
        assert stats.blocks_used == 0
        assert stats.blocks_total == stats.blocks_cached + stats.blocks_free
        assert stats.block_copies > 0


def test_the_next_turn_computes_its_own_text(tiny_model_f32: Path) -> None:
    with LLM(tiny_model_f32, n_threads=1) as llm:
        first = llm.generate(PREFIX, GREEDY)[0]
        turn = [*PREFIX, *first.token_ids, 9, 8, 7]
        second = llm.generate(turn, GREEDY)[0]
        assert len(turn) - second.usage.cached_tokens <= 32 + 3


def test_salts_and_reset(tiny_model_f32: Path) -> None:
    def cached(salt: str) -> int:
        params = SamplingParams(max_tokens=1, cache_salt=salt)
        return llm.generate(PREFIX, params)[0].usage.cached_tokens

    with LLM(tiny_model_f32, n_threads=1) as llm:
        assert [cached("a"), cached("b"), cached("a"), cached("\ud800")] == [0, 0, 128, 0], (
            "the fifth block was not full"
        )
        llm.reset_prefix_cache()
        assert llm.stats().blocks_cached == 0
        assert [cached("a"), cached("a")] == [0, 128]


def test_samples_of_a_prompt_equal_prompts_alone(tiny_model_f32: Path) -> None:
    def drawn(n: int, seed: int) -> list[tuple[int, ...]]:
        params = SamplingParams(n=n, seed=seed, max_tokens=40, temperature=1.5, ignore_eos=True)
        return [sample.token_ids for sample in llm.generate(PREFIX, params)[0].outputs]

    with LLM(tiny_model_f32, n_threads=1, deterministic=True, prefix_cache=False) as llm:
        alone = [drawn(1, 7 + index)[0] for index in range(4)]
        before = llm.stats()
        assert drawn(4, 7) == alone
        after = llm.stats()
        assert after.steps - before.steps == 40, "the prompt is computed once"
        assert after.block_copies - before.block_copies == 3
        assert after.blocks_used == 0


def test_debugging_changes_no_token(tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VELO_DEBUG audits every step and fills freed blocks with NaN, which no step reads."""
    with LLM(tiny_model_f32, n_threads=1, deterministic=True) as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS * 2, GREEDY)]
    monkeypatch.setenv("VELO_DEBUG", "1")
    with LLM(tiny_model_f32, n_threads=1, deterministic=True, prefix_cache=False) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS * 2, GREEDY)] == expected
        context = llm._engine.context
        assert (context.read_blocks(sorted(llm._engine.core._mover._poisoned)[:1]) == 0xFF).all()
        llm._engine.core.manager._reserved += 1
        with pytest.raises(InternalError, match="blocks reserved"):
            llm.generate(PROMPTS[0], GREEDY)
        llm._engine.core.manager._reserved -= 1


@pytest.mark.parametrize("swap_bytes", [0, 1 << 26])
def test_a_pool_that_is_too_small_for_all_changes_no_token(tiny_model_f32: Path, swap_bytes: int) -> None:
    prompts = [[3 + (7 * i + j) % 250 for j in range(20 + 5 * i)] for i in range(8)]
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    with LLM(tiny_model_f32, n_threads=1, deterministic=True, n_ctx=256) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
        assert llm.stats().preemptions == 0
        pool = 512 * llm.geometry.token_bytes
    with LLM(
        tiny_model_f32,
        deterministic=True,
        n_ctx=256,
        kv_cache_bytes=pool,
        swap_bytes=swap_bytes,
        n_threads=1,
    ) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        stats = llm.stats()
        assert stats.preemptions > 0
        assert (stats.swaps > 0) == (swap_bytes > 0)
        assert stats.blocks_used == stats.swap_blocks_used == 0
