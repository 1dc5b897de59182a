"""Adapters in an engine: mixed with each other, in sessions, samples, beams, small pools and vectors."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyvelo import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    ClosedError,
    ConfigError,
    EngineError,
    ModelError,
    OutOfMemory,
    RequestError,
    SamplingParams,
    UnsupportedError,
)
from pyvelo.engine import adapters as engine_adapters
from pyvelo.outputs import RequestOutput
from scripts.models import make

from .conftest import MakeModel
from .loras import SMALL, Adapted, adapt

NAMES = ("", "one", "two")
PROMPTS = [
    f"{word} and some more text that is longer than a block of 32 tokens, in any vocabulary of the world"
    for word in ("Once", "I am")
]


@pytest.fixture(scope="module")
def files(tiny_model_f32: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapted]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: adapt(tiny_model_f32, folder, name=name, seed=seed) for seed, name in enumerate(NAMES[1:], 1)
    }


@pytest.fixture
def llm(tiny_model_f32: Path, files: dict[str, Adapted]) -> Iterator[LLM]:
    loras = {name: each.adapter for name, each in files.items()}
    with LLM(tiny_model_f32, lora=loras, n_ctx=512, deterministic=True, n_threads=1) as opened:
        yield opened


def greedy(n: int = 12, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, **others)


def tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    return [each.token_ids for each in output.outputs]


@pytest.fixture(scope="module")
def alone(tiny_model_f32: Path, files: dict[str, Adapted]) -> dict[tuple[str, str], tuple[int, ...]]:
    """The answer to each prompt by each merged model, which has no adapters."""
    answers = {}
    for name in NAMES:
        path = files[name].merged if name else tiny_model_f32
        with LLM(path, n_ctx=512, deterministic=True, n_threads=1) as llm:
            for prompt in PROMPTS:
                answers[name, prompt] = llm.generate(prompt, greedy())[0].outputs[0].token_ids
    assert len(set(answers.values())) == len(answers)
    return answers


def test_answers_equal_the_merged_models(llm: LLM, alone: dict[tuple[str, str], tuple[int, ...]]) -> None:
    """Mixed in one call, of which each output has the bits that it has alone."""
    pairs = [(name, prompt) for prompt in PROMPTS for name in NAMES] * 2
    outputs = llm.generate([prompt for _, prompt in pairs], [greedy(lora=name) for name, _ in pairs])
    for pair, output in zip(pairs, outputs, strict=True):
        assert output.outputs[0].token_ids == alone[pair]


def test_mixed_equals_alone_bit_by_bit(llm: LLM) -> None:
    pairs = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    params = [greedy(lora=name, logprobs=3, prompt_logprobs=2) for name, _ in pairs]
    mixed = llm.generate([prompt for _, prompt in pairs], params)
    for (_, prompt), param, output in zip(pairs, params, mixed, strict=True):
        llm.reset_prefix_cache()
        again = llm.generate(prompt, param)[0]
        assert again.outputs[0].logprobs == output.outputs[0].logprobs
        assert again.prompt_logprobs == output.prompt_logprobs


def test_an_adapter_that_comes_later_leaves_the_counts_of_blocks(
    tiny_model_f32: Path, files: dict[str, Adapted]
) -> None:
    with LLM(tiny_model_f32, n_ctx=512, n_threads=1) as llm:
        before = [0]
        llm._engine.core.before_run.append(lambda plan: before.append(1))
        llm.load_lora("one", files["one"].adapter)
        llm.generate(PROMPTS[0], greedy(4, lora="one"))
        assert sum(before) == llm.stats().steps > 0


def test_no_prefix_hit_crosses_adapters(llm: LLM, files: dict[str, Adapted]) -> None:
    llm.load_lora("half", files["one"].adapter, 0.5)
    llm.load_lora("same", files["one"].adapter)
    cached = {}
    for _ in range(2):
        for name in ("", "one", "two", "half"):
            output = llm.generate(PROMPTS[0], greedy(1, lora=name))[0]
            cached.setdefault(name, []).append(output.usage.cached_tokens)
    assert {first for first, _ in cached.values()} == {0}
    assert min(second for _, second in cached.values()) >= 32
    same = llm.generate(PROMPTS[0], greedy(1, lora="same"))[0]
    assert same.usage.cached_tokens >= 32, "the same file and scale have the same K and V"
    salted = llm.generate(PROMPTS[0], greedy(1, lora="one", cache_salt="tenant"))[0]
    assert salted.usage.cached_tokens == 0


def test_a_scale_of_zero_is_the_model(llm: LLM, files: dict[str, Adapted]) -> None:
    llm.load_lora("off", files["one"].adapter, 0.0)
    on, off, base = (tokens(llm.generate(PROMPTS[0], greedy(lora=name))[0]) for name in ("one", "off", ""))
    assert off == base != on


def test_samples_stream_and_chat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=1, lora="two")
    answers = tokens(llm.generate(PROMPTS[0], params)[0])
    assert answers == tokens(llm.generate(PROMPTS[0], params)[0])
    with_other = llm.generate([PROMPTS[0]] * 3, [params, greedy(lora="one"), greedy()])
    assert tokens(with_other[0]) == answers
    streamed = [piece.token_ids for piece in llm.stream(PROMPTS[0], greedy(lora="one"))]
    assert sum(streamed, ()) == with_other[1].outputs[0].token_ids
    chats = [llm.chat([{"role": "user", "content": "Hi"}], greedy(lora=name)) for name in NAMES]
    assert len({tuple(tokens(chat)) for chat in chats}) == 3


def test_sessions_and_forks_keep_their_adapter(llm: LLM, files: dict[str, Adapted]) -> None:
    with llm.session(PROMPTS[0], lora="one") as session:
        first = session.generate(greedy(6))
        with session.fork() as twin:
            assert (
                twin.generate(greedy(6)).outputs[0].token_ids
                == session.generate(greedy(6, lora="one")).outputs[0].token_ids
            )
            for wrong in ("two", ""):
                with pytest.raises(RequestError, match="a session keeps its own"):
                    twin.generate(greedy(2, lora=wrong))
    assert (
        first.outputs[0].token_ids == llm.generate(PROMPTS[0], greedy(6, lora="one"))[0].outputs[0].token_ids
    )
    with (
        LLM(files["one"].merged, n_ctx=512, deterministic=True, n_threads=1) as merged,
        merged.session(PROMPTS[0]) as other,
    ):
        assert other.generate(greedy(6)).outputs[0].token_ids == first.outputs[0].token_ids


def test_beams(llm: LLM, files: dict[str, Adapted]) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, lora="two")
    found = llm.beam_search(PROMPTS, params)
    with LLM(files["two"].merged, n_ctx=512, deterministic=True, n_threads=1) as merged:
        wanted = merged.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    assert [tokens(each) for each in found] == [tokens(each) for each in wanted]
    with pytest.raises(RequestError, match="lora='three'"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(lora="three"))


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24])
def test_small_pools(swap_bytes: int, tiny_model_f32: Path, files: dict[str, Adapted], alone: Any) -> None:
    """Requests of all adapters preempt each other, by swap and by computing again, and keep every bit."""
    loras = {name: each.adapter for name, each in files.items()}
    pairs = [(name, prompt) for prompt in PROMPTS for name in NAMES] * 3
    settings: dict[str, Any] = {"n_ctx": 256, "kv_cache_bytes": 1 << 19, "swap_bytes": swap_bytes}
    with LLM(tiny_model_f32, lora=loras, deterministic=True, n_threads=1, **settings) as llm:
        params = [greedy(100, lora=name) for name, _ in pairs]
        outputs = llm.generate([prompt for _, prompt in pairs], params)
        stats = llm.stats()
        assert stats.preemptions > 0
        assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)
        for pair, output in zip(pairs, outputs, strict=True):
            assert output.outputs[0].token_ids[:12] == alone[pair]
            assert len(output.outputs[0].token_ids) == 100
    by_pair: dict[tuple[str, str], set[Any]] = {}
    for pair, output in zip(pairs, outputs, strict=True):
        by_pair.setdefault(pair, set()).add(output.outputs[0].token_ids)
    assert all(len(answers) == 1 for answers in by_pair.values())


def test_vectors(llm: LLM, files: dict[str, Adapted]) -> None:
    with LLM(files["one"].merged, n_ctx=512, n_threads=1) as merged:
        wanted = merged.embed(PROMPTS, pooling="mean")
    got, base = llm.embed(PROMPTS, pooling="mean", lora="one"), llm.embed(PROMPTS, pooling="mean")
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert np.abs(base - wanted).max() > 1e-2
    with pytest.raises(RequestError, match="lora='three'"):
        llm.embed("x", pooling="mean", lora="three")


def test_an_encoder(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("--arch", "bert", *SMALL, "--kv-heads", "4", "--type", "f32", "--pooling", "mean")
    made = adapt(model, tmp_path, weights=r"blk\.\d+\.attn_(q|k|v)\.weight", gain=2.0)
    with LLM(model, n_threads=1) as llm, LLM(made.merged, n_threads=1) as merged:
        base = llm.embed(PROMPTS)
        llm.load_lora("one", made.adapter)
        np.testing.assert_allclose(llm.embed(PROMPTS, lora="one"), merged.embed(PROMPTS), atol=1e-5)
        np.testing.assert_array_equal(llm.embed(PROMPTS), base)
        assert np.abs(base - merged.embed(PROMPTS)).max() > 1e-3
        llm.unload_lora("one")
        with pytest.raises(RequestError, match="no adapter is loaded"):
            llm.embed(PROMPTS, lora="one")
    with LLM(model, n_threads=1, lora=made.adapter) as llm:
        assert np.abs(base - llm.embed(PROMPTS)).max() > 1e-3


def test_a_single_adapter_is_the_default(tiny_model_f32: Path, files: dict[str, Adapted], alone: Any) -> None:
    for given in (files["one"].adapter, (str(files["one"].adapter), 1)):
        with LLM(tiny_model_f32, lora=given, n_ctx=512, deterministic=True, n_threads=1) as llm:
            assert list(llm.loras) == ["one"]
            for name, lora in (("one", None), ("one", "one"), ("", "")):
                got = llm.generate(PROMPTS[0], greedy(lora=lora))[0].outputs[0].token_ids
                assert got == alone[name, PROMPTS[0]]
            with llm.session(PROMPTS[0]) as session:
                assert session.generate(greedy()).outputs[0].token_ids == alone["one", PROMPTS[0]]
            llm.unload_lora("one")
            got = llm.generate(PROMPTS[0], greedy())[0].outputs[0].token_ids
            assert got == alone["", PROMPTS[0]]


def test_load_list_and_unload(tiny_model_f32: Path, files: dict[str, Adapted], alone: Any) -> None:
    with LLM(tiny_model_f32, n_ctx=512, deterministic=True, n_threads=1) as llm:
        with pytest.raises(RequestError, match="lora='one': no adapter is loaded"):
            llm.generate("x", greedy(lora="one"))
        assert llm.loras == {}
        base = llm.generate(PROMPTS[0], greedy())[0].outputs[0].token_ids
        info = llm.load_lora("one", files["one"].adapter)
        assert llm.loras == {"one": info}
        assert (info.name, info.scale, info.rank, info.n_weights) == ("one", 1.0, 8, 14)
        assert info.n_bytes >= 14 * 8 * 256 * 4
        with pytest.raises(ConfigError, match="there is an adapter 'one'"):
            llm.load_lora("one", files["two"].adapter)
        llm.load_lora("two", str(files["two"].adapter))
        for name in NAMES:
            got = llm.generate(PROMPTS[0], greedy(lora=name))[0].outputs[0].token_ids
            assert got == alone[name, PROMPTS[0]]
        with pytest.raises(RequestError, match="lora='three': there are 'one', 'two'"):
            llm.generate("x", greedy(lora="three"))
        llm.unload_lora("one")
        with pytest.raises(RequestError, match="lora='one': there are 'two'"):
            llm.unload_lora("one")
        assert llm.generate(PROMPTS[0], greedy())[0].outputs[0].token_ids == base
        for _ in range(3):
            llm.load_lora("one", files["one"].adapter)
            assert (
                llm.generate(PROMPTS[0], greedy(lora="one"))[0].outputs[0].token_ids
                == alone["one", PROMPTS[0]]
            )
            llm.unload_lora("one")
    with pytest.raises(ClosedError):
        llm.load_lora("one", files["one"].adapter)
    with pytest.raises(ClosedError):
        llm.unload_lora("two")


def test_an_adapter_in_use_is_not_unloaded(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], greedy(50, lora="one"))
    next(stream)
    with pytest.raises(RequestError, match="1 request uses the adapter 'one': wait for the end"):
        llm.unload_lora("one")
    llm.unload_lora("two")
    stream.close()
    llm.unload_lora("one")
    assert llm.loras == {}


def test_what_was_prepared_before_an_unload(llm: LLM, files: dict[str, Adapted]) -> None:
    """A stream that has not begun and a session do not use the adapter; later they cannot."""
    stream = llm.stream(PROMPTS[0], greedy(lora="one"))
    session = llm.session(PROMPTS[0], lora="one")
    session.generate(greedy(2))
    llm.unload_lora("one")
    with pytest.raises(ClosedError, match="the adapter 'one' was unloaded"):
        next(stream)
    with pytest.raises(RequestError, match="the session's adapter 'one' was unloaded"):
        session.generate(greedy(2))
    llm.load_lora("one", files["one"].adapter)
    with pytest.raises(RequestError, match="the session's adapter 'one' was unloaded"):
        session.generate(greedy(2))
    session.close()
    assert llm.generate(PROMPTS[0], greedy(2, lora="one"))
    assert llm.stats().blocks_used == 0


def test_threads_load_unload_and_ask(tiny_model_f32: Path, files: dict[str, Adapted], alone: Any) -> None:
    errors: list[BaseException] = []

    def work(name: str, llm: LLM) -> None:
        try:
            for number in range(6):
                lora = f"{name}-{number}"
                llm.load_lora(lora, files[name].adapter)
                got = llm.generate(PROMPTS[0], greedy(lora=lora))[0].outputs[0].token_ids
                assert got == alone[name, PROMPTS[0]]
                llm.embed("x", pooling="mean", lora=lora)
                llm.unload_lora(lora)
        except BaseException as error:
            errors.append(error)

    with LLM(tiny_model_f32, n_ctx=512, deterministic=True, n_threads=1) as llm:
        threads = [threading.Thread(target=work, args=(name, llm)) for name in ("one", "two", "one")][:2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert llm.loras == {}


def test_a_call_from_within_a_step_is_refused(
    llm: LLM, files: dict[str, Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler may make one: it would wait for its own step."""
    context, errors = llm._engine.context, []
    run = context.run

    def running(*arguments: Any) -> None:
        for call in (lambda: llm.load_lora("new", files["one"].adapter), lambda: llm.unload_lora("one")):
            with pytest.raises(EngineError, match="would wait for the step"):
                call()
            errors.append(call)
        run(*arguments)

    monkeypatch.setattr(context, "run", running)
    llm.generate(PROMPTS[0], greedy(1))
    assert len(errors) == 2
    assert list(llm.loras) == ["one", "two"]


