"""Simulate 2 to 64 machines behind a router: hit rate and balance of its policies.

    python scripts/bench/cluster_simulation.py
    python scripts/bench/cluster_simulation.py --machines 2 8 --mixes chat --json

Each machine is the real scheduler and block manager without a model (`pyvelo simulate`), with Qwen3-0.6B's
costs on two cores. The policies are the ones of `pyvelo.cluster`; they get a report of each machine every
second. The load grows with the machines.

- chat: conversations with one system prompt. Each turn has the whole conversation before it.
- agent: 8 kinds of agents with a long system prompt each, and many short turns.
- document: questions about documents, some of which are asked about far more often.

With --policies one-engine, one machine has the memory and the speed of all.

"common" is the share of the prompt tokens that earlier prompts and answers have: no cache finds more.
"balance" is the work of the busiest machine over the mean. Times are simulated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.cluster.policy import POLICIES, Report, make_policy, short
from pyvelo.engine.request import Sequence as RequestSequence
from pyvelo.simulate.engine import Clock, Setup, SimulatedEngine
from pyvelo.simulate.workload import Job, Texts
from scripts._common import run_main

SETUP = Setup(n_blocks=1024, block_size=32, block_bytes=112 << 15, n_ctx=16384, max_seqs=64)
ONE = "one-engine"
"""In place of a policy: one machine with the memory and the speed of all."""
MAX_HELD = 4096
"""Prefixes in a report, as in pyvelo.cluster.report."""


@dataclass(frozen=True)
class Result:
    """Figures of one mix, number of machines and policy. Times are in seconds."""

    mix: str
    machines: int
    policy: str
    common: float
    hit_rate: float
    balance: float
    ttft_p50: float
    ttft_p99: float


class Mix:
    """Requests in any order of time, each perhaps after another one."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._made: list[tuple[Job, int | None]] = []

    def add(self, time: float, n_new: int, n_answer: int, after: int | None, n_shared: int) -> int:
        """Add a request that begins with `n_shared` tokens of the request `after`; return its number."""
        job = Job(time, n_shared + n_new, n_answer, n_answer, 1, None, n_shared)
        self._made.append((job, after))
        return len(self._made) - 1

    def length(self, number: int) -> int:
        """Return the tokens of a request and its answer."""
        job = self._made[number][0]
        return job.n_prompt + job.n_answer

    def jobs(self) -> list[Job]:
        """Return the requests in the order of time."""
        order = sorted(range(len(self._made)), key=lambda number: (self._made[number][0].time, number))
        places = {number: place for place, number in enumerate(order)}
        return [
            replace(job, like=None if after is None else places[after])
            for job, after in (self._made[number] for number in order)
        ]


def conversations(
    mix: Mix, machines: int, every: float, n_turns: tuple[int, int], pause: float, system: Sequence[int]
) -> list[Job]:
    """Return requests of conversations that begin every so many seconds of a machine.

    Args:
        n_turns: least and most turns; pause: mean seconds between two.
        system: tokens of the system prompts, of which each conversation has one.
    """
    draw, firsts = mix.draw, [mix.add(0.0, n, 1, None, 0) for n in system]
    for number in range(16 * machines):
        kind = draw.randrange(len(system))
        time, before, shared = (number + 1) * every / machines, firsts[kind], system[kind]
        for _ in range(draw.randint(*n_turns)):
            n_new, n_answer = draw.randint(20, 120), draw.randint(30, 150)
            before = mix.add(time, n_new, n_answer, before, shared)
            shared = mix.length(before)
            time += 2.0 + draw.expovariate(1 / pause)
    return mix.jobs()


def chat(machines: int, seed: int) -> list[Job]:
    return conversations(Mix(seed), machines, 8.0, (2, 8), 30.0, [256])


def agent(machines: int, seed: int) -> list[Job]:
    mix = Mix(seed)
    return conversations(mix, machines, 30.0, (6, 16), 6.0, [mix.draw.randint(1200, 2400) for _ in range(8)])


def document(machines: int, seed: int) -> list[Job]:
    mix = Mix(seed)
    lengths = [mix.draw.randint(1000, 5000) for _ in range(4 * machines)]
    weights = [1 / (rank + 1) for rank in range(len(lengths))]
    first: dict[int, int] = {}
    for number in range(60 * machines):
        [which] = mix.draw.choices(range(len(lengths)), weights)
        time, n_new, n_answer = number * 5.0 / machines, mix.draw.randint(10, 60), mix.draw.randint(30, 120)
        if which in first:
            mix.add(time, n_new, n_answer, first[which], lengths[which])
        else:
            first[which] = mix.add(time, lengths[which] + n_new, n_answer, None, 0)
    return mix.jobs()


MIXES: dict[str, Callable[[int, int], list[Job]]] = {"chat": chat, "agent": agent, "document": document}


