"""Blocks that requests hold over time, and statistics that are published after each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo import LLM, SamplingParams
from pyvelo.demo import DEMO_MODEL
from pyvelo.engine.request import ParentRequest
from pyvelo.engine.stats import BlockMeter, EngineStats


class Table:
    def __init__(self, *groups: int) -> None:
        self.groups = [[0] * n for n in groups]


class Held:
    """A running request: a parent, and a table or none."""

    def __init__(self, parent: ParentRequest, table: Table | None) -> None:
        self.parent = parent
        self.sequence = self
        self.table = table


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),  # seconds since the last count
            st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=2)), max_size=5),
        ),
        max_size=8,
    )
)
def test_blocks_are_counted_from_one_count_to_the_next(steps: list[tuple[int, Any]]) -> None:
    """The oracle keeps the blocks of each parent between two counts, and adds them times the seconds."""
    now = 0.0
    meter = BlockMeter(lambda: now)
    parents = [ParentRequest() for _ in range(3)]
    held, peaks, seconds = [0] * 3, [0] * 3, [0.0] * 3
    for passed, running in steps:
        now += passed
        meter.count([Held(parents[number], Table(*groups)) for number, groups in running])  # type: ignore[misc]
        seconds = [total + blocks * passed for total, blocks in zip(seconds, held, strict=True)]
        held = [sum(sum(groups) for number, groups in running if number == which) for which in range(3)]
        peaks = [max(pair) for pair in zip(peaks, held, strict=True)]
    assert [parent.block_seconds for parent in parents] == seconds
    assert [parent.peak_blocks for parent in parents] == peaks


def test_a_request_without_a_table_holds_nothing() -> None:
    parent = ParentRequest()
    BlockMeter(lambda: 0.0).count([Held(parent, None)])  # type: ignore[list-item]
    assert parent.peak_blocks == 0


@pytest.mark.parametrize("n", [1, 3])
def test_statistics_after_each_step(n: int) -> None:
    published: list[EngineStats] = []
    with LLM(DEMO_MODEL, n_ctx=256, kv_cache_bytes=1 << 22) as llm:
        llm._engine.publish_stats(published.append)
        llm.generate(list(range(1, 71)), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, n=n))
        assert published[-1] == llm.stats()
        for stats in published:
            assert stats.blocks_total == stats.blocks_used + stats.blocks_cached + stats.blocks_free
        steps = [stats.steps for stats in published]
        assert steps == sorted(steps)
        assert {*range(steps[-1] + 1)} <= {*steps}, "a step was not published"
        assert max(stats.blocks_used for stats in published) >= 4
        assert dataclasses.asdict(published[-1])["running"] == 0