def test_asyncio(tiny_model_f32: Path, files: dict[str, Adapted], alone: Any) -> None:
    async def body() -> None:
        loras = {"one": (files["one"].adapter, 1.0)}
        async with AsyncLLM(tiny_model_f32, lora=loras, n_ctx=512, deterministic=True, n_threads=1) as llm:
            await llm.load_lora("two", files["two"].adapter)
            assert list(llm.loras) == ["one", "two"]
            asked = [llm.generate(PROMPTS[0], greedy(lora=name)) for name in NAMES]
            for name, (output,) in zip(NAMES, await asyncio.gather(*asked), strict=True):
                assert output.outputs[0].token_ids == alone[name, PROMPTS[0]]
            async with await llm.session(PROMPTS[0], lora="two") as session:
                output = await session.generate(greedy())
                assert output.outputs[0].token_ids == alone["two", PROMPTS[0]]
            vectors = await llm.embed("x", pooling="mean", lora="one")
            assert np.abs(vectors - await llm.embed("x", pooling="mean")).max() > 1e-3
            stream = llm.stream(PROMPTS[0], greedy(40, lora="two"))
            await anext(stream)
            with pytest.raises(RequestError, match="uses the adapter 'two'"):
                await llm.unload_lora("two")
            await stream.aclose()
            await llm.unload_lora("two")
            with pytest.raises(ModelError, match="cannot read"):
                await llm.load_lora("two", "absent.gguf")

    asyncio.run(asyncio.wait_for(body(), 120))


