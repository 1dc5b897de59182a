"""Blocks that outlive the process: the same tokens with a store as without one, and less to compute."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, KVStore, SamplingParams
from pyvelo.errors import ClosedError, ConfigError
from pyvelo.store.persistence import Persistence

from .conftest import MakeModel

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = [3 + (j * j + 5 * j) % 250 for j in range(300)]
PROMPTS = [LONG, LONG[:200] + [9] * 30, LONG[:141], [5] * 40, LONG[7:150]]
HYBRIDS = ("lfm2", "qwen35", "mamba2")


@pytest.fixture(autouse=True)
def _slow_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loading pay, as it does with larger models: these here compute a prompt in a moment."""
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda *_: 5.0)


@pytest.fixture(scope="module", params=["llama", "gemma3", *HYBRIDS])
def path(make_model: MakeModel, request: pytest.FixtureRequest) -> Path:
    """A plain model, one with windows, and ones with recurrent states."""
    arch: str = request.param
    window = ("--window", "64") if arch == "gemma3" else ()
    return make_model("--arch", arch, "--layers", "2", "--embd", "128", "--head-dim", "32", *window)


def opened(path: Path, store: Path | KVStore | str | None, **settings: Any) -> LLM:
    given: dict[str, Any] = {
        "n_ctx": 512,
        "n_threads": 1,
        "deterministic": True,
        "kv_store": store,
        **settings,
    }
    llm = LLM(path, **given)
    wait_for(lambda: store is None or persistence_of(llm).ready)
    return llm


def persistence_of(llm: LLM) -> Persistence:
    found: Persistence | None = llm._engine.persistence
    assert found is not None
    return found


def wait_for(ready: Callable[[], bool]) -> None:
    for _ in range(1000):
        if ready():
            return
        time.sleep(0.01)
    raise AssertionError("this took longer than ten seconds")


def tokens(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate([list(prompt) for prompt in prompts], GREEDY)]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_second_life_computes_little_and_says_the_same(path: Path, tmp_path: Path, kv_type: str) -> None:
    with opened(path, None, kv_type=kv_type, prefix_cache=False) as llm:
        expected = tokens(llm)
    for life in range(3):
        with opened(path, tmp_path, kv_type=kv_type) as llm:
            assert tokens(llm) == expected
            loaded = llm.stats().loaded_tokens
            assert (loaded > 0) == (life > 0)
            if life:
                assert loaded >= 250, "nearly all of the longest prompt"
                assert llm.stats().hit_tokens >= loaded
            llm._engine.core.manager.audit()
            assert llm.stats().blocks_used == 0


def test_one_after_the_other(path: Path, tmp_path: Path) -> None:
    """Prompts alone: usage tells what came from the store."""
    with opened(path, None, prefix_cache=False) as llm:
        expected = [tokens(llm, [prompt])[0] for prompt in PROMPTS]
    with opened(path, tmp_path) as llm:
        assert [tokens(llm, [prompt])[0] for prompt in PROMPTS] == expected
    with opened(path, tmp_path) as llm:
        output = llm.generate(list(LONG), GREEDY)[0]
        assert output.token_ids == expected[0]
        assert output.usage.cached_tokens >= 250
        assert [tokens(llm, [prompt])[0] for prompt in PROMPTS[1:]] == expected[1:]


DIFFERENT: list[dict[str, Any]] = [
    {"kv_type": "q8_0"},
    {"kv_type": ("f16", "q8_0")},
    {"block_size": 64},
    {"deterministic": False},
    {"attention_precision": "fast"},
]


