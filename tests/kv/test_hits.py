"""Reported prefixes against `hit_blocks`, after any operations, with windows and with recurrent states."""

from __future__ import annotations

import os
from array import array
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from pyvelo.kv.adopt import AdoptingManager
from pyvelo.kv.prefix import FULL, BlockHashes, Prefix, Window

from .naive_groups import BLOCK, NaivePrefixes
from .test_manager import ended, hashes, started
from .test_manager_machine import ManagerMachine
from .test_states_machine import LAYOUTS, NEEDS, OPERATIONS, StatesMachine, is_any_alive

EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))


def key_of(prefix: Prefix) -> tuple[bytes, tuple[int, ...]]:
    """Return the salt and all tokens of a prefix."""
    data = b""
    while prefix.parent is not None:
        data, prefix = prefix.tokens + data, prefix.parent
    return prefix.hash, tuple(array("i", data))


def check(manager: AdoptingManager, there: NaivePrefixes) -> None:
    """Compare: the report has exactly the prefixes that a sequence can continue after."""
    held = manager.held_hashes((), 1000)
    if manager.index is None:
        assert held == []
        return
    hits = {
        (salt, tokens)
        for salt, tokens in there.entries
        if manager.hit_blocks(BlockHashes(array("i", tokens), BLOCK, salt), len(tokens) // BLOCK) * BLOCK
        == len(tokens)
    }
    assert {key_of(manager.index.by_hash[name]) for name in held} == hits
    assert manager.held_hashes(reversed(held), 1000) == held[::-1]


class HitsMachine(ManagerMachine):
    @invariant()
    def reports_agree(self) -> None:
        check(self.manager, self.there)


TestHitsMachine = HitsMachine.TestCase
TestHitsMachine.settings = settings(max_examples=int(60 * EFFORT), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("part", range(2))
def test_recurrent_states(part: int) -> None:
    for seed in range(part * 10_000_000, part * 10_000_000 + int(40 * EFFORT)):
        rng, machine = Random(seed), StatesMachine()
        layout, n_blocks = rng.choice(LAYOUTS), rng.randint(4, 14)
        machine.start(n_blocks, layout, rng.choice((3, BLOCK, 5 * BLOCK)), True, 4, rng.randint(1, 3), False)
        weights = [weight for weight, _ in OPERATIONS.values()]
        for name in rng.choices(list(OPERATIONS), weights, k=60):
            if NEEDS.get(name, is_any_alive)(machine):
                OPERATIONS[name][1](machine, rng)
            check(machine.manager, machine.there)


def test_a_prefix_whose_window_was_evicted_is_in_no_report() -> None:
    manager = AdoptingManager(12, BLOCK, windows=(FULL, Window(BLOCK)))
    text = range(4 * BLOCK)
    ended(manager, text)
    assert len(manager.held_hashes((), 9)) == 4
    manager.free(started(manager, 3 * BLOCK, [60] * 3 * BLOCK))  # evicts what the window has left first
    of_text = [hashes(text).block_hash(n) for n in range(4)]
    held = set(manager.held_hashes(of_text, 4))
    assert of_text[3] in held
    assert len(held) < 4
    for n, name in enumerate(of_text, 1):
        assert (name in held) == (manager.hit_blocks(hashes(text), n) == n)
