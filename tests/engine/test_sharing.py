"""Sequences that begin alike, over a toy model that checks every slot of every block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.errors import Cancelled

from .fakes import Bench, answer

PROMPT = [7 * i % 90 + 1 for i in range(100)]


def run(bench: Bench, prompt: list[int], n: int = 5, **params: Any) -> int:
    """Answer a prompt; return its prefix hit in tokens."""
    request = bench.submit(prompt, n, **params)
    bench.finish(request)
    assert request.generated_ids == answer(prompt, n)
    return request.n_cached


def fed(bench: Bench) -> int:
    """Tokens computed so far."""
    return sum(sum(step.n_tokens) for step in bench.context.steps)


def test_the_second_of_two_computes_the_rest_alone() -> None:
    bench = Bench()
    assert run(bench, PROMPT) == 0
    before = fed(bench)
    assert run(bench, [*PROMPT, 3, 4]) == 96, "three blocks; the fourth was not full"
    assert fed(bench) - before == 6 + 4
    bench.assert_idle()


def test_the_last_token_of_a_prompt_is_computed_for_its_logits() -> None:
    bench = Bench()
    run(bench, PROMPT[:64])
    before = fed(bench)
    assert run(bench, PROMPT[:64], 1) == 63
    assert fed(bench) - before == 1


@pytest.mark.parametrize(("whole", "there"), [(False, 30), (True, 29)])
def test_thirty_tokens_in_blocks_of_thirty_two(whole: bool, there: int) -> None:
    bench = Bench(block_size=32)
    run(bench, PROMPT[:40])
    assert run(bench, PROMPT[:30] if whole else [*PROMPT[:30], 91, 92, 93]) == there
    assert bench.context.n_copies == 1


def test_answers_are_a_prefix_hit_of_the_next_turn() -> None:
    bench = Bench()
    first = bench.submit(PROMPT[:10], 60)
    bench.finish(first)
    turn = [*first.tokens, 5, 6, 7]
    assert run(bench, turn) == 64, "whole blocks of prompt and answer"
    before = fed(bench)
    assert run(bench, [*turn, 8]) >= 64
    assert fed(bench) - before < 32 + 5


def test_live_sequences_share_what_is_computed() -> None:
    bench = Bench(n_blocks=32, max_batch_tokens=16)
    first = bench.submit(PROMPT, 30)
    while first.n_generated < 2:
        bench.step()
    others = [bench.submit([*PROMPT, i], 30) for i in range(1, 4)]
    bench.step()
    for _ in range(3):
        bench.step()
    assert all(other.n_cached >= 96 for other in others)
    assert bench.manager.n_used < 4 * 4
    bench.finish(first, *others)
    assert [other.generated_ids for other in others] == [answer([*PROMPT, i], 30) for i in range(1, 4)]
    bench.assert_idle()


def test_salts_keep_tenants_apart() -> None:
    bench = Bench(n_blocks=64)
    assert run(bench, PROMPT, cache_salt="a") == 0
    assert run(bench, PROMPT, cache_salt="b") == 0
    assert run(bench, PROMPT) == 0
    assert run(bench, PROMPT, cache_salt="b") == 96


def test_without_it_nothing_is_shared() -> None:
    bench = Bench(share=False)
    run(bench, PROMPT)
    assert run(bench, PROMPT) == 0
    assert bench.manager.n_cached == 0


@pytest.mark.parametrize("state_blocks", [1, 3])
def test_a_prefix_is_a_hit_up_to_a_snapshot_of_the_recurrent_state(state_blocks: int) -> None:
    bench = Bench(n_states=2, max_seqs=2, state_blocks=state_blocks)
    run(bench, PROMPT, 30)  # its answer ends 6 tokens after a block
    assert run(bench, PROMPT) == (len(PROMPT) - 1) // 32 * 32
    continued = [*PROMPT, *answer(PROMPT, 30)]
    assert run(bench, [*continued, 5]) == len(continued) // 32 * 32
    assert run(bench, [*PROMPT[:40], 77]) == 0, "no state was saved after the first block"
    assert run(bench, [*PROMPT[:40], 78]) == 32, "the second that begins so saves it there"


def test_a_snapshot_without_one_of_its_blocks_is_no_hit() -> None:
    bench = Bench(n_blocks=8, n_states=1, max_seqs=1, state_blocks=2)
    run(bench, PROMPT[:65], 1)
    snapshot = next(iter(bench.manager._index.by_hash.values())).children  # type: ignore[union-attr]
    assert [len(prefix.snapshot) for prefix in snapshot] == [2]
    run(bench, [7] * 160, 1)  # needs 5 blocks, of which 4 are neither used nor cached
    assert run(bench, PROMPT[:65], 1) == 0
    bench.manager.audit()


def test_a_copy_survives_a_step_that_is_cut_short() -> None:
    bench = Bench(n_blocks=4, block_size=32)
    run(bench, PROMPT[:33])
    request = bench.submit([*PROMPT[:30], 91, 92, 93], 60)

    def cut() -> None:
        bench.context.before_run = lambda: None
        raise Cancelled("now")

    bench.context.before_run = cut
    bench.step()
    run(bench, [91] * 30, 1)  # takes what is free, the source too
    bench.finish(request)
    assert request.generated_ids == answer([*PROMPT[:30], 91, 92, 93], 60)


def test_what_was_not_computed_is_no_hit() -> None:
    """A step fails: its blocks hold nothing."""
    bench = Bench()
    request = bench.submit(PROMPT, 5)

    def fail() -> None:
        raise RuntimeError("broken")

    bench.context.before_run = fail
    bench.finish(request)
    assert isinstance(request.error, RuntimeError)
    bench.context.before_run = lambda: None
    assert run(bench, PROMPT) == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n_blocks=st.integers(6, 24), budget=st.integers(4, 70))
def test_each_request_gets_the_answer_it_gets_alone(data: st.DataObject, n_blocks: int, budget: int) -> None:
    """Prompts of few tokens, so that many begin alike; a small pool, so that blocks change hands."""
    bench = Bench(n_blocks=n_blocks, block_size=8, max_seqs=4, max_batch_tokens=budget)
    prompts = data.draw(
        st.lists(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=30), min_size=1, max_size=12)
    )
    requests = []
    for prompt in prompts:
        requests.append(bench.submit(prompt, data.draw(st.integers(1, 12))))
        for _ in range(data.draw(st.integers(0, 6))):
            bench.step()
        if data.draw(st.integers(0, 9)) == 0:
            bench.core.inbox.cancel([data.draw(st.sampled_from(requests))])
            bench.core.settle()
    bench.finish(*requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.generated_ids == answer(prompt, request.n_generated)
    bench.assert_idle()
