"""Changes of the feed against the naive models of the manager: a consumer knows exactly what can hit."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from pyvelo.events.feed import Feed
from pyvelo.events.wire import events_of
from pyvelo.kv.adopt import AdoptingManager
from pyvelo.kv.prefix import FULL, BlockHashes, Window
from pyvelo.kv.records import Event
from tests.kv.naive_groups import BLOCK, NaivePrefixes
from tests.kv.test_manager_machine import ManagerMachine
from tests.kv.test_states_machine import LAYOUTS as LAYOUTS_OF_STATES
from tests.kv.test_states_machine import NEEDS, OPERATIONS, StatesMachine, is_any_alive

from .naive import Consumer

EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))


def split(extra: bytes) -> tuple[str | None, bytes]:
    """Return an adapter and a salt: the machines have salts alone."""
    return None, extra


def what_can_hit(there: NaivePrefixes) -> set[tuple[bool, tuple[int, ...]]]:
    """Return the prefixes that can hit, and all beginnings of them; whether they have a salt, and tokens."""
    found = set()
    for salt, tokens in there.entries:
        if there.hits([*tokens, 0], salt).n_blocks * BLOCK == len(tokens):
            for end in range(BLOCK, len(tokens) + 1, BLOCK):
                found.add((bool(salt), tokens[:end]))
    return found


class Watched:
    """Feed of a machine's manager, and a consumer of its changes."""

    manager: AdoptingManager
    there: NaivePrefixes
    events: list[Event]

    def watch(self) -> None:
        self.consumer, self.n_looks = Consumer(), 0
        index = self.manager.index
        self.feed = None if index is None else Feed(index, self.manager.layout, split)
        self.manager.set_observer(self.observe)

    def observe(self, event: Event) -> None:
        self.events.append(event)
        if self.feed is not None:
            self.feed.observe(event)

    def look(self) -> None:
        """Compare, but not after each operation: changes add up."""
        self.n_looks += 1
        if self.n_looks % 3 == 0 or self.feed is None:
            return
        had_changes, before = self.feed.has_changes, dict(self.consumer.keys)
        changes = self.feed.take()
        assert had_changes or changes is None, "what cancels out is no change"
        if changes is not None:
            for event in events_of(changes, BLOCK):
                self.consumer.apply(event)
            assert self.consumer.keys != before
            assert changes.clears == (
                bool(changes.removed) and len(changes.stored) == len(self.consumer.keys)
            )
        assert {(key.salt is not None, key.tokens) for key in self.consumer.prefixes()} == what_can_hit(
            self.there
        )
        assert not self.feed.has_changes
        assert self.feed.take() is None


class FeedMachine(Watched, ManagerMachine):
    def begin(self, *args: Any, **others: Any) -> None:
        super().begin(*args, **others)
        self.watch()

    @invariant()
    def consumer_agrees(self) -> None:
        self.look()


class StatesFeedMachine(Watched, StatesMachine):
    def begin(self, *args: Any, **others: Any) -> None:
        super().begin(*args, **others)
        self.watch()


