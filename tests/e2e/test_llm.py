"""LLM on a real model: answers, streams, refusals, failures, numbers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyvelo
from pyvelo import LLM, SamplingParams
from pyvelo.errors import (
    ClosedError,
    ComputeError,
    ConfigError,
    ModelError,
    OutOfBlocks,
    OutOfMemory,
    RequestError,
)

PROMPTS = ["Once upon a time", "Hello world", [5, 6, 7], "the cat and the hat"]


def greedy(max_tokens: int | None = 12, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **settings)


def audit(llm: LLM) -> None:
    """Nothing runs, nothing is held."""
    with llm._engine.loop.visit() as core:
        core.manager.audit()
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_reserved) == (0, 0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@pytest.fixture(scope="module")
def shared_llm(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """An engine that every test must leave as it found it."""
    yield shared_llm
    audit(shared_llm)


# ---- answers ----


def test_one_prompt_or_several_text_or_tokens(llm: LLM) -> None:
    params = greedy()
    text, ids = llm.generate("Hello world", params), llm.generate([5, 6, 7], params)
    assert (len(text), len(ids)) == (1, 1)
    both = llm.generate(["Hello world", [5, 6, 7]], params)
    assert [output.token_ids for output in both] == [text[0].token_ids, ids[0].token_ids]
    assert [output.prompt for output in both] == ["Hello world", None]
    assert both[0].prompt_token_ids == tuple(llm.tokenize("Hello world"))
    assert llm.generate([], params) == []
    assert llm.generate(np.array([5, 6, 7]), params)[0].token_ids == ids[0].token_ids
    assert llm.generate(([5, 6, 7],), params)[0].token_ids == ids[0].token_ids


def test_an_answer_has_what_the_design_says(llm: LLM) -> None:
    (output,) = llm.generate("Hello world", greedy(8))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 8
    assert output.text == output.outputs[0].text
    assert output.error is None
    usage = output.usage
    n_prompt = len(llm.tokenize("Hello world"))
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (n_prompt, 0, 8)
    assert usage.total_tokens == n_prompt + 8


def test_prompt_and_answer_make_the_text_of_the_whole(llm: LLM) -> None:
    """The tokenizer marks words by a space in front: it is kept between prompt and answer."""
    for output in llm.generate(PROMPTS, greedy(20)):
        prompt = list(output.prompt_token_ids)
        assert llm.detokenize(prompt + list(output.token_ids)) == llm.detokenize(prompt) + output.text
        assert output.text.startswith(" ")


def test_batched_as_alone(llm: LLM) -> None:
    params = greedy(30)
    together = llm.generate(PROMPTS * 3, params)
    alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_tokens": 7, "max_num_seqs": 3},
        {"kv_cache_bytes": 512 * 2048, "max_num_seqs": 2},
        {"block_size": 128},
    ],
    ids=["pieces", "waiting", "blocks"],
)
def test_the_same_tokens_however_the_work_is_cut(llm: LLM, tiny_model_f32: Path, settings: Any) -> None:
    prompts = [[i] * n for i, n in ((3, 100), (4, 1), (5, 33), (6, 64), (7, 120), (8, 31))]
    expected = [output.token_ids for output in llm.generate(prompts, greedy(40))]
    with LLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1, **settings) as other:
        assert [output.token_ids for output in other.generate(prompts, greedy(40))] == expected
        audit(other)


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "q8_0", ("q8_0", "q4_0"), "iq4_nl"])
def test_kv_types(tiny_model_f32: Path, kv_type: Any) -> None:
    with LLM(tiny_model_f32, kv_type=kv_type, n_ctx=256, n_threads=1) as llm:
        (output,) = llm.generate("Once upon a time", greedy(40))
        assert len(output.token_ids) == 40
        stats = llm.stats()
        assert stats.block_bytes == llm.geometry.block_bytes == llm.geometry.token_bytes * 32
        audit(llm)


def test_parameters_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["Hello"] * 3, [greedy(n) for n in (1, 5, 3)])
    assert [len(output.token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(RequestError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["Hello"] * 3, [greedy()] * 2)


def test_seeded_draws_repeat_and_samples_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, seed=11)
    first, second = llm.generate(["Hello"] * 2, params)
    assert [sample.token_ids for sample in first.outputs] == [sample.token_ids for sample in second.outputs]
    assert len({sample.token_ids for sample in first.outputs}) == 3
    assert [sample.index for sample in first.outputs] == [0, 1, 2]
    assert first.usage.completion_tokens == 36
    (alone,) = llm.generate("Hello", SamplingParams(max_tokens=12, seed=12))
    assert alone.token_ids == first.outputs[1].token_ids


def test_the_engines_seed(tiny_model_f32: Path) -> None:
    def answers(seed: int | None) -> list[Any]:
        with LLM(tiny_model_f32, n_ctx=256, n_threads=1, seed=seed) as llm:
            return [output.token_ids for output in llm.generate(["Hello"] * 3, SamplingParams(max_tokens=12))]

    assert answers(3) == answers(3)
    assert len(set(answers(3))) == 3
    assert answers(3) != answers(4)


# ---- ends ----


def test_an_answer_ends_with_the_context(llm: LLM) -> None:
    (output,) = llm.generate([[3] * 500], greedy(100, ignore_eos=True))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 12)
    (output,) = llm.generate([[3] * 500], greedy(None, ignore_eos=True))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 12)


def test_stop_strings(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", greedy(20))
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 7]
    before = whole.text[: whole.text.index(stop)]
    (output,) = llm.generate("Hello", greedy(20, stop=["nowhere", stop]))
    assert (output.text, output.finish_reason, output.stop_reason) == (before, "stop", stop)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    pieces = list(llm.stream("Hello", greedy(20, stop=stop)))
    assert "".join(piece.text for piece in pieces) == before
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", stop)


def test_stop_tokens(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", greedy(20))
    last = whole.token_ids[5]
    first = whole.token_ids.index(last)
    (output,) = llm.generate("Hello", greedy(20, stop_token_ids=[last]))
    assert (output.token_ids, output.finish_reason) == (whole.token_ids[: first + 1], "stop")
    assert (output.stop_reason, whole.stop_reason) == (last, None)
    prompt = llm.tokenize("Hello")
    assert llm.detokenize(prompt + list(output.token_ids[:-1])) == llm.detokenize(prompt) + output.text


def test_the_models_end(llm: LLM) -> None:
    eos = llm.vocab.eos
    assert eos is not None
    only = {"logit_bias": {eos: 1000.0}}
    (output,) = llm.generate("Hello", greedy(5, **only))
    assert (output.token_ids, output.text, output.finish_reason) == ((eos,), "", "stop")
    assert output.stop_reason is None
    (output,) = llm.generate("Hello", greedy(5, ignore_eos=True, **only))
    assert (output.token_ids, output.text, output.finish_reason) == ((eos,) * 5, "", "length")


# ---- names of requests ----


def test_every_request_has_a_name_of_its_own(llm: LLM) -> None:
    outputs = llm.generate(["Hello", "Hello"], greedy(2, n=2)) + llm.beam_search(["a", "b"])
    with llm.session("Hello") as session:
        outputs += [session.generate(greedy(1)), session.generate(greedy(1))]
    pieces = list(llm.stream("Hello", greedy(3)))
    assert len({piece.request_id for piece in pieces}) == 1
    names = {output.request_id for output in outputs} | {pieces[0].request_id}
    assert len(names) == 7
    assert all(names), "none is empty"


def test_the_caller_names_a_request(llm: LLM) -> None:
    assert llm.generate("a", greedy(1), request_id="mine")[0].request_id == "mine"
    outputs = llm.generate(["a", "b"], greedy(1), request_id="mine")
    assert [output.request_id for output in outputs] == ["mine-0", "mine-1"]
    messages = [{"role": "user", "content": "Hello"}]
    assert llm.chat(messages, greedy(1), request_id="talk", chat_template="chatml").request_id == "talk"
    for pieces in (
        llm.stream("a", greedy(2, n=2), request_id="heard"),
        llm.chat_stream(messages, greedy(2, n=2), request_id="heard", chat_template="chatml"),
    ):
        assert {piece.request_id for piece in pieces} == {"heard"}


@pytest.mark.parametrize("name", ["", 7, b"a", "a" * 257])
def test_what_is_no_name_of_a_request(llm: LLM, name: Any) -> None:
    message = r"request_id=.*: give a string of 1 to 256 characters"
    with pytest.raises(RequestError, match=message):
        llm.stream("a", greedy(1), request_id=name)
    for prompts in ("a", ["a", "b"]):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, greedy(1), request_id=name)


# ---- streams ----


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    (output,) = llm.generate("Once upon a time", greedy(25))
    pieces = list(llm.stream("Once upon a time", greedy(25)))
    assert "".join(piece.text for piece in pieces) == output.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == output.token_ids
    assert all(len(piece.token_ids) == 1 for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * 24 + ["length"]


def test_the_last_piece_has_usage_and_times(llm: LLM) -> None:
    before = time.perf_counter()
    pieces = list(llm.stream("Once upon a time, there was", greedy(9)))
    (output,) = llm.generate("Once upon a time, there was", greedy(9))
    assert [piece.usage or piece.times for piece in pieces[:-1]] == [None] * 8
    last, cached = pieces[-1], pieces[-1].usage and pieces[-1].usage.cached_tokens
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (output.usage.prompt_tokens, 9)
    assert cached is not None
    assert cached < output.usage.prompt_tokens
    after = time.perf_counter()
    for times in (last.times, output.times):
        assert times is not None
        assert times.first_token is not None
        assert before <= times.queued < times.first_token < times.end <= after


def test_usage_and_times_cover_all_samples(llm: LLM) -> None:
    settings = SamplingParams(n=3, max_tokens=12, seed=1, stop=["a", "e"], temperature=1.5)
    pieces = list(llm.stream("Once upon a time", settings))
    ends = [piece for piece in pieces if piece.finish_reason is not None]
    assert sorted(piece.index for piece in ends) == [0, 1, 2]
    assert [piece.usage is not None for piece in ends] == [False, False, True]
    (output,) = llm.generate("Once upon a time", settings)
    assert ends[-1].usage is not None
    assert ends[-1].usage.completion_tokens == output.usage.completion_tokens
    assert output.usage.completion_tokens == sum(len(sample.token_ids) for sample in output.outputs)


def test_a_search_has_times(llm: LLM) -> None:
    before = time.perf_counter()
    for output in llm.beam_search(["Once", "Hello there"]):
        assert output.times.first_token is not None
        assert before < output.times.queued < output.times.first_token < output.times.end


def test_a_stream_never_splits_a_character(llm: LLM) -> None:
    """The vocabulary has a token for each byte: random draws give characters in pieces, and rubbish."""
    bytes_only = dict.fromkeys(range(3, 259), 100.0)
    params = SamplingParams(max_tokens=200, temperature=2.0, seed=5, logit_bias=bytes_only)
    (output,) = llm.generate("Hello", params)
    pieces = list(llm.stream("Hello", params))
    assert "".join(piece.text for piece in pieces) == output.text
    data = b"".join(llm._engine.model.token_bytes(token) for token in output.token_ids)
    assert output.text == data.decode("utf-8", "replace")
    assert any(0xC2 <= byte <= 0xF4 for byte in data), "there was something to split"


def test_a_stream_of_several_samples(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, n=3, seed=4)
    (output,) = llm.generate("Hello", params)
    texts = ["", "", ""]
    for piece in llm.stream("Hello", params):
        texts[piece.index] += piece.text
    assert texts == [sample.text for sample in output.outputs]


def test_a_stream_that_is_closed_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("Hello", greedy(300, ignore_eos=True))
    next(stream)
    assert llm.stats().running == 1
    stream.close()
    assert llm.stats().running == 0


def test_a_stream_that_is_dropped_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream("Hello", greedy(300, ignore_eos=True)):
        break
    unused = llm.stream("Hello", greedy(300))
    assert llm.stats().running == llm.stats().waiting == 0
    del unused


def test_streams_and_answers_interleave(llm: LLM) -> None:
    (expected,) = llm.generate("Hello", greedy(10))
    first, second = llm.stream("Hello", greedy(10)), llm.stream("Hello", greedy(10))
    pieces = []
    for piece, _ in zip(first, second, strict=True):
        pieces.append(piece.text)
        assert llm.generate("Hello", greedy(2))[0].token_ids == expected.token_ids[:2]
    assert "".join(pieces) == expected.text


# ---- refusals and failures ----


def test_what_can_never_be_served_is_refused_before_anything_starts(llm: LLM) -> None:
    steps = llm.stats().steps
    with pytest.raises(RequestError, match=r"prompts\[1\] has 512 tokens.*n_ctx=512"):
        llm.generate(["Hello", [3] * 512], greedy())
    with pytest.raises(RequestError, match="no tokens"):
        llm.stream([], greedy())
    for wrong in (5, b"bytes", {"a": 1}, None):
        with pytest.raises(RequestError, match="give a string or a list of token ids"):
            llm.generate(wrong, greedy())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="give a SamplingParams"):
        llm.generate("Hello", 5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="token 999999 does not exist"):
        llm.generate([1, 999999], greedy())
    assert llm.stats().steps == steps


def test_more_than_the_pool_holds_is_refused_with_the_numbers(tiny_model_f32: Path) -> None:
    with LLM(tiny_model_f32, kv_cache_bytes=256 * 1024, n_ctx=1024, n_threads=1) as llm:
        assert llm.stats().blocks_total == 8
        with pytest.raises(OutOfBlocks, match="300 tokens of prompt and up to 50 of answer need 11 blocks"):
            llm.generate([[3] * 300], greedy(50))
        assert len(llm.generate([[3] * 200], greedy(57, ignore_eos=True))[0].token_ids) == 57


def test_a_request_that_fails_ends_alone(llm: LLM) -> None:
    banned = dict.fromkeys(range(llm.vocab.n_tokens), -math.inf)
    params = [greedy(5), greedy(5, logit_bias=banned), greedy(5)]
    good, bad, other = llm.generate(["Hello", "Hello", "world"], params, return_errors=True)
    assert isinstance(bad.error, ComputeError)
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    assert good.error is other.error is None
    assert good.token_ids == llm.generate("Hello", greedy(5))[0].token_ids
    with pytest.raises(ComputeError):
        llm.generate(["Hello", "Hello", "world"], params)
    with pytest.raises(ComputeError):
        list(llm.stream("Hello", params[1]))


def test_a_step_that_fails_ends_its_requests_and_the_engine_lives_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = llm.generate("Hello", greedy(5))

    def fail(*arguments: Any) -> None:
        raise ComputeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.context, "run", fail)
        with pytest.raises(ComputeError, match="out of order"):
            llm.generate(["Hello", "world"], greedy(5))
    assert llm.generate("Hello", greedy(5))[0].token_ids == expected.token_ids


def test_an_interrupt_cancels_and_frees(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    context = llm._engine.context
    run, calls = context.run, []

    def interrupt(*arguments: Any) -> None:
        run(*arguments)
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    cancelled = llm.stats().requests_aborted
    with monkeypatch.context() as patch:
        patch.setattr(context, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello", "world"], greedy(100, ignore_eos=True))
    assert llm.stats().requests_aborted == cancelled + 2
    assert llm.stats().blocks_used == 0


# ---- threads ----


def test_threads_share_an_engine(llm: LLM) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS, greedy(15))]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2:
            found[number] = llm.generate([prompt], greedy(15))[0].token_ids
        else:
            stream = llm.stream(prompt, greedy(15))
            found[number] = tuple(token for piece in stream for token in piece.token_ids)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(12)] == expected * 3


# ---- numbers ----


def test_stats_are_exact(llm: LLM) -> None:
    before = llm.stats()
    stream = llm.stream([3] * 70, greedy(10, ignore_eos=True))
    next(stream)
    next(stream)
    stats = llm.stats()
    assert stats.running == 1
    assert stats.tokens_stored == 71
    assert stats.blocks_used == 3
    assert stats.blocks_reserved == 0, "79 tokens are three blocks too"
    assert stats.blocks_total == stats.blocks_used + stats.blocks_cached + stats.blocks_free
    assert stats.waste == pytest.approx(1 - 71 / 96)
    list(stream)
    after = llm.stats()
    assert after.prompt_tokens - before.prompt_tokens == 70
    assert after.completion_tokens - before.completion_tokens == 10
    assert after.steps - before.steps == 10
    assert after.requests_finished - before.requests_finished == 1
    assert after.waste == 0.0
    assert after.run_seconds > before.run_seconds


def test_bytes_are_the_allocated_ones(llm: LLM) -> None:
    stats, info = llm.stats(), llm._engine.context.info
    for name in ("block_size", "block_bytes", "pool_bytes", "state_bytes", "compute_bytes", "output_bytes"):
        assert getattr(stats, name) == getattr(info, name)
    assert stats.blocks_total == info.n_blocks
    assert stats.pool_bytes >= stats.blocks_total * stats.block_bytes
    assert stats.tokens_total == stats.blocks_total * stats.block_size == 8192


# ---- life ----


def test_after_close_everything_says_so(tiny_model_f32: Path) -> None:
    llm = LLM(tiny_model_f32, n_ctx=256, n_threads=1)
    stream = llm.stream("Hello", greedy(50, ignore_eos=True))
    next(stream)
    llm.close()
    llm.close()
    assert [piece.finish_reason for piece in stream] == ["abort"]
    for use in (
        lambda: llm.generate("Hello"),
        lambda: llm.stream("Hello"),
        lambda: llm.tokenize("Hello"),
        lambda: llm.detokenize([5]),
        llm.stats,
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_stream_is_for_one_thread_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    stream, loop = llm.stream([1, 2, 3], params), llm._engine.loop
    inside, go_on, run_until, pieces = (
        threading.Event(),
        threading.Event(),
        loop.run_until,
        list[pyvelo.StreamPiece](),
    )

    def late(ready: Callable[[], object]) -> None:
        inside.set()
        assert go_on.wait(60)
        run_until(ready)

    monkeypatch.setattr(loop, "run_until", late)
    thread = threading.Thread(target=lambda: pieces.extend(stream))
    thread.start()
    assert inside.wait(60)
    monkeypatch.undo()
    with pytest.raises(RequestError, match="another thread waits for a piece of this stream"):
        next(stream)
    go_on.set()
    thread.join(60)
    assert sum(len(piece.token_ids) for piece in pieces) == 8


def test_closing_ends_an_answer_in_another_thread(tiny_model_f32: Path) -> None:
    llm = LLM(tiny_model_f32, n_ctx=4096, n_threads=1)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.extend(llm.generate("Hello", greedy(None, ignore_eos=True))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert any(llm.stats().running == 2 for _ in range(100_000))
    llm.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [output.finish_reason for output in found] == ["abort"] * 2


def test_models_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        LLM(tmp_path / "missing.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 200)
    with pytest.raises(ModelError):
        LLM(broken)


def test_settings_that_cannot_be(tiny_model_f32: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes=100 is too little"):
        LLM(tiny_model_f32, kv_cache_bytes=100)
    with pytest.raises(OutOfMemory, match="bytes are free"):
        LLM(tiny_model_f32, kv_cache_bytes=1 << 60)
    LLM(tiny_model_f32, n_ctx=8192, n_threads=1).close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pyvelo", "WARNING")
    assert "n_ctx=8192 is longer than the 4096 tokens" in record.getMessage()


def test_by_default_the_context_is_the_models(tiny_model_f32: Path) -> None:
    with LLM(tiny_model_f32, n_threads=1) as llm:
        assert llm.n_ctx == llm.info.n_ctx_train == 4096
        assert llm.stats().tokens_total == 4 * 4096


def test_the_package_has_the_names_of_its_list() -> None:
    assert pyvelo.LLM is LLM
    assert all(getattr(pyvelo, name) for name in pyvelo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pyvelo.nothing