class Cluster:
    """Machines, and the policy that chooses among them."""

    def __init__(
        self,
        jobs: Sequence[Job],
        machines: int,
        policy: str,
        seed: int,
        options: Mapping[str, Any],
        setup: Setup = SETUP,
    ) -> None:
        self._jobs, self._texts, self._clock = jobs, Texts(jobs, seed), Clock()
        self._policy = make_policy(policy, self._clock, **(options if policy == "affinity" else {}))
        self.machines = {f"m{n:02}": SimulatedEngine(setup, jobs, self._texts) for n in range(machines)}
        self._ended = dict.fromkeys(self.machines, 0)
        self._reported: dict[str, int] = {}

    def run(self, period: float = 1.0) -> None:
        """Send each request when it arrives, and reports every `period` seconds; finish all."""
        reported = 0.0
        for index, job in enumerate(self._jobs):
            while reported < job.time:
                self._advance(reported)
                self._report()
                reported += period
            self._advance(job.time)
            prompt = self._texts.prompt(index)
            hashes = RequestSequence(prompt.tolist(), SETUP.block_size).hashes
            digests = [short(hashes.block_hash(n)) for n in range(len(prompt) // SETUP.block_size)]
            chosen = self._policy.order(digests, self.machines)[0]
            self._policy.sent(chosen, digests)
            self.machines[chosen].submit(index, prompt)
        self._advance(1e9)

    def _advance(self, time: float) -> None:
        self._clock.now = time
        for name, machine in self.machines.items():
            machine.advance(time)
            n_ended = machine.core.counters.n_ended
            for _ in range(n_ended - self._ended[name]):
                self._policy.ended(name)
            self._ended[name] = n_ended

    def _report(self) -> None:
        for name, machine in self.machines.items():
            if machine.core.counters.steps == self._reported.get(name):
                continue
            self._reported[name] = machine.core.counters.steps
            held = frozenset(map(short, machine.manager.held_hashes((), MAX_HELD)))
            n_running = machine.core.n_running
            report = Report(held, machine.n_open, n_running, 0, machine.manager.n_free)
            self._policy.report(name, report)


def measure(
    mix: str, machines: int, policy: str, seed: int, options: Mapping[str, Any] | None = None
) -> Result:
    """Simulate one row; options: of the policy affinity."""
    jobs = MIXES[mix](machines, seed)
    if policy == ONE:
        cluster = Cluster(jobs, 1, "round-robin", seed, {}, setup_of(machines))
    else:
        cluster = Cluster(jobs, machines, policy, seed, options or {})
    cluster.run()
    engines = cluster.machines.values()
    n_prompt = sum(job.n_prompt for job in jobs)
    hits = sum(each.manager.counts.hits for each in engines)
    work = [
        each.manager.counts.queried - each.manager.counts.hits + each.core.counters.completion_tokens
        for each in engines
    ]
    waits = sorted(wait for each in engines for wait in each.meter.first)
    return Result(
        mix=mix,
        machines=machines,
        policy=policy,
        common=sum(job.n_shared for job in jobs) / n_prompt,
        hit_rate=hits / sum(each.manager.counts.queried for each in engines),
        balance=max(work) / statistics.mean(work),
        ttft_p50=waits[len(waits) // 2],
        ttft_p99=waits[len(waits) * 99 // 100],
    )


def setup_of(machines: int) -> Setup:
    """Return one machine with the memory and the speed of several."""
    costs = {field.name: getattr(SETUP.costs, field.name) / machines for field in fields(SETUP.costs)}
    costs["masked"] = SETUP.costs.masked
    return replace(SETUP, n_blocks=SETUP.n_blocks * machines, costs=replace(SETUP.costs, **costs))


def row(result: Result) -> str:
    """Return a row of the table."""
    return (
        f"| {result.mix} | {result.machines} | {result.policy} | {result.common:.0%} | "
        f"{result.hit_rate:.0%} | {result.balance:.2f} | {result.ttft_p50:.2f} | {result.ttft_p99:.1f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", nargs="+", type=int, default=[2, 8, 64])
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES, ONE], default=list(POLICIES))
    parser.add_argument("--slack", type=int, default=4, help="of the policy affinity; default: 4")
    parser.add_argument("--factor", type=float, default=1.25, help="likewise; default: 1.25")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if min(given.machines) < 1:
        parser.error(f"--machines {min(given.machines)}: give at least 1")
    options = {"slack": given.slack, "factor": given.factor}
    results: list[dict[str, Any]] = []
    if not given.json:
        print("| mix | machines | policy | common | hit rate | balance | first token p50, s | p99, s |")
        print("|---|---|---|---|---|---|---|---|")
    for mix in given.mixes:
        for machines in given.machines:
            for policy in given.policies:
                result = measure(mix, machines, policy, given.seed, options)
                results.append(asdict(result))
                if not given.json:
                    print(row(result), flush=True)
    if given.json:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
