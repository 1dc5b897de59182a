"""Sessions that are saved in the KV store and go on in another process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, KVStore, SamplingParams
from pyvelo.errors import ClosedError, ConfigError, RequestError, StoreError, UnsupportedError
from pyvelo.store.files import FileStore

from .conftest import MakeModel

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = [3 + (j * j + 5 * j) % 250 for j in range(150)]
SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "deterministic": True}


@pytest.fixture(autouse=True)
def _slow_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loading pay, as it does with larger models."""
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda *_: 5.0)


@pytest.fixture(scope="module", params=["llama", "gemma3", "lfm2"])
def path(make_model: MakeModel, request: pytest.FixtureRequest) -> Path:
    """A plain model, one with windows, and one with recurrent states."""
    window = ("--window", "64") if request.param == "gemma3" else ()
    return make_model("--arch", request.param, "--layers", "2", "--embd", "128", "--head-dim", "32", *window)


def test_a_session_goes_on_where_it_was_saved(path: Path, tmp_path: Path) -> None:
    with LLM(path, **SETTINGS) as llm, llm.session(PROMPT) as session:
        for _ in range(2):
            session.generate(GREEDY)
            session.append([7, 8, 9])
        expected, last = session.token_ids, session.generate(GREEDY).token_ids
    with LLM(path, kv_store=tmp_path, **SETTINGS) as llm, llm.session(PROMPT) as session:
        session.generate(GREEDY)
        session.append([7, 8, 9])
        session.save("mine")
    for _ in range(2):  # an answer that is not saved changes nothing
        with LLM(path, kv_store=tmp_path, **SETTINGS) as llm, llm.load_session("mine") as session:
            session.generate(GREEDY)
            session.append([7, 8, 9])
            assert session.token_ids == expected
            assert llm.stats().loaded_tokens >= 128
            assert session.generate(GREEDY).token_ids == last
            session.fork().close()
        assert llm.stats().blocks_used == 0 if not llm._engine.model.closed else True


def test_a_short_session_has_its_blocks(tiny_model_f32: Path, tmp_path: Path) -> None:
    """Fewer blocks than `min_blocks`, and none of them a hit."""
    store = KVStore(tmp_path, min_blocks=1000)
    with LLM(tiny_model_f32, kv_store=store, **SETTINGS) as llm, llm.session(PROMPT[:40]) as session:
        session.generate(GREEDY)
        session.save("short")
    with LLM(tiny_model_f32, kv_store=store, **SETTINGS) as llm, llm.load_session("short") as session:
        session.generate(GREEDY)
        assert llm.stats().loaded_tokens == 32


def test_blocks_that_the_store_has_lost_are_saved_again(tiny_model_f32: Path, tmp_path: Path) -> None:
    """Host memory has them, which no other process can read."""
    store = KVStore(tmp_path, min_blocks=1)
    with LLM(tiny_model_f32, kv_store=store, swap_bytes=1 << 26, **SETTINGS) as llm:
        persistence = llm._engine.persistence
        assert persistence is not None
        llm.generate(PROMPT, GREEDY)
        assert persistence.flush(60.0)
        other = FileStore(tmp_path)
        assert other.purge(None) > 0
        other.close()
        with llm.session(PROMPT) as session:
            session.save("mine")
    with LLM(tiny_model_f32, kv_store=store, **SETTINGS) as llm, llm.load_session("mine") as session:
        session.generate(GREEDY)
        assert llm.stats().loaded_tokens == 128


def test_names_salts_and_models_are_apart(make_model: MakeModel, tmp_path: Path) -> None:
    one, two = (make_model("--layers", "1", "--embd", "128", "--head-dim", "32", "--seed", n) for n in "12")
    with LLM(one, kv_store=tmp_path, **SETTINGS) as llm:
        for name, salt, tokens in (("a", "", [5]), ("b", "", [6]), ("a", "x", [7]), ("a", "x:1", [8])):
            llm.session(tokens, cache_salt=salt).save(name)
        llm.session([9, 9], cache_salt="x").save("a")  # in place of the other
    with (
        LLM(two, kv_store=tmp_path, **SETTINGS) as llm,
        pytest.raises(RequestError, match="no saved session"),
    ):
        llm.load_session("a")
    with LLM(one, kv_store=tmp_path, kv_type="q8_0", **SETTINGS) as llm:  # tokens need no KV of this type
        found = [llm.load_session("a", cache_salt=salt).token_ids for salt in ("", "x", "x:1")]
        assert found == [(5,), (9, 9), (8,)]
        with pytest.raises(RequestError, match="no saved session 'b' of this model and this cache_salt"):
            llm.load_session("b", cache_salt="x")
        assert llm.delete_session("b")
        assert not llm.delete_session("b")
        with pytest.raises(RequestError, match="no saved session"):
            llm.load_session("b")
        assert llm.purge_kv_store("x") == 2
        assert llm.load_session("a").token_ids == (5,)
        assert llm.purge_kv_store() == 1
        with pytest.raises(RequestError, match="no saved session"):
            llm.load_session("a")


