"""The number of threads that compute beside other processes (native/api/crew.cpp), on a simulated machine."""

from __future__ import annotations

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


def test_operations_of_one_thread_are_no_reason_to_leave() -> None:
    """A model may have operations that one thread computes while the others wait."""
    crew, sizes = Crew(4), []
    for _ in range(2_000):
        sizes.append(crew.size)
        wall = 20.0 + 40.0 / crew.size
        crew.worked(wall, 20.0 * (crew.size - 1))
    assert sizes.count(4) >= 0.98 * len(sizes)


def test_the_first_steps_are_no_reason_to_leave() -> None:
    """They pack weights and touch memory for the first time."""
    crew = Crew(2)
    crew.worked(800.0, 400.0, n_tokens=40)
    run(crew, 2, 30.0, 100)
    assert set(run(crew, 2, 30.0, 2_000)) == {2}


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
