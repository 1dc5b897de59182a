"""Host memory in front of a store: beside a naive model, and in front of a store that is away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo import LLM, KVStore, SamplingParams
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import StoreError
from pyvelo.store.base import RecordName
from pyvelo.store.guard import GuardedStore
from pyvelo.store.host import HostTier
from pyvelo.store.record import Address, Codec

from .test_guard import Shaky
from .test_record import address

NAMES = [RecordName(bytes([number % 2]) * 16, bytes([number]) * 32) for number in range(6)]


@dataclass(frozen=True)
class Head:
    """Address with nothing but a header."""

    data: bytes
    name: RecordName = NAMES[0]
    n_bytes: None = None
    is_kept: bool = False

    def head(self) -> bytes:
        return self.data


STEP = st.tuples(
    st.sampled_from(["put", "put", "get", "discard", "touch", "purge", "limit"]),
    st.sampled_from(NAMES),
    st.sampled_from([b"one", b"two"]),
    st.integers(0, 12),
)


@given(steps=st.lists(STEP, max_size=60), room=st.integers(0, 30))
def test_operations_in_any_order(steps: list[tuple[str, RecordName, bytes, int]], room: int) -> None:
    tier = HostTier()
    tier.limit(room)
    model: list[tuple[RecordName, bytes, bytes]] = []  # the last one was used last

    def found(name: RecordName, head: bytes) -> list[tuple[RecordName, bytes, bytes]]:
        return [each for each in model if each[:2] == (name, head)]

    for kind, name, head, size in steps:
        mine = [each for each in model if each[0] == name]
        if kind == "put":
            tier.put(name, Head(head), bytes(size), tier.n_purges(name))
            model = [each for each in model if each[0] != name]
            model += [(name, head, bytes(size))] if size <= room else []
            while sum(len(data) for *_, data in model) > room:
                del model[0]
        elif kind == "get":
            there = found(name, head)
            assert tier.get(name, Head(head)) == (there[0][2] if there else None)
            model = [each for each in model if each not in there] + there
        elif kind == "discard":
            tier.discard(name)
            model = [each for each in model if each[0] != name]
        elif kind == "touch":
            tier.touch([name, NAMES[0]])
            for other in (NAMES[0], name):
                used = [each for each in model if each[0] == other]
                model = [each for each in model if each[0] != other] + used
        elif kind == "limit":
            tier.limit(room := size)
            while sum(len(data) for *_, data in model) > room:
                del model[0]
        elif mine:
            tier.purge(name.owner)
            model = [each for each in model if each[0].owner != name.owner]
        assert tier.n_bytes == sum(len(data) for *_, data in model) <= room
        assert len(tier) == len(model)
        assert [tier.has(each, Head(head)) for each in NAMES] == [bool(found(each, head)) for each in NAMES]


@pytest.fixture
def shaky() -> Shaky:
    return Shaky()


@pytest.fixture
def store(shaky: Shaky) -> Iterator[GuardedStore]:
    store = GuardedStore(lambda: shaky, "shaky", Codec())
    store.limit_host(1 << 20)
    yield store
    store.close()


def payload_of(block: Address) -> bytes:
    return bytes(block.n_bytes)


def test_saved_and_loaded_blocks_are_hits_while_the_store_is_away(store: GuardedStore, shaky: Shaky) -> None:
    one, two = address(), replace_hash(address(), b"2")
    store.save(one, payload_of(one))
    other = GuardedStore(lambda: shaky, "shaky", Codec())
    other.save(two, payload_of(two))
    assert store.load(two) == payload_of(two)
    n_calls = shaky.n_calls
    assert store.lookup([one, two]) == [True, True]
    assert (store.load(one), store.load(two)) == (payload_of(one), payload_of(two))
    assert shaky.n_calls == n_calls
    assert (store.counts.n_host, store.counts.n_loaded) == (2, 1)

    shaky.trouble = fail
    third = replace_hash(address(), b"3")
    assert store.lookup([third, one]) == [False, True]
    assert not store.is_away
    assert store.load(third) is None
    assert store.load(one) == payload_of(one)
    store.save(third, payload_of(third))  # the store loses it
    assert store.load(third) == payload_of(third)
    other.close()


def test_what_is_purged_does_not_return(shaky: Shaky) -> None:
    one, two = address(), replace_hash(address(), b"2")

    class Purging(Codec):
        """A purge comes while a record is unpacked or packed."""

        def unpack(self, address: Any, record: bytes) -> bytes:
            store.purge(None)
            return super().unpack(address, record)

        def pack(self, address: Any, payload: bytes) -> bytes:
            store.purge(None)
            return super().pack(address, payload)

    shaky.save(Codec().name(one), Codec().pack(one, payload_of(one)))
    store = GuardedStore(lambda: shaky, "shaky", Purging())
    store.limit_host(1 << 20)
    assert store.load(one) == payload_of(one)
    shaky.records.clear()
    before = store.n_purges(two)
    assert not store.insist(two, payload_of(two), before)
    assert not store.insist(two, payload_of(two)), "the purge came after the call had begun"
    assert store.lookup([one, two]) == [False, False]
    assert not shaky.records
    store.close()


def test_what_is_deleted_or_purged_is_gone(store: GuardedStore, shaky: Shaky) -> None:
    one, two = address(), replace_hash(address(), b"2")
    for block in (one, two):
        store.save(block, payload_of(block))
    store.delete(one)
    assert store.lookup([one, two]) == [False, True]
    shaky.trouble = fail
    with pytest.raises(StoreError):
        store.purge(None)
    assert store.lookup([two]) == [False]


def test_an_equal_name_of_another_block_is_no_hit(store: GuardedStore) -> None:
    one = address()
    store.save(one, payload_of(one))
    other = one._replace(parent=bytes(32), tokens=bytes(len(one.tokens)))
    assert other.name == one.name
    assert store.load(other) is None


def test_the_memory_is_bounded(shaky: Shaky) -> None:
    one, two = address(), replace_hash(address(), b"2")
    store = GuardedStore(lambda: shaky, "shaky", Codec())
    store.limit_host(one.n_bytes)
    for block in (one, two):
        store.save(block, payload_of(block))
    shaky.trouble = fail
    assert store.lookup([two, one]) == [True, False]
    store.close()
    assert store.load(two) is None


def replace_hash(block: Address, digit: bytes) -> Address:
    return block._replace(block_hash=digit * 32)


def fail() -> None:
    raise OSError("gone")


def test_stats_tell_the_tiers_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is too small for two prompts; memory in front of the store keeps both."""
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda *_: 5.0)
    prompts = [[10 + number] * 320 for number in range(3)]
    params = SamplingParams(max_tokens=1, temperature=0)
    settings = KVStore(tmp_path)
    size: dict[str, Any] = {"n_ctx": 512, "kv_cache_bytes": 512 * 2048}
    with LLM(DEMO_MODEL, kv_store=settings, **size) as llm:
        block_bytes, block_size = llm.stats().block_bytes, llm.stats().block_size
    size["kv_cache_bytes"] = block_bytes * (512 // block_size + 2)
    with LLM(DEMO_MODEL, kv_store=settings, swap_bytes=1 << 30, **size) as llm:
        assert llm._engine.persistence is not None
        assert llm._engine.persistence.identity
        texts = []
        for prompt in prompts:
            texts.append(llm.generate([prompt], params)[0].token_ids)
            assert llm._engine.persistence.flush(30)  # before other prompts evict its blocks
        again = llm.generate([prompts[0]], params)[0]
        assert again.token_ids == texts[0]
        stats = llm.stats()
        assert stats.host_loaded_tokens == stats.loaded_tokens >= 256
    with LLM(DEMO_MODEL, kv_store=settings, swap_bytes=1 << 30, **size) as llm:
        assert llm._engine.persistence is not None
        assert llm._engine.persistence.identity
        assert llm.generate([prompts[1]], params)[0].token_ids == texts[1]
        assert llm.stats().loaded_tokens >= 256
        assert llm.stats().host_loaded_tokens == 0


def test_preempted_sequences_and_blocks_share_the_memory(tmp_path: Path) -> None:
    """A pool of 20 blocks for five answers of up to 10: swapping out leaves less for the store's blocks."""
    with LLM(DEMO_MODEL, n_ctx=512) as llm:
        block_bytes, block_size = llm.stats().block_bytes, llm.stats().block_size
    swap_bytes = 60 * block_bytes
    size: dict[str, Any] = {"n_ctx": 512, "kv_cache_bytes": 20 * block_bytes, "swap_bytes": swap_bytes}
    with LLM(DEMO_MODEL, kv_store=KVStore(tmp_path, min_blocks=1), **size) as llm:
        persistence, swap = llm._engine.persistence, llm._engine.core.manager.swap
        assert persistence is not None
        assert persistence.identity
        tier, most = persistence.store._host, [0]
        grown = swap.on_growth

        def note(n_written: int) -> None:
            grown(n_written)
            most[0] = n_written
            assert tier.n_bytes <= swap_bytes - n_written * block_bytes

        swap.on_growth = note
        for number in range(12):
            llm.generate([[20 + number] * 8 * block_size], SamplingParams(max_tokens=1, temperature=0))
            assert persistence.flush(30)
        assert tier.n_bytes > 40 * block_bytes
        params = SamplingParams(max_tokens=8 * block_size, temperature=0, ignore_eos=True)
        llm.generate([[40 + number] * 40 for number in range(5)], params)
        stats = llm.stats()
        assert stats.swaps > 0
        assert most[0] > 0
        assert tier.n_bytes <= swap_bytes - most[0] * block_bytes
