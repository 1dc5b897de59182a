"""KV events of engines: a consumer's index is what the manager would hit, at every quiet moment."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from pyvelo import LLM, AsyncLLM, KVEvents, SamplingParams
from pyvelo.engine.engine import Engine
from pyvelo.errors import ConfigError, ModelError, UnsupportedError, VeloError
from pyvelo.events import publisher as publishing
from pyvelo.events.publisher import Publisher
from pyvelo.kv.prefix import BlockHashes
from tests.events.naive import Key
from tests.events.subscribers import WAIT, Subscriber, context, subscribed

from .conftest import MakeModel
from .loras import adapt

__all__ = ["context"]

EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))
ARCHS = ("llama", "gemma3", "lfm2", "qwen35", "mamba2")
FREE = KVEvents("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
SIZE = 32


@pytest.fixture(scope="module", params=ARCHS)
def path(make_model: MakeModel, request: pytest.FixtureRequest) -> Path:
    """A plain model, one with windows, and ones with recurrent states."""
    arch: str = request.param
    window = ("--window", "64") if arch == "gemma3" else ()
    return make_model("--arch", arch, "--layers", "2", "--embd", "128", "--head-dim", "32", *window)


def opened(path: Path, **settings: Any) -> LLM:
    given = {"n_ctx": 512, "n_threads": 1, "deterministic": True, "kv_events": FREE, **settings}
    return LLM(path, **given)


def publisher_of(engine: Engine) -> Publisher:
    assert engine.events is not None
    return engine.events


def greedy(n: int = 8, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, **others)


class Truth:
    """Sequences that an engine has computed, and what of them it would hit."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequences: dict[tuple[str, str, tuple[int, ...]], None] = {}

    def add(self, tokens: Sequence[int], salt: str = "", lora: str = "") -> None:
        self.sequences[lora, salt, tuple(tokens)] = None

    def keys(self) -> set[tuple[str, bool, tuple[int, ...]]]:
        """Return the prefixes that are a hit, or the beginning of one."""
        found = set()
        adapters = self.engine.loras.loaded.adapters
        with self.engine.loop.visit() as core:
            for lora, salt, tokens in self.sequences:
                extra = (adapters[lora][1].key if lora else b"") + salt.encode()
                hashes = BlockHashes(array("i", tokens), SIZE, extra)
                for n in range(1, len(tokens) // SIZE + 1):
                    if core.manager.hit_blocks(hashes, n) == n:
                        found |= {(lora, bool(salt), tokens[: m * SIZE]) for m in range(1, n + 1)}
        return found


def keys_of(found: set[Key]) -> set[tuple[str, bool, tuple[int, ...]]]:
    return {(key.lora or "", key.salt is not None, key.tokens) for key in found}


def check(truth: Truth, *subscribers: Subscriber) -> int:
    """Wait until the subscribers know exactly what can hit; return the number of prefixes."""
    wanted = truth.keys()
    for each in subscribers:
        try:
            each.until(lambda each=each: keys_of(each.consumer.prefixes()) == wanted)
        except AssertionError:
            assert keys_of(each.consumer.prefixes()) == wanted
            raise
        assert each.n_gaps == 0
    return len(wanted)


class User:
    """User of an engine by chance. `do` does one thing, after which nothing runs."""

    def __init__(self, llm: LLM, truth: Truth, rng: random.Random, loras: Sequence[str] = ()) -> None:
        self.llm, self.truth, self.rng, self.loras = llm, truth, rng, loras
        self.sessions: list[Any] = []
        self.prompts: list[list[int]] = [[3 + (j * j + 5 * j) % 250 for j in range(300)]]

    def prompt(self) -> list[int]:
        """Return a prompt that often begins as an earlier one does."""
        rng = self.rng
        base = rng.choice(self.prompts)
        tokens = base[: rng.randint(0, len(base))] + rng.choices(range(3, 250), k=rng.randint(1, 120))
        self.prompts = [*self.prompts[-6:], tokens[:340]]
        return tokens[:340]

    def generate(self) -> None:
        prompts = [self.prompt() for _ in range(self.rng.randint(1, 4))]
        salt, lora = self.rng.choice(("", "", "tenant")), self.rng.choice(("", *self.loras))
        params = greedy(self.rng.randint(1, 60), cache_salt=salt, lora=lora or None)
        for prompt, output in zip(prompts, self.llm.generate(prompts, params), strict=True):
            self.truth.add([*prompt, *output.token_ids], salt, lora)

    def cancel(self) -> None:
        prompt, tokens = self.prompt(), list[int]()
        stream = self.llm.stream(prompt, greedy(60))
        for _ in range(self.rng.randint(0, 50)):
            tokens += next(stream).token_ids
        stream.close()
        self.truth.add([*prompt, *tokens])

    def open_session(self) -> None:
        self.sessions.append(self.llm.session(self.prompt()[:150]))

    def use_session(self) -> None:
        if not self.sessions:
            return self.open_session()
        session = self.rng.choice(self.sessions)
        if self.rng.random() < 0.3 and len(self.sessions) < 4:
            session = session.fork()
            self.sessions.append(session)
        session.append(self.rng.choices(range(3, 250), k=self.rng.randint(1, 30)))
        if len(session) < 400:
            session.generate(greedy(self.rng.randint(1, 40)))
        self.truth.add(session.token_ids)

    def close_session(self) -> None:
        if self.sessions:
            self.sessions.pop(self.rng.randrange(len(self.sessions))).close()

    def reset(self) -> None:
        if self.rng.random() < 0.3:
            self.llm.reset_prefix_cache()

    def do(self) -> None:
        todo = (self.generate, self.generate, self.cancel, self.use_session, self.use_session)
        self.rng.choice((*todo, self.close_session, self.reset))()


@pytest.mark.parametrize("pool", ["small", "large"])
def test_an_index_is_what_the_manager_hits(path: Path, pool: str, context: zmq.Context[Any]) -> None:
    """Requests, cancellations, sessions, salts, resets: two subscribers, and one that joins late."""
    with opened(path) as llm:
        geometry = llm._engine.geometry
        n_blocks = 20 * len(geometry.groups) + 5 * geometry.state_blocks if pool == "small" else 4000
    settings: dict[str, Any] = {"kv_cache_bytes": n_blocks * geometry.block_bytes}
    seen = 0
    with opened(path, max_num_seqs=4, swap_bytes=1 << 18, **settings) as llm:
        publisher, truth = publisher_of(llm._engine), Truth(llm._engine)
        two = [subscribed(context, publisher), subscribed(context, publisher)]
        user = User(llm, truth, random.Random(len(str(path)) + (pool == "small")))
        for number in range(int(25 * EFFORT)):
            user.do()
            seen = max(seen, check(truth, *two))
            if number == 15:
                two.append(subscribed(context, publisher))
        for session in user.sessions:
            session.close()
        check(truth, *two)
        assert seen > 10
        assert llm._engine.core.manager.counts.evictions > 0 or pool == "large"


def test_chains_lead_to_the_longest_hit(path: Path, context: zmq.Context[Any]) -> None:
    """What a router expects for a prompt that was computed is what the request finds."""
    with opened(path) as llm:
        follower = subscribed(context, publisher_of(llm._engine))
        rng, truth = random.Random(4), Truth(llm._engine)
        prompts = [rng.choices(range(3, 250), k=k) for k in (40, 100, 257, 300)]
        for prompt in prompts:
            output = llm.generate(prompt, greedy(1))[0]
            truth.add([*prompt, *output.token_ids])
        check(truth, follower)
        for prompt in prompts:
            expected = follower.consumer.hit(prompt[:-1]) * SIZE
            cached = llm.generate(prompt, greedy(1))[0].usage.cached_tokens
            assert expected <= cached < expected + SIZE
            assert expected > 0


def test_adapters_and_salts(tiny_model_f32: Path, tmp_path: Path, context: zmq.Context[Any]) -> None:
    loras = {
        name: adapt(tiny_model_f32, tmp_path, name=name, seed=n).adapter for n, name in enumerate(("a", "b"))
    }
    with opened(tiny_model_f32, lora=loras, kv_cache_bytes=2 << 20) as llm:
        follower, truth = subscribed(context, publisher_of(llm._engine)), Truth(llm._engine)
        user = User(llm, truth, random.Random(8), ("a", "b"))
        for _ in range(int(12 * EFFORT)):
            user.generate()
            check(truth, follower)
        assert {key.lora for key in follower.consumer.prefixes()} == {None, "a", "b"}
        assert len({key.salt for key in follower.consumer.prefixes()}) == 2
        path_of_b = llm.loras["b"].path
        llm.unload_lora("a")
        prompt = [3 + (j * j) % 250 for j in range(200)]
        llm.generate(prompt, greedy(1))
        follower.until(lambda: follower.consumer.hit(prompt) == len(prompt) // SIZE)
        assert {key.lora for key in follower.consumer.prefixes()} == {None, "b"}
        llm.generate(prompt, greedy(1, lora="b"))
        follower.until(lambda: follower.consumer.hit(prompt, lora="b") == len(prompt) // SIZE)
        llm.unload_lora("b")
        llm.load_lora("a", path_of_b)  # another adapter by a name that was known
        llm.generate(prompt, greedy(1, lora="a"))
        follower.until(lambda: follower.consumer.hit(prompt, lora="a") == len(prompt) // SIZE)
        assert follower.consumer.hit(prompt, lora="b") == 0


def test_blocks_that_are_loaded_from_a_store_are_stored(
    path: Path, tmp_path: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyvelo.engine.prefill_budget.Costs.seconds_for", lambda *_: 5.0)
    prompt = [3 + (j * j + 5 * j) % 250 for j in range(300)]
    for life in range(2):
        with opened(path, kv_store=tmp_path) as llm:
            follower, truth = subscribed(context, publisher_of(llm._engine)), Truth(llm._engine)
            persistence = llm._engine.persistence
            assert persistence is not None
            for _ in range(1000):
                if persistence.ready:
                    break
                time.sleep(0.01)
            output = llm.generate(prompt, greedy(1))[0]
            truth.add([*prompt, *output.token_ids])
            assert (llm.stats().loaded_tokens > 0) == (life > 0)
            assert check(truth, follower) > 5


def test_after_a_failed_step_nothing_is_cached(
    tiny_model_f32: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_model_f32) as llm:
        follower, truth = subscribed(context, publisher_of(llm._engine)), Truth(llm._engine)
        prompt = [5] * 200
        output = llm.generate(prompt, greedy(1))[0]
        truth.add([*prompt, *output.token_ids])
        assert check(truth, follower) == 6
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine.core, "schedule", lambda *_: 1 / 0)
            with pytest.raises(Exception, match="division by zero"):
                llm.generate(prompt, greedy(1))
        assert check(truth, follower) == 0
        llm.generate(prompt, greedy(1))
        assert check(truth, follower) == 6


def test_a_full_queue_merges_steps(
    tiny_model_f32: Path, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on while the thread hangs, and nothing is lost when it goes on, too."""
    monkeypatch.setattr(publishing, "MOST_QUEUED", 2)
    with opened(tiny_model_f32, kv_cache_bytes=1 << 20) as llm:
        publisher, truth = publisher_of(llm._engine), Truth(llm._engine)
        follower = subscribed(context, publisher)
        hold, send = threading.Event(), publisher._send
        publisher._send = lambda *a: (hold.wait(WAIT), send(*a))[1]  # type: ignore[method-assign]
        rng = random.Random(3)
        for _ in range(10):
            prompt = rng.choices(range(3, 250), k=250)
            truth.add([*prompt, *llm.generate(prompt, greedy(30))[0].token_ids])
        assert len(publisher._queue) <= 2
        sequence = publisher._history.next_sequence
        hold.set()
        assert check(truth, follower) > 0
        assert publisher._history.next_sequence - sequence < 10, "most steps were merged"


def test_async_engines_and_two_in_a_process(tiny_model_f32: Path, context: zmq.Context[Any]) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "kv_events": FREE}
        async with AsyncLLM(tiny_model_f32, **settings) as one, AsyncLLM(tiny_model_f32, **settings) as two:
            followers, prompts = [], ([5] * 100, [6] * 100)
            for llm, prompt in zip((one, two), prompts, strict=True):
                await llm.generate(prompt, greedy(1))
                engine = (await llm._engine_loop()).engine
                followers.append(Subscriber(context, publisher_of(engine).endpoint))
            for follower, prompt, other in zip(followers, prompts, prompts[::-1], strict=True):
                await asyncio.to_thread(follower.until, lambda f=follower, p=prompt: f.consumer.hit(p) == 3)
                assert follower.consumer.hit(other) == 0

    asyncio.run(main())


# ---- settings and ends ----


def test_the_settings_are_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    for setting, words in (
        ("localhost", "give tcp://ADDRESS:PORT"),
        ("tcp://192.0.2.1:5", "this machine does not have the address"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(missing, kv_events=setting)
    with pytest.raises(ConfigError, match="leave out prefix_cache=False"):
        LLM(missing, kv_events="tcp://127.0.0.1:*", prefix_cache=False)
    with pytest.raises(ConfigError, match="give tcp://"):
        LLM(missing, kv_events=5)  # type: ignore[arg-type]


def test_a_load_that_fails_closes_the_sockets(tmp_path: Path, make_model: MakeModel) -> None:
    with zmq.Context() as other, other.socket(zmq.PUB) as probe:
        probe.bind("tcp://127.0.0.1:*")
        address = probe.last_endpoint.decode()
    for _ in range(2):
        with pytest.raises(ModelError):
            LLM(tmp_path / "missing.gguf", kv_events=address)
    bert = make_model("--arch", "bert", "--layers", "1", "--embd", "128", "--head-dim", "32", "--type", "f32")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="embeds texts"):
            LLM(bert, kv_events=address)


def test_other_machines_are_warned_about(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pyvelo"), opened(tiny_model, kv_events="tcp://*:*"):
        pass
    [record] = [record for record in caplog.records if "KV events" in record.message]
    assert record.message.startswith("KV events at tcp://*:*: other machines can read the token ids")
    caplog.clear()
    with opened(tiny_model):
        pass
    assert not caplog.records


def test_closing_ends_the_thread(tiny_model: Path) -> None:
    llm = opened(tiny_model)
    thread = publisher_of(llm._engine)._thread
    assert thread.is_alive()
    llm.close()
    assert not thread.is_alive()
    with pytest.raises(VeloError):
        llm.generate("a")


def test_a_dropped_engine_ends_the_thread(tiny_model: Path) -> None:
    llm = opened(tiny_model)
    llm.generate("Hello", greedy(2))
    thread, alive = publisher_of(llm._engine)._thread, weakref.ref(llm._engine)
    del llm
    gc.collect()
    assert alive() is None
    thread.join(WAIT)
    assert not thread.is_alive()


def test_no_circle_keeps_an_engine(tiny_model: Path) -> None:
    """Without a garbage collection, too."""
    llm = opened(tiny_model)
    llm.generate("Hello", greedy(2))
    alive = weakref.ref(llm._engine)
    gc.disable()
    try:
        del llm
        assert alive() is None
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def _no_threads_stay() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "pyvelo-kv-events":
            thread.join(WAIT)
            assert not thread.is_alive()