TestFeedMachine = FeedMachine.TestCase
TestFeedMachine.settings = settings(max_examples=int(60 * EFFORT), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("part", range(2))
def test_recurrent_states(part: int) -> None:
    for number in range(int(60 * EFFORT)):
        live(part * 10_000_000 + number)


def live(seed: int, n_operations: int = 60) -> None:
    """Do what the seed chooses with a manager of snapshots; compare after each operation."""
    rng, machine = Random(seed), StatesFeedMachine()
    layout, n_blocks = rng.choice(LAYOUTS_OF_STATES), rng.randint(4, 14)
    machine.start(n_blocks, layout, rng.choice((3, BLOCK, 5 * BLOCK)), True, 4, rng.randint(1, 3), False)
    weights = [weight for weight, _ in OPERATIONS.values()]
    for name in rng.choices(list(OPERATIONS), weights, k=n_operations):
        if NEEDS.get(name, is_any_alive)(machine):
            OPERATIONS[name][1](machine, rng)
        machine.look()


# ---- by hand ----


class Bench:
    """Manager whose prompts are computed at once, and a consumer of its feed."""

    def __init__(self, n_blocks: int, windows: Sequence[Window] = (FULL,)) -> None:
        self.manager = AdoptingManager(n_blocks, BLOCK, windows=windows, max_chunk=BLOCK)
        assert self.manager.index is not None
        self.feed = Feed(self.manager.index, self.manager.layout, split)
        self.manager.set_observer(self.feed.observe)
        self.consumer = Consumer()

    def compute(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Compute a prompt in chunks of a block, and free its table."""
        hashes = BlockHashes(array("i", tokens), BLOCK, salt)
        plan = self.manager.plan()
        outcome: Any = plan.start(len(tokens), hashes)
        table = outcome.table
        assert plan.grow(table, min(len(tokens), table.n_tokens + BLOCK))
        self.manager.commit(plan)
        self.manager.advance(table, min(len(tokens), table.n_tokens + BLOCK))
        while table.n_tokens < len(tokens):
            plan = self.manager.plan()
            end = min(len(tokens), table.n_tokens + BLOCK)
            assert plan.grow(table, end)
            self.manager.commit(plan)
            self.manager.advance(table, end)
        self.manager.free(table)

    def take(self) -> list[dict[str, Any]]:
        changes = self.feed.take()
        events = [] if changes is None else list(events_of(changes, BLOCK))
        for event in events:
            self.consumer.apply(event)
        return events


def test_a_prompt_is_one_event_and_its_eviction_another() -> None:
    bench = Bench(4)
    bench.compute(range(3 * BLOCK + 2))
    [stored] = bench.take()
    assert stored["token_ids"] == list(range(3 * BLOCK))
    assert (stored["parent_block_hash"], stored["medium"], stored["lora_name"]) == (None, "GPU", None)
    assert stored["extra_keys"] == [None] * 3
    bench.compute([7] * 2 * BLOCK)
    removed, other = bench.take()
    assert removed == {"type": "BlockRemoved", "block_hashes": stored["block_hashes"][2:], "medium": "GPU"}
    assert len(other["block_hashes"]) == 2


def test_prompts_that_begin_alike_have_an_event_each() -> None:
    bench = Bench(20)
    bench.compute([1] * 3 * BLOCK)
    bench.compute([1] * BLOCK + [2] * 2 * BLOCK)
    one, two = bench.take()
    assert len(one["block_hashes"]) == 3
    assert (len(two["block_hashes"]), two["parent_block_hash"]) == (2, one["block_hashes"][0])


def test_what_is_evicted_and_computed_again_in_a_step_is_no_event() -> None:
    bench = Bench(3)
    prompt = [5] * 2 * BLOCK
    bench.compute(prompt)
    assert bench.take()
    bench.compute([6] * 3 * BLOCK)
    bench.compute(prompt)
    [other] = bench.take()
    assert other["token_ids"] == [6] * BLOCK, "the first block of the prompt between"
    assert bench.consumer.hit(prompt) == 2


def test_a_reset_removes_all_and_says_so() -> None:
    bench = Bench(8)
    bench.compute([1] * 2 * BLOCK)
    bench.compute([2] * 2 * BLOCK)
    stored = [number for event in bench.take() for number in event["block_hashes"]]
    bench.manager.reset()
    removed, cleared = bench.take()
    assert sorted(removed["block_hashes"]) == sorted(stored)
    assert cleared == {"type": "AllBlocksCleared"}


def test_hashes_are_the_same_in_each_process_without_a_salt() -> None:
    """A salt cannot be guessed from events: its key and its hashes depend on a secret of the process."""
    plain, salted = [], []
    for _ in range(2):
        bench = Bench(8)
        bench.compute([3] * 2 * BLOCK)
        bench.compute([3] * 2 * BLOCK, b"tenant")
        bench.compute([4] * 2 * BLOCK, b"tenant")
        bench.compute([3] * 2 * BLOCK, b"other")
        events = bench.take()
        plain.append(events[0]["block_hashes"])
        keys = [event["extra_keys"] for event in events]
        assert keys[0] == [None, None]
        assert keys[1] == keys[2] != keys[3]
        assert keys[1][1] is None
        [salt] = keys[1][0]
        assert salt.startswith("pyvelo-salt:")
        assert b"tenant".hex() not in salt
        assert "tenant" not in salt
        salted.append((salt, events[1]["block_hashes"]))
    assert plain[0] == plain[1]
    assert salted[0][0] != salted[1][0]
    assert not set(salted[0][1]) & set(salted[1][1])


def test_with_a_window_only_prefixes_that_can_hit_are_announced() -> None:
    """The window's early blocks are evicted first: then a shorter prompt is no hit, but the way to one."""
    bench = Bench(9, (FULL, Window(BLOCK)))
    prompt = list(range(4 * BLOCK))
    bench.compute(prompt)
    bench.take()
    assert bench.consumer.hit(prompt) == 4
    manager, hashes = bench.manager, BlockHashes(array("i", prompt), BLOCK)
    assert manager.hit_blocks(hashes, 4) == 4
    bench.compute([9] * BLOCK)
    bench.take()
    n_hit = manager.hit_blocks(hashes, 4)
    assert bench.consumer.hit(prompt) == n_hit


def test_a_long_prefix_is_looked_at_once_when_it_ends() -> None:
    """Ends of long prefixes take no time of their length squared."""
    n = 2000
    bench = Bench(n)
    bench.compute(range(n * BLOCK))
    assert len(bench.take()) == 1
    counted = 0
    enter = bench.feed._enter

    def count(prefix: Any, pending: Any) -> None:
        nonlocal counted
        before = len(pending)
        enter(prefix, pending)
        counted += len(pending) - before

    bench.feed._enter = count  # type: ignore[method-assign]
    bench.manager.clear()
    bench.take()
    assert counted == n
    assert not bench.feed._nodes


# ---- adapters ----


def test_the_blocks_of_an_unloaded_adapter_are_removed_until_it_is_loaded_again() -> None:
    bench, names = Bench(40), {b"k": "poet"}
    bench.feed._split_extra = lambda extra: (names[extra], b"") if extra in names else None
    tokens = list(range(3 * BLOCK))
    bench.compute(tokens, b"k")
    bench.take()
    assert {(key.lora, len(key.tokens)) for key in bench.consumer.prefixes()} == {
        ("poet", n * BLOCK) for n in (1, 2, 3)
    }
    for name in ("clerk", "poet"):
        names.clear()
        bench.feed.note_adapters()
        bench.take()
        assert not bench.consumer.keys
        bench.compute([*tokens, *range(2 * BLOCK)], b"k")  # by a session that goes on
        assert not bench.feed.has_changes
        names[b"k"] = name
        bench.feed.note_adapters()
        bench.take()
        assert {(key.lora, len(key.tokens)) for key in bench.consumer.prefixes()} == {
            (name, n * BLOCK) for n in (1, 2, 3, 4, 5)
        }
