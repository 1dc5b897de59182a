"""Policies that choose a replica, with replicas and a clock of the test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyvelo.cluster.policy import (
    MAX_RECENT,
    POLICIES,
    LeastLoaded,
    Policy,
    PrefixAffinity,
    Report,
    RoundRobin,
    make_policy,
    short,
)
from pyvelo.errors import ConfigError


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(text: str) -> list[bytes]:
    """Return the digests of a prompt whose blocks are the beginnings of a text."""
    return [short(text[:n].encode().rjust(32)[::-1]) for n in range(1, len(text) + 1)]


def reported(*texts: str, **numbers: int) -> Report:
    return Report(frozenset(digest for text in texts for digest in prompt(text)), **numbers)


def choose(policy: Policy, digests: Sequence[bytes], replicas: Sequence[str]) -> str:
    """Send a request to the best replica."""
    best = policy.order(digests, replicas)[0]
    policy.sent(best, digests)
    return best


def test_a_report_survives_packing() -> None:
    report = reported("abc", "abd", n_open=3, n_running=2, queued_tokens=700, free_blocks=9, n_others=1)
    packed = report.packed({"a": 2, "b": 1})
    assert Report.unpack(packed, "a") == report
    assert [Report.unpack(packed, name).n_others for name in ("b", "c")] == [2, 3]
    assert (
        Report.unpack(Report(n_open=1).packed({"a": 3, "b": 2}), "a").n_others == 2
    )  # streams of blocks, too
    assert Report.unpack({}, "a") == Report()
    assert len(packed["held"]) == 8 * 4


def test_the_longest_prefix_wins() -> None:
    policy = PrefixAffinity(Clock())
    policy.report("x", reported("abc", free_blocks=90))
    policy.report("y", reported("abcde", n_others=2, queued_tokens=500))
    policy.report("z", reported("abx"))
    assert policy.order(prompt("abcdef"), ["x", "y", "z"]) == ["y", "x", "z"]
    assert [policy.held(name, prompt("abcdef")) for name in "xyz"] == [3, 5, 2]


def test_an_evicted_prefix_counts_no_more() -> None:
    policy = PrefixAffinity(Clock())
    policy.report("x", reported("abc"))
    policy.report("y", reported("ab"))
    assert policy.order(prompt("abc"), ["y", "x"])[0] == "x"
    policy.report("x", reported("q"))
    assert policy.order(prompt("abc"), ["y", "x"])[0] == "y"


def test_unknown_prompts_go_to_the_least_load() -> None:
    policy = PrefixAffinity(Clock())
    policy.report("x", Report(n_others=2))
    policy.report("y", Report(n_others=1, queued_tokens=900))
    policy.report("z", Report(n_others=1, queued_tokens=100))
    for digests in (prompt("abc"), []):
        assert policy.order(digests, ["x", "y", "z"]) == ["z", "y", "x"]
    policy.report("y", Report(n_others=1, queued_tokens=100, free_blocks=5))
    assert policy.order(prompt("abc"), ["x", "y", "z"]) == ["y", "z", "x"]


def test_unknown_prompts_that_end_at_once_spread_before_the_next_report() -> None:
    policy = PrefixAffinity(Clock())
    for name in "xyz":
        policy.report(name, Report(free_blocks=100))
    chosen = []
    for number in range(6):
        chosen.append(choose(policy, prompt(chr(200 + number) * 4), ["x", "y", "z"]))
        policy.ended(chosen[-1])
    assert Counter(chosen) == dict.fromkeys("xyz", 2)
    policy.report("z", Report(free_blocks=99))  # the true numbers again
    assert choose(policy, prompt("new"), ["x", "y", "z"]) == "z"


def test_a_burst_of_equal_prompts_goes_to_one_place_before_the_next_report() -> None:
    policy, replicas = PrefixAffinity(Clock(), slack=8), ["x", "y", "z"]
    assert len({choose(policy, prompt("abcd"), replicas) for _ in range(8)}) == 1


def test_routers_without_reports_agree_and_spread() -> None:
    replicas = [f"r{n}" for n in range(8)]
    firsts = [PrefixAffinity(Clock()).order(prompt(chr(200 + n) * 3), replicas)[0] for n in range(64)]
    again = [PrefixAffinity(Clock()).order(prompt(chr(200 + n) * 3), replicas[::-1])[0] for n in range(64)]
    assert firsts == again
    assert len(set(firsts)) == 8


def test_memory_ends_with_time_and_with_its_bound() -> None:
    clock = Clock()
    policy = PrefixAffinity(clock, memory=10.0)
    policy.sent("x", prompt("abc"))
    assert policy.held("x", prompt("abc")) == 3
    clock.now = 9.0
    policy.sent("x", prompt("ab"))  # again
    clock.now = 11.0
    assert policy.held("x", prompt("abc")) == 2
    clock.now = 19.5
    assert policy.held("x", prompt("abc")) == 0
    policy.sent("x", prompt("abc"))
    policy.sent("x", [n.to_bytes(8, "big") for n in range(MAX_RECENT)])
    assert policy.held("x", prompt("abc")) == 0


def test_an_overloaded_replica_is_avoided_and_found_again() -> None:
    policy, replicas = PrefixAffinity(Clock(), factor=1.25, slack=4), ["x", "y"]
    policy.report("x", reported("abc"))
    chosen = [choose(policy, prompt("abc"), replicas) for _ in range(6)]
    assert chosen == ["x"] * 4 + ["y"] * 2  # the bound is 4 up to a total of 5
    assert policy.order(prompt("abc"), replicas)[0] == "y"  # it holds the prefix now, too, with less to do
    for _ in range(4):
        policy.ended("x")
    assert policy.order(prompt("abc"), replicas)[0] == "x"


def test_the_load_of_other_routers_is_in_the_reports() -> None:
    policy = LeastLoaded()
    for _ in range(3):
        policy.sent("x", [])
    policy.report("x", Report(n_open=5, n_others=2))
    assert policy.load("x") == 5
    policy.ended("x")
    assert policy.load("x") == 4
    for n_open in (1, 7):  # measured before the own requests arrived, and before two of them ended
        policy.report("x", Report(n_open=n_open, n_others=1))
        assert policy.load("x") == 3
    for _ in range(5):
        policy.ended("x")
    assert policy.load("x") == 1


@pytest.mark.parametrize("name", POLICIES)
def test_a_dead_replica_is_forgotten(name: str) -> None:
    policy = make_policy(name, Clock())
    for replica in ("x", "y"):
        policy.report(replica, reported("abc", n_others=7))
        policy.sent(replica, prompt("abc"))
    policy.keep(["y"])
    policy.ended("x")  # of a request that died with it
    assert policy.order(prompt("abc"), ["y"]) == ["y"]
    assert isinstance(policy, LeastLoaded)
    assert policy.load("x") == 0
    assert set(policy._known) == {"y"}


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin()
    policy.report("y", Report(n_others=50))
    chosen = [choose(policy, prompt("abc"), ["x", "y", "z"]) for _ in range(6)]
    assert chosen == ["x", "y", "z"] * 2
    assert choose(policy, [], ["x", "z"]) == "x"


def test_least_loaded_balances() -> None:
    policy = LeastLoaded()
    assert Counter(choose(policy, prompt("abc"), ["x", "y", "z"]) for _ in range(9)) == dict.fromkeys(
        "xyz", 3
    )


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="policy='random': choose from affinity, least-loaded, round-robin"):
        make_policy("random", Clock())
    for wrong in ({"factor": 0.9}, {"factor": math.nan}, {"factor": 1e308}, {"slack": 0}, {"memory": -1.0}):
        with pytest.raises(ConfigError, match=r"give (a number|at least)"):
            make_policy("affinity", Clock(), **wrong)


TEXTS = st.text("ab", min_size=0, max_size=5)


class Routing(RuleBasedStateMachine):
    """Any order of requests, ends, reports, births and deaths."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.policy = PrefixAffinity(self.clock, factor=1.0, slack=2)
        self.alive = ["r0", "r1"]
        self.n_born = 2
        self.open: list[str] = []

    @rule()
    def born(self) -> None:
        self.alive.append(f"r{self.n_born}")
        self.n_born += 1

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        dead = data.draw(st.sampled_from(self.alive))
        self.alive.remove(dead)
        self.open = [name for name in self.open if name != dead]
        self.policy.keep(self.alive)

    @rule(text=TEXTS)
    def request(self, text: str) -> None:
        digests, before = prompt(text), dict(self._loads())
        order = self.policy.order(digests, self.alive)
        assert order == self.policy.order(digests, self.alive[::-1]), "ties depend on the order of replicas"
        assert sorted(order) == sorted(self.alive), "a dead replica was chosen, or one is left out"
        chosen = order[0]
        most = self.policy.most(self.alive)
        assert before[chosen] + 1 <= most, "the bound on the load is broken"
        fit = [name for name in self.alive if before[name] + 1 <= most]
        longest = max(self.policy.held(name, digests) for name in fit)
        assert self.policy.held(chosen, digests) == longest or not digests
        self.policy.sent(chosen, digests)
        self.open.append(chosen)
        if digests and before[chosen] + 2 <= self.policy.most(self.alive) and longest == len(digests):
            again = self.policy.order(digests, self.alive)[0]
            assert self.policy.held(again, digests) == len(digests), "an equal prompt left its prefix"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.open))
        self.open.remove(name)
        self.policy.ended(name)

    @rule(data=st.data(), texts=st.lists(TEXTS, max_size=3), n_others=st.integers(0, 9))
    def reports(self, data: st.DataObject, texts: list[str], n_others: int) -> None:
        name = data.draw(st.sampled_from(self.alive))
        self.policy.report(name, reported(*texts, n_others=n_others))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    def _loads(self) -> list[tuple[str, int]]:
        return [(name, self.policy.load(name)) for name in self.alive]

    @invariant()
    def own_requests_are_counted(self) -> None:
        assert all(load >= self.open.count(name) for name, load in self._loads())


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    n=st.integers(1, 12), n_requests=st.integers(1, 80), factor=st.floats(1.0, 3.0), slack=st.integers(1, 9)
)
@settings(max_examples=50, deadline=None)
def test_equal_prompts_stay_together_up_to_the_bound(
    n: int, n_requests: int, factor: float, slack: int
) -> None:
    policy = PrefixAffinity(Clock(), factor=factor, slack=slack)
    replicas = [f"r{number}" for number in range(n)]
    first = choose(policy, prompt("abc"), replicas)
    for _ in range(n_requests):
        room = policy.load(first) + 1 <= policy.most(replicas)
        others = [policy.held(name, prompt("abc")) for name in replicas if name != first]
        chosen = choose(policy, prompt("abc"), replicas)
        if room and not any(others):
            assert chosen == first
        assert policy.load(chosen) <= max(slack, math.ceil(factor * sum(map(policy.load, replicas)) / n))
