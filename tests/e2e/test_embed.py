"""LLM.embed: against BERT in NumPy, against upstream's own pooling, alone and batched; refused input."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from cffi import FFI
from hypothesis import strategies as st

from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.engine import embedding
from pyvelo.errors import ClosedError, ModelError, RequestError, UnsupportedError
from scripts.models import _shapes, make

from . import bert
from .conftest import MakeModel

SMALL = ("--layers", "2", "--embd", "128", "--heads", "2", "--kv-heads", "2", "--head-dim", "64")
TEXTS = ["Once upon a time", "the old king", "", [5, 9, 300], [3 + 7 * i % 900 for i in range(500)], [8]]
TEXTS += [[3 + (i * j + i) % 1000 for j in range(1 + i % 40)] for i in range(100)]
POOLINGS = {"mean": 1, "cls": 2, "last": 3}
KINDS = ["bert", "nomic-bert", "t5encoder", "qwen3", "gemma3", "lfm2"]
KINDS += ["gpt-oss --experts 4", "gemma4", "qwen35"]  # with hidden states for multi-token prediction
HALF = 2.0**-11
"""ggml's GELU is a table over halves: a sum that another batch rounds otherwise may find its neighbour."""


@pytest.fixture(scope="module")
def bert_model(make_model: MakeModel) -> Path:
    return make_model("--arch", "bert", *SMALL, "--ctx", "600", "--type", "f32", "--pooling", "cls")


@pytest.fixture(scope="module")
def shared(bert_model: Path) -> Iterator[LLM]:
    with LLM(bert_model, n_threads=1) as made:
        yield made