def test_an_empty_session_and_any_name(tiny_model_f32: Path, tmp_path: Path) -> None:
    names = ["a/b", "..", "ünï 🙂", "\ud800", "x" * 256]
    with LLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS) as llm:
        for name in names:
            llm.session().save(name)
            assert llm.load_session(name).token_ids == ()


@pytest.mark.parametrize("name", ["", "x" * 257, 5, None])
def test_wrong_names(tiny_model_f32: Path, tmp_path: Path, name: Any) -> None:
    with LLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS) as llm:
        for call in (llm.session([5]).save, llm.load_session, llm.delete_session):
            with pytest.raises(RequestError, match="give a string of 1 to 256 characters"):
                call(name)
        with pytest.raises(RequestError, match="cache_salt"):
            llm.load_session("a", cache_salt=5)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="cache_salt"):
            llm.purge_kv_store(5)  # type: ignore[arg-type]


def test_without_a_store_or_an_engine(tiny_model_f32: Path, tmp_path: Path) -> None:
    with LLM(tiny_model_f32, **SETTINGS) as llm, pytest.raises(ConfigError, match="kv_store="):
        llm.session([5]).save("a")
    llm = LLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS)
    session = llm.session([5])
    llm.close()
    for call in (lambda: session.save("a"), lambda: llm.load_session("a"), llm.purge_kv_store):
        with pytest.raises(ClosedError):
            call()


def test_a_model_that_only_embeds(make_model: MakeModel, tmp_path: Path) -> None:
    with LLM(make_model("--arch", "bert"), kv_store=tmp_path) as llm, pytest.raises(UnsupportedError):
        llm.load_session("a")


def test_a_store_that_is_away_and_one_of_another_process(tiny_model_f32: Path, tmp_path: Path) -> None:
    with LLM(tiny_model_f32, kv_store="valkey://127.0.0.1:1", **SETTINGS) as llm:
        with llm.session([5]) as session, pytest.raises(StoreError):
            session.save("a")
        with pytest.raises(StoreError):
            llm.load_session("a")
    writer = LLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS)
    writer.session([5]).save("a")
    with LLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS) as reader:
        assert reader.load_session("a").token_ids == (5,)
        with pytest.raises(StoreError, match="another process"):
            reader.session([6]).save("a")
        assert reader.load_session("a").token_ids == (5,)
    writer.close()


def test_a_session_that_no_longer_fits(tiny_model_f32: Path, tmp_path: Path) -> None:
    with LLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS) as llm:
        llm.session(PROMPT).save("long")
    with (
        LLM(tiny_model_f32, kv_store=tmp_path, **{**SETTINGS, "n_ctx": 64}) as llm,
        pytest.raises(RequestError, match="150 tokens"),
    ):
        llm.load_session("long")


def test_a_busy_session_is_not_saved(tiny_model_f32: Path, tmp_path: Path) -> None:
    with LLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS) as llm, llm.session(PROMPT) as session:
        stream = session.stream(GREEDY)
        next(stream)
        with pytest.raises(RequestError, match="answering"):
            session.save("a")
        stream.close()
        session.save("a")
        assert llm.load_session("a").token_ids == session.token_ids


def test_a_damaged_record_is_a_missing_session(tiny_model_f32: Path, tmp_path: Path) -> None:
    with LLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS) as llm:
        llm.session([5, 6]).save("a")
        (file,) = tmp_path.glob("??/*.kv")
        record = file.read_bytes()
        for damaged in (record[:-1], record.replace(json.dumps([5, 6]).encode(), b"[5, 7]"), b"", record * 2):
            file.parent.mkdir(exist_ok=True)
            llm.session([5, 6]).save("a")
            file.write_bytes(damaged)
            with pytest.raises(RequestError, match="no saved session"):
                llm.load_session("a")


def test_asyncio(tiny_model_f32: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS) as llm:
            session = await llm.session(PROMPT)
            first = await session.generate(GREEDY)
            await session.save("a")
            expected, again = session.token_ids, await session.generate(GREEDY)
        async with AsyncLLM(tiny_model_f32, kv_store=tmp_path, **SETTINGS) as llm:
            session = await llm.load_session("a")
            assert session.token_ids == expected == (*PROMPT, *first.token_ids)
            assert (await session.generate(GREEDY)).token_ids == again.token_ids
            stats = await llm.stats()
            assert stats.loaded_tokens >= 128
            await llm.delete_session("a")
            with pytest.raises(RequestError, match="no saved session"):
                await llm.load_session("a")
            assert await llm.purge_kv_store() > 0

    asyncio.run(main())
