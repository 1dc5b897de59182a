"""The prefix index: keys as DESIGN defines them, hits proven by tokens, heads of siblings."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.errors import InternalError
from pyvelo.kv.prefix import MOST_SIBLINGS, Chain, Head, Match, PrefixIndex, common_tokens

SIZE = 4


def chain(tokens: Sequence[int], extra: bytes = b"") -> Chain:
    return Chain(array("i", tokens), SIZE, extra)


def published(index: PrefixIndex, tokens: Sequence[int], blocks: Sequence[int], extra: bytes = b"") -> None:
    whole = chain(tokens, extra)
    for number, block in enumerate(blocks):
        assert index.publish(whole, number, block)


@given(
    tokens=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=2 * SIZE), extra=st.binary(max_size=40)
)
def test_a_key_is_the_hash_of_parent_extra_and_tokens(tokens: list[int], extra: bytes) -> None:
    parent = bytes(32)
    for number in range(len(tokens) // SIZE):
        block = struct.pack(f"<{SIZE}i", *tokens[number * SIZE : (number + 1) * SIZE])
        parent = hashlib.sha256(parent + struct.pack("<Q", len(extra)) + extra + block).digest()
        assert chain(tokens, extra).key(number) == parent


def test_keys_follow_a_sequence_that_grows() -> None:
    tokens = array("i", range(SIZE))
    growing = Chain(tokens, SIZE)
    growing.key(0)
    tokens.extend(range(SIZE, 3 * SIZE))
    assert growing.key(2) == chain(range(3 * SIZE)).key(2)
    assert growing.n_tokens == 3 * SIZE


@pytest.mark.parametrize("n_common", range(3 * SIZE + 1))
def test_a_fork_has_the_keys_of_its_own_tokens(n_common: int) -> None:
    whole = chain(range(3 * SIZE), b"mine")
    whole.key(2)
    tokens = array("i", [*range(n_common), *[99] * (3 * SIZE - n_common)])
    twin = whole.fork(tokens, n_common)
    fresh = chain(tokens, b"mine")
    assert [twin.key(number) for number in range(3)] == [fresh.key(number) for number in range(3)]


@given(a=st.lists(st.integers(0, 2), max_size=9), b=st.lists(st.integers(0, 2), max_size=9))
def test_common_tokens(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(array("i", a).tobytes(), array("i", b).tobytes()) == expected


@pytest.mark.parametrize("bit", [0, 1, 15, 30])
def test_tokens_that_differ_in_one_bit_are_not_common(bit: int) -> None:
    a, b = (array("i", [5, token, 5]).tobytes() for token in (0, 1 << bit))
    assert common_tokens(a, b) == 1
    assert common_tokens(a[4:], b[4:]) == 0
    assert common_tokens(a, array("i", [5, -(1 << 31), 5]).tobytes()) == 1


def test_whole_blocks_from_the_start_are_hits() -> None:
    index = PrefixIndex(8)
    published(index, range(12), [5, 2, 7])
    assert index.match(chain(range(12)), 12) == Match((5, 2, 7), None)
    assert index.match(chain([*range(8), 9, 9, 9, 9]), 12) == Match((5, 2), None)
    assert index.match(chain([9, *range(1, 12)]), 12) == Match((), None)


def test_the_same_tokens_elsewhere_are_no_hit() -> None:
    index = PrefixIndex(8)
    published(index, range(12), [0, 1, 2])
    assert index.match(chain(range(4, 12)), 8) == Match((), None)


def test_the_head_of_a_sibling_is_found() -> None:
    index = PrefixIndex(8)
    published(index, [0, 1, 2, 3, 4, 5, 6, 7], [3, 4])
    assert index.match(chain([0, 1, 2, 3, 4, 5, 9, 9]), 8) == Match((3,), Head(4, 2))
    assert index.match(chain([0, 1, 9]), 3) == Match((), Head(3, 2))
    assert index.match(chain(range(8)), 7) == Match((3,), Head(4, 3)), "no more than was asked for"


def test_the_longest_head_wins_and_of_equal_ones_the_newest() -> None:
    index = PrefixIndex(8)
    for block, tokens in enumerate([(1, 2, 0, 0), (1, 2, 3, 0), (1, 2, 3, 1), (1, 0, 0, 0)]):
        published(index, tokens, [block])
    assert index.match(chain([1, 2, 3, 4]), 4).head == Head(2, 3)


def test_the_newest_siblings_alone_are_looked_at() -> None:
    index = PrefixIndex(MOST_SIBLINGS + 1)
    published(index, [1, 2, 3, 0], [0])
    for block in range(1, MOST_SIBLINGS):
        published(index, [9, block, 0, 0], [block])
    assert index.match(chain([1, 2, 3, 4]), 4).head == Head(0, 3)
    published(index, [9, 0, 0, 0], [MOST_SIBLINGS])
    assert index.match(chain([1, 2, 3, 4]), 4).head is None
    assert MOST_SIBLINGS == 64


def test_another_salt_is_no_hit_and_no_head() -> None:
    index = PrefixIndex(8)
    published(index, range(8), [0, 1], b"mine")
    assert index.match(chain(range(8), b"yours"), 8) == Match((), None)
    assert index.match(chain(range(8), b"mine"), 8) == Match((0, 1), None)


def test_colliding_hashes_miss() -> None:
    """Every key the same: tokens and salt decide."""
    index = PrefixIndex(8, lambda chain, number: b"same")
    published(index, range(4), [0])
    assert not index.publish(chain(range(4, 8)), 0, 1), "the key is taken"
    assert index.match(chain(range(4, 8)), 4).blocks == ()
    assert index.match(chain(range(4), b"salt"), 4) == Match((), None)
    assert index.match(chain(range(4)), 4).blocks == (0,)


def test_what_is_forgotten_is_no_hit() -> None:
    index = PrefixIndex(8)
    published(index, range(12), [0, 1, 2])
    assert index.forget(1) is True
    assert index.forget(1) is False
    assert index.match(chain(range(12)), 12) == Match((0,), None)
    assert sorted(index.published()) == [0, 2]
    index.audit()
    published(index, range(4, 8), [1])  # as a first block
    assert index.match(chain(range(12)), 12).blocks == (0,)
    index.audit()


def test_a_match_is_kept_until_another_could_be_given() -> None:
    n_keys = 0

    def counted(chain: Chain, number: int) -> bytes:
        nonlocal n_keys
        n_keys += 1
        return chain.key(number)

    index, waiting = PrefixIndex(8, counted), chain(range(8))
    assert index.match(waiting, 8) == Match((), None)
    published(index, range(4), [0])
    assert index.match(waiting, 8) == Match((0,), None)
    assert index.match(waiting, 3) == Match((), Head(0, 3))
    assert index.match(waiting, 8) == Match((0,), None)
    before = n_keys
    assert index.match(waiting, 8) == Match((0,), None)
    assert n_keys == before, "nothing was searched"
    published(index, [9] * 4, [1])
    index.forget(0)
    assert index.match(waiting, 8) == Match((), None)


def test_a_block_is_published_once() -> None:
    index = PrefixIndex(8)
    published(index, range(4), [0])
    with pytest.raises(InternalError, match="published already"):
        index.publish(chain(range(8)), 1, 0)
    assert index.publish(chain(range(4)), 0, 1) is False, "another block is the hit"
    assert index.tokens(0) is not None
    assert index.tokens(1) is None


def test_audit_sees_tables_that_disagree() -> None:
    index = PrefixIndex(8)
    published(index, range(8), [0, 1])
    index._children.clear()
    with pytest.raises(InternalError, match="parents do not agree"):
        index.audit()
    index._blocks.clear()
    with pytest.raises(InternalError, match="keys and blocks do not agree"):
        index.audit()
