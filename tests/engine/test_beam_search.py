"""The choice of beams, against one that sorts all candidates."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from pyvelo import BeamSearchParams, TokenLogprob
from pyvelo.beam_search import _Answer, _choose, _Search

LOGPROBS = st.lists(st.integers(-40, -1), min_size=1, max_size=12).map(
    lambda found: sorted(found, reverse=True)
)


def search_of(totals: list[float], length: int, n_most: int) -> _Search:
    beams = [_Answer(total, (TokenLogprob(0, total),) * length) for total in totals]
    return _Search(cast(Any, "prompt"), (1,), n_most, [], beams)


@given(
    given_=st.lists(st.tuples(st.integers(-30, -1), LOGPROBS), min_size=1, max_size=5),
    width=st.integers(1, 6),
    length=st.integers(1, 3),
    stops=st.sets(st.integers(0, 11), max_size=3),
)
def test_the_best_are_chosen(
    given_: list[tuple[int, list[int]]], width: int, length: int, stops: set[int]
) -> None:
    search = search_of([float(total) for total, _ in given_], length, n_most=3 + 1)
    nearest = [tuple((token, float(value)) for token, value in enumerate(found)) for _, found in given_]
    params = BeamSearchParams(beam_width=width, stop_token_ids=stops, length_penalty=0.0)
    steps = _choose(search, nearest, params, lambda token: token == 11)
    found = sorted(
        ((total + value, number, token) for number, (total, values) in enumerate(given_)
         for token, value in enumerate(values)),
        key=lambda each: (-each[0], *each[1:]),
    )  # fmt: skip
    going = [each for each in found if each[2] not in stops | {11} and length < 3]
    last = found.index(going[width - 1]) if len(going) >= width else len(found)
    ended = [each for each in found[:last] if each not in going][:width]
    assert [answer.logprob for answer in search.ended] == [each[0] for each in ended]
    reasons = [answer.stop_reason for answer in search.ended]
    stopped = [each[2] if each[2] in stops and each[2] != 11 else None for each in ended]
    assert reasons == stopped
    chosen = [(step.answer.logprob, step.parent, step.answer.tokens[-1].token_id) for step in steps]
    assert chosen in (going[:width], [])  # none where the ended ones cannot be improved on
    assert chosen or not going or len(search.ended) == width


def test_the_work_grows_with_the_width_and_not_with_its_square() -> None:
    width, seen = 100, []
    for n_most in (2, 9):
        search = search_of([-1.0] * width, 1, n_most)
        nearest = [tuple((token, -1.0 - token) for token in range(width + 8))] * width
        _choose(search, nearest, BeamSearchParams(beam_width=width), lambda token: bool(seen.append(token)))
        assert len(seen) <= 2 * width
        seen.clear()