def length(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(np.linalg.norm(rows, axis=-1, keepdims=True))


def error(expected: npt.NDArray[np.float64], actual: npt.NDArray[np.float32]) -> float:
    """The largest distance of two rows, by the length of the expected one."""
    return float((length(expected - actual) / length(expected)).max())


# ---- the right numbers ----


@pytest.fixture(scope="module")
def token_vectors(shared: LLM, bert_model: Path) -> list[npt.NDArray[np.float64]]:
    """Return what NumPy computes for each token of the first texts."""
    weights = bert.load(bert_model)
    tokens = [shared.tokenize(text) if isinstance(text, str) else text for text in TEXTS[:20]]
    return [bert.token_vectors(weights, t, 2, 2) for t in tokens]


@pytest.mark.parametrize("pooling", [None, "mean", "cls", "last"])
def test_bert_is_bert(shared: LLM, token_vectors: list[npt.NDArray[np.float64]], pooling: str | None) -> None:
    pool = {"mean": lambda x: x.mean(0), None: lambda x: x[0], "cls": lambda x: x[0], "last": lambda x: x[-1]}
    texts = TEXTS[:20]
    expected = np.stack([pool[pooling](vectors) for vectors in token_vectors])
    given = shared.embed(texts, pooling=pooling, normalize=False)
    assert given.dtype == np.float32
    assert given.shape == (20, 128) == (20, shared.info.n_embd_out)
    assert error(expected, given) < HALF
    assert error(expected[::-1], given) > 0.1, "the texts differ by more than that"
    unit = shared.embed(texts, pooling=pooling)
    assert error(expected / length(expected), unit) < HALF
    assert np.allclose(length(unit), 1)


def by_upstream(
    library: Path, path: Path, tokens: Sequence[int], pooling: int, n_embd: int, n_ctx: int = 512
) -> np.ndarray:
    ffi = FFI()
    ffi.cdef("int32_t stock_embed(const char *, int32_t, int32_t, const int32_t *, int32_t, float *);")
    out = np.empty(n_embd, np.float32)
    given = ffi.from_buffer("int32_t[]", np.asarray(tokens, np.int32))
    stock, target = ffi.dlopen(str(library)).stock_embed, ffi.from_buffer("float[]", out)
    assert stock(str(path).encode(), pooling, n_ctx, given, len(tokens), target) == 0
    return out


@pytest.mark.parametrize("arch", KINDS)
def test_the_vectors_are_upstreams(make_model: MakeModel, patched_library: Path, arch: str) -> None:
    path = make_model("--arch", *arch.split(), *SMALL, "--ctx", "600", "--type", "f32", "--pooling", "last")
    texts = [text for text in TEXTS[3:12] if isinstance(text, list)]
    with LLM(path, n_ctx=512, n_threads=1) as llm:
        for name, number in POOLINGS.items():
            given = llm.embed(texts, pooling=name, normalize=False)
            alone = np.concatenate([llm.embed([text], pooling=name, normalize=False) for text in texts])
            expected = np.stack([by_upstream(patched_library, path, t, number, 128) for t in texts])
            assert error(expected, alone) < 1e-5
            assert error(expected, given) < HALF
        assert np.array_equal(llm.embed(texts), llm.embed(texts, pooling="last"))


@pytest.mark.parametrize("arch", KINDS)
def test_a_batch_makes_no_difference(make_model: MakeModel, arch: str) -> None:
    path = make_model("--arch", *arch.split(), *SMALL, "--ctx", "600", "--type", "f32", "--pooling", "last")
    with LLM(path, n_threads=1) as llm:
        together = llm.embed(TEXTS, pooling="mean")
        for number in (0, 1, 3, 4, 5, 40, 105):
            alone = llm.embed(TEXTS[number], pooling="mean")
            assert alone.shape == (1, 128)
            assert error(together[number : number + 1], alone) < HALF
        assert llm.embed([], pooling="mean").shape == (0, 128)


@pytest.mark.parametrize("arch", ["bert", "llama"])
def test_deterministic_vectors_have_the_same_bits_in_any_batch(make_model: MakeModel, arch: str) -> None:
    """A text beside others, and after one so long that its context rounds otherwise, is as the text alone."""
    path = make_model("--arch", arch, *SMALL, "--ctx", "2048", "--type", "q8_0", "--pooling", "mean")
    texts = [[3 + (i * i + n) % 900 for i in range(n)] for n in (1, 5, 100, 255, 37, 2)]
    with LLM(path, n_threads=1, deterministic=True) as llm:
        alone = np.concatenate([llm.embed([text]) for text in texts])
        assert np.array_equal(llm.embed(texts), alone)
        llm.embed([[3 + i % 900 for i in range(1500)]])
        assert np.array_equal(llm.embed(texts), alone)


def test_attention_to_both_sides_takes_a_text_whole(
    tmp_path: Path, patched_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A llama whose file says that it is not causal has a cache, but must not be read in pieces, or write."""

    keys = _shapes.metadata
    monkeypatch.setattr(_shapes, "metadata", lambda shape: keys(shape) | {"llama.attention.causal": False})
    path = tmp_path / "both.gguf"
    make.write_model(_shapes.Shape(ctx=2048, pooling="mean"), path)
    texts = [[3 + i * i % 900 for i in range(n)] for n in (5, 300, 700)]
    with LLM(path, n_threads=1) as llm:
        given = llm.embed(texts, normalize=False)
        expected = np.stack([by_upstream(patched_library, path, text, 1, 256, 1024) for text in texts])
        assert error(expected, given) < 1e-4
        with pytest.raises(UnsupportedError, match=r"\(llama\) embeds texts and generates none"):
            llm.generate("Hello")


def test_a_long_text_in_pieces_is_one_text(make_model: MakeModel) -> None:
    path = make_model("--arch", "qwen3", *SMALL, "--ctx", "4096", "--type", "f32", "--pooling", "last")
    text = [3 + (i * i) % 1000 for i in range(1500)]  # batches are of 512 tokens
    with LLM(path, n_threads=1) as llm:
        first = llm.embed([text[:400]])  # room for fewer
        whole = {name: llm.embed(text, pooling=name) for name in POOLINGS}
        assert error(first, llm.embed([text[:400]])) < 1e-5
        assert error(whole["cls"], llm.embed(text[:1], pooling="cls")) < 1e-5, "the first sees only itself"
        # each token is the last of the text up to there
        vectors = [llm.embed([text[: i + 1] for i in range(1490, 1500)], pooling="last", normalize=False)]
        assert error(whole["last"], vectors[0][-1:] / length(vectors[0][-1:])) < 1e-5
        sums = [llm.embed(text[:n], pooling="mean", normalize=False)[0] * n for n in (1490, 1500)]
        assert error(vectors[0].sum(0), sums[1] - sums[0]) < 1e-2


@hypothesis.given(lengths=st.lists(st.integers(1, 1500), max_size=200))
def test_groups_are_small_and_leave_nothing_out(lengths: list[int]) -> None:
    texts = [range(n) for n in lengths]
    groups = [texts[group] for group in embedding._groups(texts)]
    assert [text for group in groups for text in group] == texts
    for group in groups:
        assert 1 <= len(group) <= embedding.GROUP_TEXTS
        assert len(group) == 1 or sum(map(len, group)) <= embedding.GROUP_TOKENS


# ---- a model that generates goes on ----


def test_embeddings_beside_answers(tiny_model_f32: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(tiny_model_f32, n_ctx=512, deterministic=True, n_threads=1) as llm:
        before = llm.generate("Once upon a time", params)[0].token_ids
        vectors = llm.embed(TEXTS, pooling="mean")
        found: list[np.ndarray] = []
        threads = [
            threading.Thread(target=lambda: found.append(llm.embed(TEXTS, pooling="mean"))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert llm.generate("Once upon a time", params)[0].token_ids == before
        for thread in threads:
            thread.join()
        assert all(error(vectors, other) < 1e-4 for other in found)
        assert len(found) == 3
        assert llm.stats().blocks_used == 0


def test_asyncio_embeds_too(bert_model: Path, shared: LLM) -> None:
    async def main() -> tuple[np.ndarray, str]:
        async with AsyncLLM(bert_model, n_threads=1) as llm:
            vectors = await llm.embed(TEXTS)
            task = asyncio.create_task(llm.embed(TEXTS * 200))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(UnsupportedError, match="use embed") as refused:
                await llm.generate("Hello")
            assert (await llm.embed("Hello")).shape == (1, 128)
            return vectors, str(refused.value)

    vectors, message = asyncio.run(main())
    assert np.array_equal(vectors, shared.embed(TEXTS))
    assert "(bert) embeds texts and generates none" in message


# ---- what is refused ----


def test_what_needs_a_generator_says_so(shared: LLM) -> None:
    asked = [
        lambda: shared.generate("Hello"),
        lambda: shared.stream("Hello"),
        lambda: shared.chat([{"role": "user", "content": "Hello"}]),
        lambda: shared.chat_stream([{"role": "user", "content": "Hello"}]),
        lambda: shared.beam_search("Hello"),
        lambda: shared.session("Hello"),
        lambda: shared.stats(),
        lambda: shared.geometry,
        lambda: shared.reset_prefix_cache(),
        lambda: shared.trace("run.trace"),
    ]
    for ask in asked:
        with pytest.raises(UnsupportedError, match=r"\(bert\) embeds texts and generates none: use embed"):
            ask()
    assert shared.n_ctx == 600
    assert shared.detokenize(shared.tokenize("the old king")).strip().endswith("the old king")


def test_wrong_texts_are_refused_with_the_numbers(shared: LLM) -> None:
    wrong = {
        "text 1 has 601 tokens, but n_ctx=600": [[5], [5] * 601],
        "text 0 has no tokens": [[]],
        "text 2: token 1096 does not exist": [[1], [2], [1096]],
        "text 0: token -1 does not exist": [[-1]],
        r"text 1 is \[1.5\]: give a string or a list of token ids": ["a", [1.5]],
        "the prompt is 5: give a string": 5,
    }
    for message, texts in wrong.items():
        with pytest.raises(RequestError, match=message):
            shared.embed(texts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="pooling='max': give one of 'mean', 'cls', 'last'"):
        shared.embed("Hello", pooling="max")
    assert shared.embed([5] * 600).shape == (1, 128)


def test_n_ctx_is_the_longest_text(bert_model: Path) -> None:
    with LLM(bert_model, n_ctx=100) as llm, pytest.raises(RequestError, match="101 tokens, but n_ctx=100"):
        llm.embed([[5] * 101])
    with LLM(bert_model, n_ctx=4000) as llm:
        assert llm.n_ctx == 600, "there are no more positions"


def test_a_model_without_a_pooling_wants_one_named(tiny_model_f32: Path, make_model: MakeModel) -> None:
    with LLM(tiny_model_f32, n_threads=1, n_ctx=128) as llm:
        with pytest.raises(RequestError, match=r"does not say how .* name one of 'mean', 'cls', 'last'"):
            llm.embed("Hello")
        assert llm.embed("Hello", pooling="mean").shape == (1, 256)
    ranker = make_model("--arch", "bert", *SMALL, "--ctx", "600", "--pooling", "rank")
    with LLM(ranker) as llm:
        with pytest.raises(UnsupportedError, match="scores texts instead of embedding them"):
            llm.embed("Hello")
        assert llm.embed("Hello", pooling="cls").shape == (1, 128)


def test_a_file_that_becomes_shorter_is_an_error(bert_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(bert_model.read_bytes())
    with LLM(path) as llm:
        llm.embed("Hello")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 4096)
        with pytest.raises(ModelError, match="became shorter"):
            llm.embed("Hello")


# ---- ends ----


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_close_ends_what_runs(bert_model: Path, seconds: float) -> None:
    llm = LLM(bert_model, n_threads=1)
    llm.embed("Hello")
    raised: list[Exception] = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        try:
            while True:
                llm.embed([[5] * 400] * 100)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    time.sleep(seconds)
    llm.close()
    thread.join(timeout=60)
    assert [type(error) for error in raised] == [ClosedError]
    with pytest.raises(ClosedError):
        llm.embed("Hello")
    llm.close()


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_ends_a_long_embedding(shared: LLM) -> None:
    shared.embed("Hello")
    # few enough that they are checked before the signal comes, and minutes of work
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        shared.embed([[5] * 600] * 3_000)
    timer.join()
    assert shared.embed("Hello").shape == (1, 128)