@pytest.mark.parametrize("settings", DIFFERENT, ids=str)
def test_other_settings_hit_nothing(tiny_model_f32: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    with opened(tiny_model_f32, tmp_path) as llm:
        tokens(llm)
    with opened(tiny_model_f32, tmp_path, **settings) as llm:
        tokens(llm)
        assert llm.stats().loaded_tokens == 0
    with opened(tiny_model_f32, tmp_path) as llm:
        tokens(llm)
        assert llm.stats().loaded_tokens > 0


def test_other_instructions_hit_nothing_in_deterministic_mode(
    tiny_model_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for deterministic, hits in ((True, False), (False, True)):
        store = tmp_path / str(deterministic)
        for instructions in ("CPU : AVX2 = 1", "CPU : AVX512 = 1"):
            monkeypatch.setattr("pyvelo.engine.engine.system_info", lambda text=instructions: text)
            with opened(tiny_model_f32, store, deterministic=deterministic) as llm:
                tokens(llm)
                found = llm.stats().loaded_tokens
        assert (found > 0) == hits


def test_another_model_hits_nothing_and_another_name_does(make_model: MakeModel, tmp_path: Path) -> None:
    one = make_model("--layers", "1", "--embd", "128", "--head-dim", "32", "--seed", "1")
    two = make_model("--layers", "1", "--embd", "128", "--head-dim", "32", "--seed", "2")
    with opened(one, tmp_path / "kv") as llm:
        tokens(llm)
    with opened(two, tmp_path / "kv") as llm:
        tokens(llm)
        assert llm.stats().loaded_tokens == 0
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(one.read_bytes())
    with opened(moved, tmp_path / "kv") as llm:
        tokens(llm)
        assert llm.stats().loaded_tokens > 0


def test_salts_do_not_share(tiny_model_f32: Path, tmp_path: Path) -> None:
    def ask(llm: LLM, salt: str) -> int:
        before = llm.stats().loaded_tokens
        llm.generate(list(LONG), replace(GREEDY, cache_salt=salt))
        return llm.stats().loaded_tokens - before

    with opened(tiny_model_f32, tmp_path) as llm:
        assert ask(llm, "anna") == 0
    with opened(tiny_model_f32, tmp_path) as llm:
        assert ask(llm, "ben") == 0
        assert ask(llm, "") == 0
        assert ask(llm, "anna") > 0


def test_short_prompts_are_saved_when_they_hit(tiny_model_f32: Path, tmp_path: Path) -> None:
    short = LONG[:70]
    with opened(tiny_model_f32, tmp_path) as llm:
        tokens(llm, [short])
    with opened(tiny_model_f32, tmp_path) as llm:
        tokens(llm, [short])
        assert llm.stats().loaded_tokens == 0, "two blocks, used once"
        tokens(llm, [short])
    with opened(tiny_model_f32, tmp_path) as llm:
        tokens(llm, [short])
        assert llm.stats().loaded_tokens == 64


def test_sessions_and_chats(tiny_model_f32: Path, tmp_path: Path) -> None:
    def talk(store: Path | None) -> tuple[list[str], int]:
        with opened(tiny_model_f32, store, n_ctx=1024) as llm:
            session, said = llm.session(), []
            for turn in range(4):
                session.append([3 + (turn * 31 + j) % 250 for j in range(90)])
                said.append(session.generate(GREEDY).text)
            return said, llm.stats().loaded_tokens

    expected, _ = talk(None)
    assert talk(tmp_path) == (expected, 0)
    said, loaded = talk(tmp_path)
    assert said == expected
    assert loaded > 0


def test_many_threads(path: Path, tmp_path: Path) -> None:
    """Requests that wait for the same blocks, cancel, and come while others load."""
    with opened(path, None, prefix_cache=False) as llm:
        expected = tokens(llm)
    with opened(path, tmp_path) as llm:
        tokens(llm)
    with opened(path, tmp_path, kv_cache_bytes=None) as llm:
        wrong: list[object] = []

        def ask(number: int) -> None:
            rng = random.Random(number)
            for _ in range(6):
                which = rng.randrange(len(PROMPTS))
                if rng.random() < 0.3:
                    stream = llm.stream(list(PROMPTS[which]), GREEDY)
                    for _ in range(rng.randrange(3)):
                        next(stream)
                    stream.close()
                    continue
                got = tokens(llm, [PROMPTS[which]])
                if got != [expected[which]]:
                    wrong.append((which, got))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert llm.stats().blocks_used == 0
        llm._engine.core.manager.audit()


def test_a_pool_that_is_too_small_for_all(path: Path, tmp_path: Path) -> None:
    with opened(path, None, prefix_cache=False) as llm:
        expected = tokens(llm)
        block_bytes, n_blocks = llm.stats().block_bytes, llm.stats().blocks_total
    with opened(path, tmp_path) as llm:
        tokens(llm)
    for share in (2, 3):
        with opened(
            path, tmp_path, kv_cache_bytes=max(16, n_blocks // share // 4) * block_bytes, n_ctx=384
        ) as llm:
            assert tokens(llm) == expected
            llm._engine.core.manager.audit()


def test_asyncio(tiny_model_f32: Path, tmp_path: Path) -> None:
    async def life() -> tuple[list[tuple[int, ...]], int]:
        async with AsyncLLM(
            tiny_model_f32, n_ctx=512, n_threads=1, deterministic=True, kv_store=tmp_path
        ) as llm:
            await llm.generate([1, 2, 3], GREEDY)
            engine = llm._loading.result().engine  # type: ignore[union-attr]
            while not engine.persistence.ready:
                await asyncio.sleep(0.01)
            outputs = await asyncio.gather(*(llm.generate(list(prompt), GREEDY) for prompt in PROMPTS))
            return [output.token_ids for (output,) in outputs], (await llm.stats()).loaded_tokens

    first, none = asyncio.run(life())
    second, loaded = asyncio.run(life())
    assert first == second
    assert none == 0 < loaded


def test_close_ends_what_waits_for_the_store(tiny_model_f32: Path, tmp_path: Path) -> None:
    llm = opened(tiny_model_f32, tmp_path)
    tokens(llm, [LONG])
    persistence_of(llm).flush(5)
    go_on, held = threading.Event(), threading.Event()
    store = persistence_of(llm).store
    lookup = store.lookup

    def slow(*given: Any) -> list[bool]:
        held.set()
        go_on.wait(10)
        return lookup(*given)

    store.lookup = slow  # type: ignore[method-assign]
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate(list(LONG[:200]), GREEDY)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert held.wait(10)
    closing = threading.Thread(target=llm.close)
    closing.start()
    time.sleep(0.05)
    go_on.set()
    thread.join(10)
    closing.join(10)
    assert not thread.is_alive()
    assert not closing.is_alive()
    assert not errors or isinstance(errors[0], ClosedError)


def test_an_llm_that_is_dropped_ends_its_threads(tiny_model_f32: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def n_threads() -> int:
        names = ("pyvelo-store", "pyvelo-persistence")
        return sum(each.name in names for each in threading.enumerate() if each not in before)

    llm = opened(tiny_model_f32, tmp_path)
    tokens(llm, [LONG])
    persistence_of(llm).flush(5)
    assert n_threads() == 2
    del llm
    gc.collect()
    wait_for(lambda: n_threads() == 0)


def test_a_store_that_is_away_changes_nothing(tiny_model_f32: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tiny_model_f32, None, prefix_cache=False) as llm:
        expected = tokens(llm)
    with opened(tiny_model_f32, "valkey://127.0.0.1:1") as llm:
        assert tokens(llm) == expected
        assert tokens(llm) == expected
    assert sum("for now" in record.message for record in caplog.records) == 1


def test_an_encrypted_store(tiny_model_f32: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    for key, hits in ((b"a" * 32, False), (b"a" * 32, True), (b"b" * 32, False)):
        with opened(tiny_model_f32, KVStore(tmp_path, key=key)) as llm:
            tokens(llm)
            assert (llm.stats().loaded_tokens > 0) == hits


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_store": 5}, "give a folder"),
        ({"kv_store": "ftp://x"}, "give a folder, or valkey://"),
        ({"kv_store": "x", "prefix_cache": False}, "needs the prefix cache"),
        ({"kv_store": "valkey://localhost:port"}, "kv_store"),
    ],
)
def test_wrong_settings(tiny_model_f32: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(tiny_model_f32, **settings)


@pytest.mark.parametrize(
    "given", [{"max_bytes": 0}, {"ttl": -1}, {"ttl": True}, {"key": b"short"}, {"key": "x" * 32}]
)
def test_wrong_settings_of_a_store(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        KVStore("folder", **given)
