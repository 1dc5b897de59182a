"""Records: what was packed, and nothing else, is unpacked."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.errors import ConfigError
from pyvelo.store.record import SNAPSHOT, Address, BadRecord, Codec, owner_of

KEY = bytes(range(32))


def digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


def address(**changes: object) -> Address:
    tokens = b"".join(number.to_bytes(4, "little") for number in range(32))
    whole = Address(digest("model"), digest("parent"), digest("block"), b"salt", tokens, 0, 100)
    return whole._replace(**changes)  # type: ignore[arg-type]


OTHERS = [
    {"fingerprint": digest("another model")},
    {"parent": digest("another parent")},
    {"extra": b"another salt"},
    {"extra": b""},
    {"tokens": bytes(128)},
    {"tokens": bytes(124)},
    {"part": 1},
    {"part": SNAPSHOT},
    {"n_bytes": 99},
]


@pytest.fixture(params=[None, KEY], ids=["plain", "encrypted"])
def codec(request: pytest.FixtureRequest) -> Codec:
    return Codec(request.param)


@given(payload=st.binary(max_size=300))
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_what_was_packed_is_unpacked(payload: bytes, key: bytes | None) -> None:
    codec, whole = Codec(key), address(n_bytes=len(payload))
    record = codec.pack(whole, payload)
    assert codec.unpack(whole, record) == payload


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_a_record_of_something_else_is_refused(codec: Codec, changes: dict[str, object]) -> None:
    record = codec.pack(address(), bytes(100))
    with pytest.raises(BadRecord):
        codec.unpack(address(**changes), record)


def test_each_address_has_its_name() -> None:
    names = {address(**changes).name for changes in [{}, *OTHERS[:1], *OTHERS[6:8]]}
    assert len(names) == 4
    assert address(block_hash=digest("another")).name not in names
    assert address(extra=b"x").name.owner == owner_of(b"x") != address().name.owner


@pytest.mark.parametrize("n_mutations", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_damaged_record_is_unpacked(codec: Codec, n_mutations: int) -> None:
    """Mutations: bits, cuts, swapped payloads, additions."""
    rng = random.Random(7)
    payload, other = rng.randbytes(100), rng.randbytes(100)
    good, wrong = codec.pack(address(), payload), codec.pack(address(parent=digest("x")), other)
    for _ in range(n_mutations):
        record = bytearray(good)
        kind = rng.randrange(5)
        if kind == 0:
            record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del record[rng.randrange(len(record)) :]
        elif kind == 2:
            first = rng.randrange(len(record))
            record[first:] = wrong[first:]
        elif kind == 3:
            at = rng.randrange(len(record))
            record[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            first, end = sorted(rng.sample(range(len(record) + 1), 2))
            record[first:end] = rng.randbytes(end - first)
        if bytes(record) == good:
            continue
        try:
            assert codec.unpack(address(), bytes(record)) == payload, "a changed record gave another payload"
            pytest.fail("a changed record was taken")
        except BadRecord:
            pass


def test_another_key_opens_nothing() -> None:
    record = Codec(KEY).pack(address(), bytes(100))
    for codec in (Codec(), Codec(KEY[::-1])):
        with pytest.raises(BadRecord):
            codec.unpack(address(), record)


def test_a_key_of_another_length() -> None:
    with pytest.raises(ConfigError, match="give 32"):
        Codec(b"short")


def test_an_encrypted_record_hides_the_payload() -> None:
    secret = b"a secret that nobody may read..." * 3
    whole = address(n_bytes=len(secret))
    assert secret in Codec().pack(whole, secret)
    record = Codec(KEY).pack(whole, secret)
    assert secret[:8] not in record
    assert record != Codec(KEY).pack(whole, secret), "each has its own nonce"


def test_a_payload_of_another_length() -> None:
    with pytest.raises(ValueError, match="its address says 100"):
        Codec().pack(address(), bytes(99))