def test_a_recurrent_model(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("--arch", "lfm2", *SMALL, "--type", "f32")
    made = [adapt(model, tmp_path, name=name, seed=seed) for seed, name in enumerate(NAMES[1:], 1)]
    wanted = []
    for path in (model, *(each.merged for each in made)):
        with LLM(path, n_ctx=256, n_threads=1) as llm:
            wanted.append(llm.generate(PROMPTS[0], greedy(6))[0].outputs[0].token_ids)
    loras = dict(zip(NAMES[1:], (each.adapter for each in made), strict=True))
    with LLM(model, lora=loras, n_ctx=256, n_threads=1, max_num_seqs=2) as llm:
        outputs = llm.generate([PROMPTS[0]] * 6, [greedy(6, lora=name) for name in NAMES] * 2)
    assert [output.outputs[0].token_ids for output in outputs] == wanted * 2


def test_a_weight_without_adapters_in_the_graph(make_model: MakeModel, tmp_path: Path) -> None:
    """The engine goes on as before when the graph refuses an adapter."""
    model = make_model("--arch", "lfm2", "--layers", "2", "--type", "f32")
    made = adapt(model, tmp_path, weights=r"blk\.\d+\.shortconv\.conv\.weight", rank=2, merge=False)
    with LLM(model, n_ctx=256, n_threads=1) as llm:
        before = tokens(llm.generate("x", greedy(3))[0])
        with pytest.raises(UnsupportedError, match=r"does not fit the model: .*applies no adapter to blk"):
            llm.load_lora("conv", made.adapter)
        assert llm.loras == {}
        assert tokens(llm.generate("x", greedy(3))[0]) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "lora=3: give a path"),
        (["a", "b", "c"], "give a path"),
        ({"": "a.gguf"}, "the name of an adapter is ''"),
        ({3: "a.gguf"}, "the name of an adapter is 3"),
        ({"a": 3}, "give a path"),
        ({"a": ("a.gguf", "x")}, "the scale of the adapter 'a' is 'x'"),
        ({"a": ("a.gguf", float("nan"))}, "the scale of the adapter 'a' is nan"),
        ({"a": ("a.gguf", True)}, "the scale of the adapter 'a' is True"),
        ({"a": ("a.gguf", 10**400)}, "the scale of the adapter 'a' is 1000"),
    ],
)
def test_wrong_settings(given: Any, message: str, tiny_model_f32: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model_f32, lora=given)


