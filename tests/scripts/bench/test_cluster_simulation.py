"""scripts/bench/cluster_simulation.py: its mixes, and what its policies find."""

from __future__ import annotations

import itertools

import pytest

from scripts.bench.cluster_simulation import MIXES, Cluster, measure


@pytest.mark.parametrize("mix", MIXES)
def test_requests_are_in_order_and_share_with_earlier_ones(mix: str) -> None:
    jobs = MIXES[mix](2, 0)
    assert len(jobs) >= 100
    assert all(before.time <= after.time for before, after in itertools.pairwise(jobs))
    for index, job in enumerate(jobs):
        if job.like is not None:
            before = jobs[job.like]
            assert job.like < index
            assert 0 < job.n_shared <= before.n_prompt + before.n_answer
            assert job.n_shared < job.n_prompt
    assert MIXES[mix](2, 0) == jobs != MIXES[mix](2, 1)


def test_every_request_ends_and_no_load_is_left() -> None:
    jobs = MIXES["chat"](2, 0)[:40]
    cluster = Cluster(jobs, 2, "affinity", 0, {"slack": 2})
    cluster.run()
    ended = [machine.core.counters.n_ended for machine in cluster.machines.values()]
    assert (sum(ended), min(ended) > 0) == (40, True)
    policy = cluster._policy
    assert [policy.load(name) for name in cluster.machines] == [0, 0]  # type: ignore[attr-defined]
    assert sum(len(machine.meter.first) for machine in cluster.machines.values()) == 40


def test_affinity_finds_more_than_the_other_policies() -> None:
    found = {policy: measure("chat", 2, policy, 0) for policy in ("affinity", "round-robin", "one-engine")}
    assert found["affinity"].hit_rate >= 0.95 * found["one-engine"].hit_rate
    assert found["affinity"].common == found["round-robin"].common
    assert found["round-robin"].hit_rate + 0.05 < found["affinity"].hit_rate <= found["affinity"].common
    assert all(result.balance >= 1.0 for result in found.values())
