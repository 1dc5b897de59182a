"""The prefix index: block hashes, hits proven by tokens, partial hits among siblings."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.errors import InternalError
from pyvelo.kv.checks import audit_prefixes
from pyvelo.kv.partial import MAX_SIBLINGS, PartialHit, common_tokens
from pyvelo.kv.prefix import BlockHashes, BlockLayout, PrefixIndex

SIZE = 4
LAYOUT = BlockLayout(SIZE)


def hashes(tokens: Sequence[int], extra: bytes = b"") -> BlockHashes:
    return BlockHashes(array("i", tokens), SIZE, extra)


def published(index: PrefixIndex, tokens: Sequence[int], blocks: Sequence[int], extra: bytes = b"") -> None:
    whole, before = hashes(tokens, extra), None
    for number, block in enumerate(blocks):
        before = index.publish(whole, number, [block], before)
        assert before is not None


def found(
    index: PrefixIndex, wanted: BlockHashes, n_tokens: int
) -> tuple[tuple[int, ...], PartialHit | None]:
    """Return the blocks of the hit in the only group, and the partial hit."""
    match = index.match(wanted, n_tokens)
    (blocks,) = match.groups
    assert (match.n_blocks, match.firsts, match.blocks) == (len(blocks), (0,), list(blocks))
    assert [index.blocks_like(block)[0] for block in blocks] == list(blocks)
    assert (match.prefix is None) == (not blocks)
    assert match.prefix is None or match.prefix.blocks == [index.blocks_like(blocks[-1])]
    return blocks, match.partial


@given(
    tokens=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=2 * SIZE), extra=st.binary(max_size=40)
)
def test_a_block_hash_is_computed_from_parent_extra_and_tokens(tokens: list[int], extra: bytes) -> None:
    parent = bytes(32)
    for number in range(len(tokens) // SIZE):
        block = struct.pack(f"<{SIZE}i", *tokens[number * SIZE : (number + 1) * SIZE])
        parent = hashlib.sha256(parent + struct.pack("<Q", len(extra)) + extra + block).digest()
        assert hashes(tokens, extra).block_hash(number) == parent


def test_block_hashes_follow_a_growing_sequence() -> None:
    tokens = array("i", range(SIZE))
    growing = BlockHashes(tokens, SIZE)
    growing.block_hash(0)
    tokens.extend(range(SIZE, 3 * SIZE))
    assert growing.block_hash(2) == hashes(range(3 * SIZE)).block_hash(2)
    assert growing.n_tokens == 3 * SIZE


@pytest.mark.parametrize("n_common", range(3 * SIZE + 1))
def test_a_fork_has_the_hashes_of_its_own_tokens(n_common: int) -> None:
    whole = hashes(range(3 * SIZE), b"mine")
    whole.block_hash(2)
    tokens = array("i", [*range(n_common), *[99] * (3 * SIZE - n_common)])
    twin = whole.fork(tokens, n_common)
    fresh = hashes(tokens, b"mine")
    assert [twin.block_hash(number) for number in range(3)] == [
        fresh.block_hash(number) for number in range(3)
    ]


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
    index = PrefixIndex(8, LAYOUT)
    published(index, range(12), [5, 2, 7])
    assert found(index, hashes(range(12)), 12) == ((5, 2, 7), None)
    assert found(index, hashes([*range(8), 9, 9, 9, 9]), 12) == ((5, 2), None)
    assert found(index, hashes([9, *range(1, 12)]), 12) == ((), None)


def test_the_same_tokens_elsewhere_are_no_hit() -> None:
    index = PrefixIndex(8, LAYOUT)
    published(index, range(12), [0, 1, 2])
    assert found(index, hashes(range(4, 12)), 8) == ((), None)


def test_a_partial_hit_in_a_sibling_is_found() -> None:
    index = PrefixIndex(8, LAYOUT)
    published(index, [0, 1, 2, 3, 4, 5, 6, 7], [3, 4])
    assert found(index, hashes([0, 1, 2, 3, 4, 5, 9, 9]), 8) == ((3,), PartialHit((4,), 2))
    assert found(index, hashes([0, 1, 9]), 3) == ((), PartialHit((3,), 2))
    assert found(index, hashes(range(8)), 7) == ((3,), PartialHit((4,), 3)), "no more than was asked for"


def test_the_longest_and_newest_partial_hit_wins() -> None:
    index = PrefixIndex(8, LAYOUT)
    for block, tokens in enumerate([(1, 2, 0, 0), (1, 2, 3, 0), (1, 2, 3, 1), (1, 0, 0, 0)]):
        published(index, tokens, [block])
    assert index.match(hashes([1, 2, 3, 4]), 4).partial == PartialHit((2,), 3)


def test_only_the_newest_siblings_are_compared() -> None:
    index = PrefixIndex(MAX_SIBLINGS + 1, LAYOUT)
    published(index, [1, 2, 3, 0], [0])
    for block in range(1, MAX_SIBLINGS):
        published(index, [9, block, 0, 0], [block])
    assert index.match(hashes([1, 2, 3, 4]), 4).partial == PartialHit((0,), 3)
    published(index, [9, 0, 0, 0], [MAX_SIBLINGS])
    assert index.match(hashes([1, 2, 3, 4]), 4).partial is None
    assert MAX_SIBLINGS == 64


def test_another_salt_is_no_hit() -> None:
    index = PrefixIndex(8, LAYOUT)
    published(index, range(8), [0, 1], b"mine")
    assert found(index, hashes(range(8), b"yours"), 8) == ((), None)
    assert found(index, hashes(range(8), b"mine"), 8) == ((0, 1), None)


def test_colliding_hashes_miss() -> None:
    """All hashes are equal: tokens and salt decide."""
    index = PrefixIndex(8, LAYOUT, lambda hashes, number: b"same")
    published(index, range(4), [0])
    assert not index.publish(hashes(range(4, 8)), 0, [1]), "the hash is taken"
    assert index.match(hashes(range(4, 8)), 4).blocks == []
    assert found(index, hashes(range(4), b"salt"), 4) == ((), None)
    assert index.match(hashes(range(4)), 4).blocks == [0]


def test_an_unpublished_block_is_no_hit() -> None:
    index = PrefixIndex(8, LAYOUT)
    published(index, range(12), [0, 1, 2])
    assert index.unpublish(1) is True
    assert index.unpublish(1) is False
    assert found(index, hashes(range(12)), 12) == ((0,), None)
    assert sorted(index.published()) == [0, 2]
    audit_prefixes(index)
    published(index, range(4, 8), [1])  # as a first block
    assert index.match(hashes(range(12)), 12).blocks == [0]
    audit_prefixes(index)


def test_a_prefix_stays_while_another_follows_it() -> None:
    """Its block is evicted. When its tokens are published again, the blocks behind it are hits again."""
    index, whole = PrefixIndex(8, LAYOUT), hashes(range(12))
    published(index, range(12), [0, 1, 2])
    for block in (0, 1):
        index.unpublish(block)
    assert found(index, whole, 12) == ((), None)
    assert found(index, whole, 3) == ((), None), "no partial hit without a block"
    audit_prefixes(index)
    published(index, range(8), [3, 4])
    assert found(index, whole, 12) == ((3, 4, 2), None)
    for block in (3, 4, 2):
        index.unpublish(block)
    assert (list(index.published()), index.by_hash, index._roots) == ([], {}, {})
    audit_prefixes(index)


def test_a_match_is_stored_until_the_index_changes() -> None:
    n_hashes = 0

    def counted(hashes: BlockHashes, number: int) -> bytes:
        nonlocal n_hashes
        n_hashes += 1
        return hashes.block_hash(number)

    index, waiting = PrefixIndex(8, LAYOUT, counted), hashes(range(8))
    assert found(index, waiting, 8) == ((), None)
    published(index, range(4), [0])
    assert found(index, waiting, 8) == ((0,), None)
    assert found(index, waiting, 3) == ((), PartialHit((0,), 3))
    assert found(index, waiting, 8) == ((0,), None)
    before = n_hashes
    assert found(index, waiting, 8) == ((0,), None)
    assert n_hashes == before, "nothing was searched"
    published(index, [9] * 4, [1])
    index.unpublish(0)
    assert found(index, waiting, 8) == ((), None)


def test_a_match_is_stored_for_its_own_index_only() -> None:
    waiting = hashes(range(8))
    for blocks in ([0], [5]):
        index = PrefixIndex(8, LAYOUT)
        published(index, range(4), blocks)
        assert index.match(waiting, 8).blocks == list(blocks)


def test_a_block_is_published_once() -> None:
    index = PrefixIndex(8, LAYOUT)
    published(index, range(4), [0])
    with pytest.raises(InternalError, match="published already"):
        index.publish(hashes(range(8)), 1, [0])
    assert index.publish(hashes(range(8)), 1, [1], None) is None, "nothing is published before it"
    assert index.tokens(0) is not None
    assert index.tokens(1) is None
    audit_prefixes(index)


def test_the_oldest_of_equal_blocks_is_the_hit() -> None:
    index = PrefixIndex(8, LAYOUT)
    published(index, range(8), [3, 4])
    published(index, range(8), [1, 2])
    assert sorted(index.published()) == [1, 2, 3, 4]
    assert (index.blocks_like(1), index.blocks_like(4), index.blocks_like(0)) == ((3, 1), (4, 2), ())
    assert index.n_duplicates == 2
    assert index.match(hashes(range(8)), 8).blocks == [3, 4]
    assert found(index, hashes(range(8)), 7) == ((3,), PartialHit((4,), 3))
    audit_prefixes(index)
    assert index.unpublish(3)
    assert index.match(hashes(range(8)), 8).blocks == [1, 4], "in either block the prefix is the same"
    assert index.n_duplicates == 1
    audit_prefixes(index)
    for block in (1, 4, 2):
        assert index.unpublish(block)
    assert found(index, hashes(range(8)), 8) == ((), None)
    assert (index.n_duplicates, index._roots, list(index.published())) == (0, {}, [])
    audit_prefixes(index)


def test_clear_removes_blocks_duplicates_and_stored_matches() -> None:
    index = PrefixIndex(8, LAYOUT)
    published(index, range(8), [0, 1])
    published(index, range(8), [2, 3])
    wanted = hashes(range(8))
    assert index.match(wanted, 8).blocks == [0, 1]
    index.clear()
    assert found(index, wanted, 8) == ((), None)
    assert (index.n_duplicates, index._roots, list(index.published())) == (0, {}, [])
    audit_prefixes(index)
    published(index, range(8), [1, 0])
    assert index.match(wanted, 8).blocks == [1, 0]
    audit_prefixes(index)


def parents_collide(hashes: BlockHashes, number: int) -> bytes:
    """All first blocks have the same hash, and all second blocks of equal tokens."""
    return b"first" if number == 0 else hashes.block_tokens(number)


def last_blocks_collide(hashes: BlockHashes, number: int) -> bytes:
    """Blocks of equal tokens have the same hash, in any prefix."""
    return hashes.block_tokens(number)


def test_no_hit_behind_another_parent_of_equal_tokens() -> None:
    index = PrefixIndex(8, LAYOUT, last_blocks_collide)
    published(index, [1, 1, 1, 1, 5, 5, 5, 5], [0, 1])
    published(index, [2, 2, 2, 2], [2])
    assert found(index, hashes([2, 2, 2, 2, 5, 5, 5, 5]), 8) == ((2,), None)
    assert found(index, hashes([1, 1, 1, 1, 5, 5, 5, 5]), 8) == ((0, 1), None)
    other = hashes([2, 2, 2, 2, 5, 5, 5, 5])
    assert not index.publish(other, 1, [3], index.match(other, 4).prefix), "the hash is taken"
    audit_prefixes(index)


@pytest.mark.parametrize("n_wanted", [4, 3])
def test_no_hit_below_a_parent_with_the_same_hash(n_wanted: int) -> None:
    """The parent is evicted, but keeps its hash: no other prefix becomes the parent of its child."""
    index = PrefixIndex(8, LAYOUT, parents_collide)
    published(index, [1, 1, 1, 1, 5, 5, 5, 5], [0, 1])
    index.unpublish(0)
    other = hashes([2, 2, 2, 2, 5, 5, 5, 5])
    assert index.publish(other, 0, [2]) is None, "the hash is taken"
    assert found(index, other, 4 + n_wanted) == ((), None)
    audit_prefixes(index)
    index.unpublish(1)
    published(index, [2, 2, 2, 2], [2])
    assert found(index, other, 4 + n_wanted) == ((2,), None)
    audit_prefixes(index)


def test_a_block_in_the_middle_of_its_table_is_published_below_the_block_before() -> None:
    index = PrefixIndex(8, LAYOUT)
    published(index, [1, 1, 1, 1], [0])
    published(index, [2, 2, 2, 2], [1])
    whole = hashes([2, 2, 2, 2, 3, 3, 3, 3])
    assert index.publish(whole, 1, [2], index.match(whole, 4).prefix)
    assert found(index, hashes([1, 1, 1, 1, 3, 3, 3, 3]), 8) == ((0,), None)
    assert found(index, hashes([2, 2, 2, 2, 3, 3, 3, 3]), 8) == ((1, 2), None)


def test_audit_sees_tables_that_disagree() -> None:
    def forget_children(index: PrefixIndex) -> None:
        index._roots[b""].children.clear()

    def forget_hashes(index: PrefixIndex) -> None:
        index.by_hash.clear()

    def miscount(index: PrefixIndex) -> None:
        index.n_duplicates += 1

    def rename(index: PrefixIndex) -> None:
        next(iter(index.by_hash.values())).hash = b"other"

    for harm, message in (
        (forget_children, "parents do not agree"),
        (forget_hashes, "hashes and blocks do not agree"),
        (miscount, "1 duplicates counted, 0 listed"),
        (rename, "another hash"),
    ):
        index = PrefixIndex(8, LAYOUT)
        published(index, range(8), [0, 1])
        audit_prefixes(index)
        harm(index)
        with pytest.raises(InternalError, match=message):
            audit_prefixes(index)