def test_foreign_files_at_the_start(tiny_model_f32: Path, files: dict[str, Adapted], tmp_path: Path) -> None:
    assert make.main(["--arch", "qwen3", "--type", "f32", str(tmp_path / "qwen3.gguf")]) == 0
    other = adapt(tmp_path / "qwen3.gguf", tmp_path, merge=False)
    assert make.main(["tiny", "--embd", "128", "--type", "f32", str(tmp_path / "small.gguf")]) == 0
    small = adapt(tmp_path / "small.gguf", tmp_path, name="small", merge=False)
    for path, kind, message in (
        (other.adapter, ModelError, "for the architecture 'qwen3', but the model is 'llama'"),
        (small.adapter, ModelError, "need .*another model"),
        (tiny_model_f32, UnsupportedError, "is no adapter"),
    ):
        with pytest.raises(kind, match=message):
            LLM(tiny_model_f32, lora=path)
        with LLM(tiny_model_f32, n_ctx=256, n_threads=1) as llm:
            with pytest.raises(kind, match=message):
                llm.load_lora("a", path)
            assert llm.loras == {}
            assert llm.generate("x", greedy(2))


def test_a_name_on_the_hub(
    tiny_model_f32: Path, files: dict[str, Adapted], alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def locate(name: str) -> str:
        asked.append(name)
        return str(files["one"].adapter)

    monkeypatch.setattr(engine_adapters, "locate", locate)
    with LLM(tiny_model_f32, lora="org/one:Q8_0", n_ctx=512, deterministic=True, n_threads=1) as llm:
        llm.load_lora("again", "org/one")
        assert [info.path for info in llm.loras.values()] == [str(files["one"].adapter)] * 2
        assert llm.generate(PROMPTS[0], greedy())[0].outputs[0].token_ids == alone["one", PROMPTS[0]]
    assert asked == ["org/one:Q8_0", "org/one"]


def test_bytes_are_counted(tiny_model_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool leaves room for the adapters of the settings; a later one must fit."""
    made = adapt(tiny_model_f32, tmp_path, rank=64, merge=False)
    with LLM(tiny_model_f32, n_threads=1, n_ctx=256) as llm:
        block_bytes = llm.geometry.block_bytes
        free = llm.info.size_bytes + 300 * block_bytes
        n_bytes = llm.load_lora("large", made.adapter).n_bytes
        monkeypatch.setattr(engine_adapters, "free_memory", lambda: 1000)
        with pytest.raises(OutOfMemory, match="but only 1000 are free"):
            llm.load_lora("more", made.adapter)
        assert list(llm.loras) == ["large"]

    def pool_bytes(**settings: Any) -> int:
        with LLM(tiny_model_f32, memory_utilization=1.0, n_threads=1, **settings) as llm:
            return llm.stats().blocks_total * block_bytes

    monkeypatch.undo()
    monkeypatch.setattr("pyvelo.engine.engine.free_memory", lambda: free)
    lost = pool_bytes() - pool_bytes(lora=made.adapter)
    grain = 256 // 32 * block_bytes
    assert n_bytes > 3 * grain
    assert n_bytes - grain <= lost <= n_bytes + grain


def test_closing_beside_requests(tiny_model_f32: Path, files: dict[str, Adapted]) -> None:
    llm = LLM(tiny_model_f32, lora=files["one"].adapter, n_ctx=512, n_threads=1)
    stream = llm.stream(PROMPTS[0], greedy(100))
    next(stream)
    llm.close()
    assert list(stream)[-1].finish_reason == "abort"
    llm = LLM(tiny_model_f32, lora=files["one"].adapter, n_ctx=512, n_threads=1)
    session = llm.session(PROMPTS[0])
    session.generate(greedy(2))
    del llm
    session.generate(greedy(2))
    del session
    with LLM(tiny_model_f32, n_ctx=512, n_threads=1) as other:
        assert other.generate("x", greedy(1))


@pytest.mark.parametrize("ending", ["drop", "close"])
def test_no_adapter_outlives_its_engine(ending: str, tiny_model_f32: Path, files: dict[str, Adapted]) -> None:
    """Without a garbage collection, also after errors."""
    gc.collect()
    gc.disable()
    try:
        llm = LLM(tiny_model_f32, lora={"one": files["one"].adapter}, n_ctx=512, n_threads=1)
        llm.load_lora("two", files["two"].adapter)
        llm.generate([PROMPTS[0]] * 2, [greedy(2, lora=name) for name in ("one", "two")])
        llm.embed("x", pooling="mean", lora="two")
        with pytest.raises(RequestError):
            llm.generate("x", greedy(1, lora="three"))
        adapters = [adapter for _, adapter in llm._engine.loras.loaded.adapters.values()]
        assert not any(adapter.closed for adapter in adapters)
        engine = weakref.ref(llm._engine)
        if ending == "close":
            llm.close()
        del llm
        assert engine() is None
        assert all(adapter.closed for adapter in adapters)
    finally:
        gc.enable()
