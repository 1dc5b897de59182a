"""Requests that are held for the store: deadlines, cancels, slow stores; and what it forgets or keeps."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, KVStore
from pyvelo.errors import ClosedError, StoreError
from pyvelo.store import opening

from .conftest import MakeModel
from .test_kv_store import GREEDY, LONG, opened, persistence_of, tokens, wait_for


@pytest.fixture(autouse=True)
def _slow_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loading pay, as it does with larger models."""
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda *_: 5.0)


class Slow:
    """A store between the guard and the real one, whose lookups and loads take so many seconds each."""

    def __init__(self, store: Any, lookup: float = 0.0, load: float = 0.0) -> None:
        self._store, self._seconds = store, {"lookup": lookup, "load": load}
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def call(*given: Any) -> Any:
            self.names.append(name)
            time.sleep(self._seconds.get(name, 0.0))
            return found(*given)

        return call


def slowed(llm: LLM, **seconds: float) -> Slow:
    """Make the store of an engine slow."""
    guarded = persistence_of(llm).store
    guarded.stats()  # opens it
    slow = guarded._store = Slow(guarded._store, **seconds)  # type: ignore[assignment]
    return slow


def filled(path: Path, store: Path, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Answer prompts by an engine that saves their blocks."""
    with opened(path, store) as llm:
        return tokens(llm, prompts)


def test_each_prompt_of_a_batch_is_loaded(tiny_model_f32: Path, tmp_path: Path) -> None:
    prompts = [[number, *LONG[:150]] for number in range(3, 8)]
    expected = filled(tiny_model_f32, tmp_path, prompts)
    with opened(tiny_model_f32, tmp_path) as llm:
        unknown = [[99] * 40, *prompts]
        outputs = llm.generate(unknown, GREEDY)
        assert [output.token_ids for output in outputs[1:]] == expected
        assert [output.usage.cached_tokens for output in outputs] == [0, *[128] * 5]


def test_what_prompts_share_is_loaded_once(tiny_model_f32: Path, tmp_path: Path) -> None:
    prompts = [[*LONG[:160], number, *[7] * 40] for number in range(3, 8)]
    filled(tiny_model_f32, tmp_path, prompts)
    with opened(tiny_model_f32, tmp_path) as llm:
        slow = slowed(llm)
        outputs = llm.generate(prompts, GREEDY)
        assert [output.usage.cached_tokens for output in outputs] == [192] * 5
        assert slow.names.count("load") == 5 + 5


def test_a_request_that_is_cancelled_while_held_does_not_arrive(tiny_model_f32: Path, tmp_path: Path) -> None:
    filled(tiny_model_f32, tmp_path, [LONG])
    with opened(tiny_model_f32, tmp_path) as llm:
        slowed(llm, lookup=0.3)
        stream = llm.stream(list(LONG), GREEDY, request_id="one")
        closer = threading.Timer(0.1, stream.close)
        closer.start()
        assert not any(piece.token_ids for piece in stream)
        outputs = llm.generate([list(LONG), [9] * 70], GREEDY)
        assert [len(output.token_ids) for output in outputs] == [12, 12]
        llm._engine.core.manager.audit()


def test_held_requests_end_in_time(tiny_model_f32: Path, tmp_path: Path) -> None:
    filled(tiny_model_f32, tmp_path, [LONG, [4, *LONG]])
    with opened(tiny_model_f32, tmp_path) as llm:
        slowed(llm, load=0.2)
        start = time.monotonic()
        output = llm.generate(list(LONG), replace(GREEDY, timeout=0.1, max_tokens=100))[0]
        assert output.finish_reason == "timeout"
        assert time.monotonic() - start < 1.2, "all loads take 1.8 seconds"
        wait_for(lambda: not persistence_of(llm).store.is_away)
        abort = threading.Timer(0.05, llm.abort, ["two"])
        abort.start()
        (output,) = llm.generate([4, *LONG], replace(GREEDY, max_tokens=200), request_id="two")
        assert output.finish_reason == "abort"
        assert output.token_ids == ()


def test_a_slow_store_holds_a_request_no_longer_than_computing(
    tiny_model_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tiny_model_f32, tmp_path, [LONG])
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda self, n: n * 1e-4)  # 30 ms
    with opened(tiny_model_f32, tmp_path) as llm:
        slow = slowed(llm, lookup=0.8)
        start = time.monotonic()
        llm.generate([[number, *LONG] for number in range(3, 9)], GREEDY)
        assert time.monotonic() - start < 3, "six lookups take 4.8 seconds"
        assert slow.names.count("lookup") == 1, "the others saw that it had not ended"


def test_a_prompt_that_is_not_stored_does_not_wait_for_another_ones_load(
    tiny_model_f32: Path, tmp_path: Path
) -> None:
    filled(tiny_model_f32, tmp_path, [LONG])
    with opened(tiny_model_f32, tmp_path) as llm:
        slowed(llm, load=0.3)
        long = threading.Thread(target=llm.generate, args=([list(LONG)], GREEDY))
        long.start()
        time.sleep(0.05)
        start = time.monotonic()
        llm.generate([99] * 70, GREEDY)
        assert time.monotonic() - start < 1.8, "the load takes 2.7 seconds"
        assert long.is_alive()
        long.join()
        assert llm.stats().loaded_tokens == 288


def test_a_store_that_was_slow_once_is_used_again(
    tiny_model_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[number, *LONG[:140]] for number in range(3, 30)]
    filled(tiny_model_f32, tmp_path, prompts)
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda self, n: n * 2e-3)
    with opened(tiny_model_f32, tmp_path) as llm:
        slow = slowed(llm, load=0.15)
        llm.generate(prompts[0], GREEDY)
        slow._seconds["load"] = 0.0
        cached = [llm.generate(prompt, GREEDY)[0].usage.cached_tokens for prompt in prompts[1:]]
        assert cached[0] == 0
        assert 128 in cached


def test_saves_make_way_for_loads(tiny_model_f32: Path, tmp_path: Path) -> None:
    """A prompt in the store does not wait for the pauses of the saver."""
    filled(tiny_model_f32, tmp_path, [LONG])
    with opened(tiny_model_f32, tmp_path) as llm:
        slow = slowed(llm)
        slow._seconds["save"] = 0.1  # and pauses of five seconds
        with llm.session([4, *LONG[:200]]) as session:
            stream = session.stream(replace(GREEDY, max_tokens=250))
            next(stream)
            llm.generate([8, *LONG[:180]], replace(GREEDY, max_tokens=1))
            go_on = threading.Thread(target=lambda: list(stream))
            go_on.start()
            start = time.monotonic()
            output = llm.generate(list(LONG), GREEDY)[0]
            assert time.monotonic() - start < 3
            assert output.usage.cached_tokens == 288
            go_on.join()


def test_close_saves_and_serves_nothing_more(tiny_model_f32: Path, tmp_path: Path) -> None:
    llm = opened(tiny_model_f32, tmp_path)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            while True:
                llm.generate([random.randrange(3, 200) for _ in range(150)], GREEDY)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    llm.close()
    assert time.monotonic() - start < 4.8, "it would be five seconds"
    for thread in threads:
        thread.join(5)
    assert [type(error) for error in errors] == [ClosedError] * 2
    assert persistence_of(llm).store.counts.n_saved > 0


def test_blocks_that_the_store_has_lost_are_saved_again(tiny_model_f32: Path, tmp_path: Path) -> None:
    with opened(tiny_model_f32, tmp_path) as llm:
        for _ in range(2):
            tokens(llm, [LONG])
            assert persistence_of(llm).flush(5)
            assert llm.purge_kv_store() == 9


def test_use_of_the_pool_counts_as_use_of_the_store(tiny_model_f32: Path, tmp_path: Path) -> None:
    """The prompt that is asked again and again is the last one that the store evicts."""
    often, settings = [200, *LONG[:100]], KVStore(tmp_path, max_bytes=300_000)
    with opened(tiny_model_f32, settings) as llm:
        for number in range(3, 20):
            tokens(llm, [often, [number, *LONG[:100]]])
            assert persistence_of(llm).flush(5)
        assert persistence_of(llm).store.stats().n_records in range(3, 40)
    with opened(tiny_model_f32, settings) as llm:
        assert llm.generate(often, GREEDY)[0].usage.cached_tokens == 96


def test_a_model_that_is_replaced_before_it_is_identified(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (make_model("--layers", "1", "--embd", "128", "--head-dim", "32", "--seed", n) for n in "12")
    path = tmp_path / "model.gguf"
    shutil.copy(one, path)
    go_on, digest = threading.Event(), opening.file_digest

    def later(*given: Any) -> str:
        go_on.wait(10)
        return digest(*given)

    monkeypatch.setattr("pyvelo.store.opening.file_digest", later)
    with LLM(path, n_ctx=512, n_threads=1, kv_store=tmp_path / "kv") as llm:
        shutil.copy(two, tmp_path / "new.gguf")
        os.replace(tmp_path / "new.gguf", path)
        go_on.set()
        wait_for(lambda: persistence_of(llm).ready)
        tokens(llm, [LONG])
    with opened(path, tmp_path / "kv", deterministic=False) as llm:
        tokens(llm, [LONG])
        assert llm.stats().loaded_tokens == 0
    with opened(one, tmp_path / "kv", deterministic=False) as llm:
        tokens(llm, [LONG])
        assert llm.stats().loaded_tokens == 288


def test_a_model_that_is_written_in_place_is_another_one(make_model: MakeModel, tmp_path: Path) -> None:
    one, two = (make_model("--layers", "1", "--embd", "128", "--head-dim", "32", "--seed", n) for n in "12")
    path = tmp_path / "model.gguf"
    shutil.copy(one, path)
    filled(path, tmp_path / "kv", [LONG])
    times = path.stat()
    with open(path, "r+b") as file:
        file.write(two.read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with opened(path, tmp_path / "kv") as llm:
        tokens(llm, [LONG])
        assert llm.stats().loaded_tokens == 0


def test_a_script_that_does_not_close_has_saved(tiny_model_f32: Path, tmp_path: Path) -> None:
    script = f"""
import time
from pyvelo import LLM, SamplingParams
llm = LLM({str(tiny_model_f32)!r}, n_ctx=512, n_threads=1, kv_store={str(tmp_path)!r})
while not llm._engine.persistence.ready:
    time.sleep(0.01)
llm.generate([5] * 200, SamplingParams(max_tokens=2))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert len(list(tmp_path.glob("??/*.kv"))) == 6


def test_an_encrypted_store_shows_nothing(tiny_model_f32: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with opened(tiny_model_f32, KVStore(tmp_path, key=b"k" * 32)) as llm:
        tokens(llm, [LONG])
    clear = array("i", LONG[:8]).tobytes()
    records = [path.read_bytes() for path in tmp_path.glob("??/*.kv")]
    assert len(records) == 9
    assert not any(clear in record for record in records)
    with opened(tiny_model_f32, tmp_path) as llm:  # without the key: its records stay, and it has its own
        tokens(llm, [LONG])
        assert llm.stats().loaded_tokens == 0
    assert len(list(tmp_path.glob("??/*.kv"))) == 18


def test_asyncio_saves_what_is_left_when_it_closes(tiny_model_f32: Path, tmp_path: Path) -> None:
    prompts = [[number, *LONG[:150]] for number in range(3, 13)]

    async def life() -> None:
        async with AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1, kv_store=tmp_path) as llm:
            await llm.generate([1, 2, 3], GREEDY)
            persistence = llm._loading.result().engine.persistence  # type: ignore[union-attr]
            assert persistence is not None
            assert persistence.identity
            await llm.generate(prompts, GREEDY)

    asyncio.run(life())
    assert len(list(tmp_path.glob("??/*.kv"))) == 50


def test_late_lookups_lose_nothing_that_is_to_be_saved(
    tiny_model_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda self, n: n * 1e-5)
    with opened(tiny_model_f32, tmp_path) as llm:
        slowed(llm, lookup=0.03)
        for number in range(3, 13):
            llm.generate([number, *LONG[:150]], GREEDY)
        assert persistence_of(llm).flush(10)
    assert len(list(tmp_path.glob("??/*.kv"))) == 50


def test_a_purge_covers_what_is_still_to_be_saved(tiny_model_f32: Path, tmp_path: Path) -> None:
    with opened(tiny_model_f32, tmp_path) as llm:
        slow = slowed(llm)
        slow._seconds["save"] = 0.01
        for number in range(3, 13):
            salt = "ann:1" if number % 2 else "bob"
            llm.generate([number, *LONG[:150]], replace(GREEDY, cache_salt=salt))
        llm.purge_kv_store("ann")
        assert persistence_of(llm).flush(10)
        assert persistence_of(llm).store.stats().n_records == 25
        llm.purge_kv_store()
        assert persistence_of(llm).store.stats().n_records == 0


def test_a_first_short_life_is_saved_and_a_second_begins_with_it(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits until the file is read to identify it; from then on its digest is known at once."""
    path, digest = tmp_path / "model.gguf", opening.file_digest
    shutil.copy(make_model("--layers", "1", "--embd", "128", "--head-dim", "32"), path)

    def slowly(*given: Any) -> str:
        time.sleep(0.5)
        return digest(*given)

    monkeypatch.setattr("pyvelo.store.opening.file_digest", slowly)
    for n_loaded in (0, 288):
        with LLM(path, n_ctx=512, n_threads=1, kv_store=tmp_path / "kv") as llm:
            assert persistence_of(llm).is_identifying == (n_loaded == 0)
            tokens(llm, [LONG])
            assert llm.stats().loaded_tokens == n_loaded


def test_a_model_that_cannot_be_identified(
    tiny_model_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> str:
        raise RecursionError("too deep")

    monkeypatch.setattr("pyvelo.store.opening.known_digest", lambda *_: None)
    monkeypatch.setattr("pyvelo.store.opening.file_digest", fail)
    with LLM(tiny_model_f32, n_ctx=512, n_threads=1, kv_store=tmp_path) as llm:
        with pytest.raises(StoreError, match="not in use"):
            llm.session([5]).save("x")
        assert len(tokens(llm, [LONG])[0]) == 12
    assert "is not used: too deep" in caplog.text
