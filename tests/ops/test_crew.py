"""The number of threads that compute beside other processes (native/api/crew.cpp), on a simulated machine."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.lab import Crew

pytestmark = pytest.mark.laboratory


def step(crew: Crew, free: int, work: float, n_tokens: int = 1) -> float:
    """A step on `free` cores: a thread that has none of its own halves the speed of all. Returns its time."""
    taken = crew.size > free
    wall = work / crew.size * (2.5 if taken else 1)
    crew.worked(wall, 0.5 * wall * (crew.size - 1) if taken else 0.0, n_tokens)
    return wall


def run(crew: Crew, free: int, work: float, milliseconds: float) -> list[int]:
    """The sizes of the steps in this time."""
    end, sizes = crew.time + milliseconds, []
    while crew.time < end:
        sizes.append(crew.size)
        step(crew, free, work)
    return sizes


@pytest.mark.parametrize("most", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("work", [3.0, 30.0, 4000.0])
def test_a_quiet_machine_uses_all(most: int, work: float) -> None:
    assert set(run(Crew(most), most, work, 20_000)) == {most}


@pytest.mark.parametrize(("most", "free"), [(2, 1), (4, 3), (8, 7), (8, 5), (4, 2)])
@pytest.mark.parametrize("work", [2.0, 30.0, 200.0])
def test_cores_that_others_take_are_left(most: int, free: int, work: float) -> None:
    crew = Crew(most)
    run(crew, free, work, 4_000)
    sizes = run(crew, free, work, 20_000)
    assert sizes.count(free) >= 0.94 * len(sizes)  # the others are tries
    assert max(sizes) <= free + 1


@pytest.mark.parametrize(("most", "free"), [(2, 1), (8, 5)])
def test_free_cores_are_taken_again(most: int, free: int) -> None:
    crew = Crew(most)
    run(crew, free, 30.0, 20_000)
    run(crew, most, 30.0, 10_000)
    assert set(run(crew, most, 30.0, 10_000)) == {most}


def with_waits(crew: Crew, work: float, busy: bool = False) -> float:
    """A step of a model that has operations of one thread, for which the others wait."""
    wall = work * (0.3 + 0.7 / crew.size) * (2.5 if busy and crew.size > 1 else 1)
    crew.worked(wall, 0.3 * work * (crew.size - 1), 512)
    return wall


@pytest.mark.parametrize("most", [2, 8, 32])
@pytest.mark.parametrize("work", [5.0, 60.0, 2000.0])
def test_operations_of_one_thread_are_no_reason_to_leave(most: int, work: float) -> None:
    """They come after other processes have taken cores, too."""
    crew = Crew(most)
    while crew.time < 5_000:
        with_waits(crew, work, busy=True)
    quiet = crew.time + 60_000 + 200 * work
    while crew.time < quiet:
        with_waits(crew, work)
    total = sum(with_waits(crew, work) for _ in range(2_000))
    assert total <= 1.1 * 2_000 * work * (0.3 + 0.7 / most)


def test_prompts_and_decoding_in_turn_are_judged_apart() -> None:
    crew, sizes = Crew(2), []
    while crew.time < 60_000:
        sizes.append(crew.size)
        for work, n_tokens in ((24.0, 3), (24.0, 3), (300.0, 512)):
            step(crew, 1, work, n_tokens)
    assert sizes.count(1) >= 0.8 * len(sizes)


@pytest.mark.parametrize("n_tokens", [1, 40, 512])
def test_the_first_steps_are_no_reason_to_leave(n_tokens: int) -> None:
    """They pack weights and touch memory for the first time."""
    crew = Crew(2)
    crew.worked(800.0, 400.0, n_tokens)
    run(crew, 2, 30.0, 1_000)
    assert set(run(crew, 2, 30.0, 2_000)) == {2}


@pytest.mark.parametrize("sizes", [(1, 2, 5, 8, 16), (1, 512), (3, 3, 3, 512), (40, 41, 300)])
@pytest.mark.parametrize(("most", "free"), [(2, 1), (4, 3), (8, 7)])
def test_batches_of_many_sizes(most: int, free: int, sizes: tuple[int, ...]) -> None:
    crew, drawn, at_free = Crew(most), random.Random(3), 0.0
    while crew.time < 120_000:
        n_tokens, size = drawn.choice(sizes), crew.size
        wall = step(crew, free, 10.0 + 1.2 * n_tokens, n_tokens)
        at_free += wall if size <= free else 0
    assert at_free >= 0.8 * crew.time


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0, 5e4), st.floats(0, 2), st.integers(1, 512)), max_size=200),
)
def test_sizes_stay_in_range(most: int, steps: list[tuple[float, float, int]]) -> None:
    crew = Crew(most)
    for wall, share, n_tokens in steps:
        crew.worked(wall, wall * share * most, n_tokens)
        assert 1 <= crew.size <= most
