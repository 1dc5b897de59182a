"""Text that comes in pieces equals the text of all bytes together, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyvelo.engine.request import Detokenizer, StopFilter

cuts = st.lists(st.integers(0, 200), max_size=30)


T = TypeVar("T", bytes, str)


def cut(whole: T, places: Sequence[int]) -> list[T]:
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


def stream(pieces: Sequence[bytes], stops: Sequence[str] = ()) -> list[str]:
    detokenizer = Detokenizer(lambda token: pieces[token], stops)
    shown = []
    for token in range(len(pieces)):
        shown.append(detokenizer.push(token))
        if detokenizer.stop is not None:
            return shown
    return [*shown, detokenizer.finish()]


@settings(deadline=None)
@given(st.text(max_size=40), cuts)
def test_characters_are_never_split(text: str, places: list[int]) -> None:
    shown = stream(cut(text.encode(), places))
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=40), cuts)
@example(b"\xf0\x9f\x98", [1, 2])
@example(b"\xe2\x82A\xc3", [1, 2])
@example(b"\xed\xa0\x80", [1, 2])
@example(b"\xf4\x90\x80\x80", [1, 2, 3])
def test_invalid_bytes_become_what_python_makes_of_them(data: bytes, places: list[int]) -> None:
    assert "".join(stream(cut(data, places))) == data.decode("utf-8", "replace")


def test_a_character_is_held_until_it_is_complete() -> None:
    face = "🙂".encode()
    assert stream([b"a", face[:1], face[1:3], face[3:] + b"b"]) == ["a", "", "", "🙂b", ""]


def test_an_incomplete_character_shows_at_the_end() -> None:
    assert stream([b"a", "é".encode()[:1]]) == ["a", "", "\ufffd"]


def first_stop(text: str, stops: Sequence[str], begin: int = 0) -> str | None:
    """By character: the text before the stop string that is complete first, the longest of several; only
    those count that end behind `begin`."""
    for end in range(begin + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


few = st.text(st.sampled_from("abé"), min_size=1, max_size=5)


@settings(deadline=None, max_examples=400)
@given(
    st.text(st.sampled_from("abé"), max_size=30),
    cuts,
    st.lists(few, min_size=1, max_size=3),
    st.sampled_from([0, 0, 1, 3]),
)
def test_stop_strings_by_whatever_cut(text: str, places: list[int], stops: list[str], n_free: int) -> None:
    """Those that are complete within the first `n_free` pieces are text."""
    filtered = StopFilter(stops)
    shown = ""
    seen = ""
    begin = 0
    for number, piece in enumerate(cut(text, places)):
        shown += filtered.push(piece, number >= n_free)
        seen += piece
        begin = len(seen) if number < n_free else begin
        expected = first_stop(seen, stops, begin)
        assert (filtered.stop is not None) == (expected is not None)
        if expected is not None:
            assert shown == expected
            assert seen.startswith(f"{shown}{filtered.stop}")
            assert filtered.push("more") + filtered.flush() == ""
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops), "held only where a stop may begin"
    assert shown + filtered.flush() == text


def test_the_beginning_of_a_stop_string_is_never_shown() -> None:
    pieces = [b"Hello", b" <", b"|e", b"nd", b"|", b"> tail"]
    assert stream(pieces, ["<|end|>"]) == ["Hello", " ", "", "", "", ""]


def test_a_stop_string_that_does_not_come_is_shown_after_all() -> None:
    assert stream([b"a<", b"|en", b"!", b"<|"], ["<|end|>"]) == ["a", "", "<|en!", "", "<|"]


def test_a_stop_string_spanning_a_split_character() -> None:
    e = "é".encode()
    assert stream([b"x", e[:1], e[1:], b"y"], ["éy"]) == ["x", "", "", ""]


@pytest.mark.parametrize(
    ("stops", "expected", "met"),
    [
        (["abc", "b"], "a", "b"),
        (["b", "ab"], "", "ab"),
        (["c", "abc"], "", "abc"),
        (["z"], None, None),
    ],
)
def test_which_stop_string_counts(stops: list[str], expected: str | None, met: str | None) -> None:
    for pieces in (["abc"], ["a", "b", "c"], ["ab", "c"]):
        filtered = StopFilter(stops)
        shown = "".join(map(filtered.push, pieces))
        assert filtered.stop == met
        assert (shown if filtered.stop else None) == expected
