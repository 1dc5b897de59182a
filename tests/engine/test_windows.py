"""Requests on a model with windows, in pools with too few blocks for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.kv.prefix import FULL, Window

from .fakes import Bench, answer

WINDOWS = (
    (FULL, Window(2)),
    (FULL, Window(12), Window(12)),
    (FULL, Window(16, chunked=True)),
    (FULL, FULL, Window(5), Window(24, chunked=True)),
)


def test_a_partial_hit_starts_with_fewer_tokens_if_the_window_before_it_holds_a_block() -> None:
    bench = Bench(n_blocks=7, block_size=8, max_seqs=2, max_batch_tokens=3, width=8, windows=WINDOWS[0])
    bench.finish(bench.submit(range(1, 18), 1))
    prompt = [*range(1, 16), 99, 98]
    request = bench.submit(prompt, 2)
    bench.step()
    assert request.n_computed == 16, "of three tokens, one is in a block that it has"
    bench.finish(request)
    assert request.generated_ids == answer(prompt, 2)
    bench.assert_idle()


def test_a_prompt_takes_blocks_of_others_if_they_hold_what_its_window_has_left() -> None:
    """Its blocks are reserved, but the blocks that its window leaves do not return to the reserve."""
    windows = (FULL, Window(12), Window(12))
    sizes = {"block_size": 8, "max_seqs": 3, "max_batch_tokens": 3, "windows": windows}
    bench = Bench(n_blocks=18, **sizes)  # type: ignore[arg-type]
    prompt = list(range(1, 48))
    requests = [bench.submit(prompt, 6)]
    for n_steps, n_common, n_answer in ((4, 12, 25), (3, 18, 15), (5, 33, 6)):
        for _ in range(n_steps):
            bench.step()
        requests.append(bench.submit([*prompt[:n_common], 500 + len(requests), 501], n_answer))
    bench.finish(*requests)
    for request in requests:
        assert request.generated_ids == answer(request.prompt_ids, request.max_new)
    assert bench.core.counters.preemptions > 0
    bench.assert_idle()


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_long_answer_holds_its_window_only(windows: tuple[Window, ...]) -> None:
    bench = Bench(n_blocks=64, block_size=8, max_seqs=1, max_batch_tokens=16, windows=windows)
    request = bench.submit(range(1, 40), 80)
    layout = bench.manager.layout
    while not request.finished:
        bench.step()
        assert bench.manager.n_used <= layout.peak_blocks(len(request.tokens))
    assert request.generated_ids == answer(range(1, 40), 80)
    bench.assert_idle()


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(WINDOWS),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(0, 6),
    st.sampled_from([3, 8, 30]),
    st.sampled_from([0, 40]),
)
def test_each_request_gets_its_answer_in_a_pool_for_one_of_them(
    windows: tuple[Window, ...], wanted: list[tuple[int, int, int]], more: int, n_batch: int, n_swap: int
) -> None:
    """They share prefixes, and are preempted for each other."""
    longest = max(n_prompt + 1 + n_answer for n_prompt, _, n_answer in wanted)
    sizes = {"block_size": 8, "max_seqs": min(4, n_batch), "max_batch_tokens": n_batch, "windows": windows}
    layout = Bench(**sizes).manager.layout  # type: ignore[arg-type]
    bench = Bench(n_blocks=layout.peak_blocks(longest) + more, n_swap_blocks=n_swap, **sizes)  # type: ignore[arg-type]
    prompts = [[*range(1, n_prompt + 1), 500 + end] for n_prompt, end, _ in wanted]
    requests = [bench.submit(prompt, n) for prompt, (_, _, n) in zip(prompts, wanted, strict=True)]
    bench.finish(*requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.generated_ids == answer(prompt, request.max_new)
    bench.assert_idle()
