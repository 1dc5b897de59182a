"""Marked strings equal plain strings in every operation, and every character keeps its mark."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.chat.marked import Marked, is_marked, mask_of, merge, ours, theirs

# capital letters are the user's: so the right mask can be read from the text itself
TEXT = st.text(alphabet="ab \t\n.AB<|>", max_size=12)
PIECE = st.text(alphabet="ab \n.AB", min_size=1, max_size=2)


def capitals(text: str) -> Marked:
    return Marked(text, bytes(char in "AB" for char in text))


def check(result: Any, plain: Any) -> None:
    """The same value as of plain strings, and the marks of capitals."""
    if isinstance(plain, (list, tuple)):
        assert type(result) is type(plain)
        assert len(result) == len(plain)
        for one, other in zip(result, plain, strict=True):
            check(one, other)
    else:
        assert str.__str__(result) == plain
        assert mask_of(result) == capitals(plain).mask


CALLS: list[tuple[str, Any]] = [
    ("strip", ()), ("lstrip", ()), ("rstrip", ()), ("strip", ("ab",)), ("split", ()), ("split", (None, 1)),
    ("splitlines", ()), ("splitlines", (True,)), ("center", (17,)), ("ljust", (15,)), ("rjust", (16, ".")),
]  # fmt: skip


@given(TEXT, st.sampled_from(CALLS))
def test_methods(text: str, call: tuple[str, Any]) -> None:
    name, args = call
    check(getattr(capitals(text), name)(*args), getattr(text, name)(*args))


@given(
    TEXT,
    PIECE,
    st.sampled_from(["split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"]),
)
def test_methods_of_a_piece(text: str, piece: str, name: str) -> None:
    check(getattr(capitals(text), name)(piece), getattr(text, name)(piece))


@given(TEXT, PIECE, TEXT, st.integers(-1, 3))
def test_replace(text: str, old: str, new: str, count: int) -> None:
    check(capitals(text).replace(old, capitals(new), count), text.replace(old, new, count))


@given(TEXT, PIECE, st.integers(-1, 3))
def test_splits_with_a_limit(text: str, piece: str, limit: int) -> None:
    check(capitals(text).split(piece, limit), text.split(piece, limit))
    check(capitals(text).rsplit(piece, limit), text.rsplit(piece, limit))


@given(TEXT, TEXT, st.lists(TEXT))
def test_joining(one: str, other: str, more: list[str]) -> None:
    check(capitals(one) + capitals(other), one + other)
    check(ours(one.lower()) + capitals(other), one.lower() + other)
    check(one.lower() + capitals(other), one.lower() + other)
    check(capitals(one) * 3, one * 3)
    check(3 * capitals(one), 3 * one)
    check(capitals(one).join(map(capitals, more)), one.join(more))
    check(merge(map(capitals, more)), "".join(more))


@given(TEXT, st.slices(12))
def test_slices_and_characters(text: str, cut: slice) -> None:
    check(capitals(text)[cut], text[cut])
    check(list(capitals(text)), list(text))
    check(list(reversed(capitals(text))), list(reversed(text)))
    assert str(capitals(text)) is not text
    assert isinstance(str(capitals(text)), Marked)


@given(
    TEXT,
    st.sampled_from(["upper", "lower", "title", "capitalize", "swapcase", "expandtabs", "zfill", "rsplit"]),
)
def test_what_may_move_characters_never_loses_a_mark(text: str, name: str) -> None:
    args = (14,) if name == "zfill" else ()
    result, plain = getattr(capitals(text), name)(*args), getattr(text, name)(*args)
    assert result == plain
    pieces = result if isinstance(result, list) else [result]
    assert any(map(is_marked, pieces)) == is_marked(capitals(text))
    assert theirs("ß").upper().mask == b"\1\1"
    assert ours("ß").upper().mask == b"\0\0"


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError):
        theirs("a") + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        theirs("a").join([1])  # type: ignore[list-item]


def test_they_are_strings() -> None:
    assert {theirs("a"): 1}["a"] == 1
    assert theirs("a") == "a"
    assert not is_marked("a")
    assert not is_marked(ours("a"))
    assert is_marked(merge(["a", theirs("b")]))
