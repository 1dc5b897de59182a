"""The matrix of shapes and features covers all pairs, and sees wrong answers, dead processes and hangs."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from scripts.check import _matrix_logprobs, _matrix_run
from scripts.check._matrix_axes import AXES, SMALL, Config, Pair, configurations, covering, pairs_of, possible
from scripts.check.matrix import Worker

PLAIN = Config(
    arch="llama", group=2, kv_heads=2, head_dim=32, kv_type="f16", weights="f32", block_size=32, sequences=4,
    prefix=64, tails="own", n=2, sessions="fork", window=0, pool="roomy", swap=False, batch_tokens=64,
    batch_seqs=8, deterministic=True, threads=1, prefix_cache=True, draw="greedy", prompt_logprobs=False,
    cancels=True, adapters=2, audit=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def cover() -> list[Config]:
    return covering(0)


def test_every_possible_pair_is_covered(cover: list[Config]) -> None:
    covered = {pair for config in cover for pair in pairs_of(config)}
    every = {(a, x, b, y) for a, b in combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    assert all(map(possible, cover))
    assert {pair for pair in every - covered if not _contradicts(pair)} == set()
    assert len(covered) > 0.95 * len(every)


def _contradicts(pair: Pair) -> bool:
    """Whether two values rule each other out, whatever the others are."""
    a, x, b, y = pair
    return not possible(replace(PLAIN, **(SMALL | {a: x, b: y})))


def test_configurations_are_the_same_each_time(cover: list[Config]) -> None:
    assert configurations(len(cover) + 3, 0) == [*cover, *covering(1)[:3]]
    once, again = (covering.__wrapped__(2, candidates=1) for _ in range(2))
    assert once == again != covering(1)


@pytest.mark.laboratory
@pytest.mark.parametrize("deterministic", [True, False])
def test_nothing_is_wrong(deterministic: bool) -> None:
    assert _matrix_run.findings(replace(PLAIN, deterministic=deterministic)) == []


@pytest.mark.laboratory
def test_a_wrong_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = _matrix_run.alone

    def changed(*arguments: object) -> object:
        answers, size = alone(*arguments)  # type: ignore[arg-type]
        return {job: [(*answer[0][:-1], 1), *answer[1:]] for job, answer in answers.items()}, size

    monkeypatch.setattr(_matrix_run, "alone", changed)
    assert _matrix_run.findings(PLAIN)


@pytest.mark.laboratory
def test_logprobs_that_are_too_far_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = _matrix_logprobs._follow
    monkeypatch.setattr(_matrix_logprobs, "_follow", lambda *given: follow(*given) + 0.1 * np.sin(len(given)))
    (found,) = _matrix_run.findings(replace(PLAIN, deterministic=False, adapters=0))
    assert "from those over f32" in found


def worker(code: str, limit: float = 60.0) -> Worker:
    return Worker(limit, (sys.executable, "-c", code))


def test_a_process_that_dies_is_seen_and_replaced() -> None:
    once = "import os, sys\nfor line in sys.stdin:\n    os.kill(os.getpid(), 11)"
    dying = worker(once)
    try:
        for _ in range(2):
            assert dying.ask(PLAIN) == ["ended by signal 11"]
    finally:
        dying.close()


def test_a_process_that_hangs_is_seen_and_replaced() -> None:
    hanging = worker("import time; time.sleep(1000)", 0.1)
    try:
        for _ in range(2):
            assert hanging.ask(PLAIN) == ["no answer after 0 s"]
    finally:
        hanging.close()


def test_findings_are_passed_on() -> None:
    answering = worker("import sys\nfor line in sys.stdin:\n    print('[\"wrong\"]', flush=True)")
    try:
        assert answering.ask(PLAIN) == ["wrong"]
    finally:
        answering.close()
