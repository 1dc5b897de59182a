"""Requests that are aborted by their id: queued, running, in streams, batches, samples and sessions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, RequestOutput, SamplingParams
from pyvelo.chat.conversation import Chats
from pyvelo.errors import RequestError

ENDLESS = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def opened(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, deterministic=True, n_ctx=512, n_threads=1, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture
def llm(opened: LLM) -> Iterator[LLM]:
    """An engine that must be idle in the end, and as good as before."""
    yield opened
    assert len(opened.generate(PROMPT, SHORT)[0].token_ids) == 5
    stats = opened.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    opened._engine.core.manager.audit()


WHOLE: dict[tuple[int, ...], tuple[int, ...]] = {}
"""The answers of the module's engine, each computed once."""


def alone(llm: LLM, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    key = tuple(prompt)
    if key not in WHOLE:
        WHOLE[key] = llm.generate([prompt], ENDLESS)[0].token_ids
    return WHOLE[key]


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def check_cut(output: RequestOutput, whole: tuple[int, ...]) -> None:
    """An aborted answer is the beginning of the whole one."""
    assert output.finish_reason == "abort"
    assert output.stop_reason is None
    assert output.token_ids == whole[: len(output.token_ids)]
    assert len(output.token_ids) < len(whole)
    assert output.usage.completion_tokens == sum(len(sample.token_ids) for sample in output.outputs)


def test_within_the_loop_of_a_stream(llm: LLM) -> None:
    whole, pieces, before = alone(llm), [], llm.stats().requests_aborted
    for piece in llm.stream(PROMPT, ENDLESS, request_id="mine"):
        pieces.append(piece)
        if len(pieces) == 7:
            llm.abort("mine")
            llm.abort("mine")
    assert [piece.finish_reason for piece in pieces] == [None] * 7 + ["abort"]
    assert [token for piece in pieces for token in piece.token_ids] == list(whole[:7])
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 7
    assert llm.stats().requests_aborted == before + 1


def test_all_samples_of_a_request(llm: LLM) -> None:
    whole = alone(llm)
    pieces = []
    for piece in llm.stream(PROMPT, SamplingParams(**{**vars_of(ENDLESS), "n": 3}), request_id="three"):
        pieces.append(piece)
        if len(pieces) == 10:
            llm.abort(["three"])
    ends = [piece for piece in pieces if piece.finish_reason is not None]
    assert sorted(piece.index for piece in ends) == [0, 1, 2]
    assert {piece.finish_reason for piece in ends} == {"abort"}
    assert [piece.usage is not None for piece in ends] == [False, False, True]
    for index in range(3):
        tokens = [token for piece in pieces if piece.index == index for token in piece.token_ids]
        assert tuple(tokens) == whole[: len(tokens)]


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {"max_tokens": params.max_tokens, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("ids", ["batch", ["batch-0", "batch-1", "batch-2", "batch-3", "batch-4", "batch-5"]])
def test_a_batch_of_which_some_wait(llm: LLM, ids: Any) -> None:
    """Four of six run at once."""
    prompts = [[3 + number, *PROMPT] for number in range(6)]
    whole = [alone(llm, prompt) for prompt in prompts]
    thread, results = in_thread(lambda: llm.generate(prompts, ENDLESS, request_id="batch"))
    until(lambda: llm.stats().running == 4)
    llm.abort(ids)
    thread.join(60)
    assert [output.request_id for output in results[0]] == [f"batch-{number}" for number in range(6)]
    for output, tokens in zip(results[0], whole, strict=True):
        check_cut(output, tokens)
    assert results[0][-1].token_ids == ()


def test_one_of_a_batch(llm: LLM) -> None:
    """The others go on."""
    whole = [alone(llm, [number, *PROMPT]) for number in (8, 9, 10)]
    prompts = [[number, *PROMPT] for number in (8, 9, 10)]
    thread, results = in_thread(lambda: llm.generate(prompts, ENDLESS, request_id="b"))
    until(lambda: llm.stats().running == 3)
    llm.abort("b-1")
    thread.join(60)
    assert [output.finish_reason for output in results[0]] == ["length", "abort", "length"]
    assert results[0][0].token_ids == whole[0]
    assert results[0][2].token_ids == whole[2]
    check_cut(results[0][1], whole[1])


def test_a_stream_before_its_first_piece(llm: LLM) -> None:
    stream = llm.stream(PROMPT, ENDLESS, request_id="late")
    llm.abort("late")
    (piece,) = stream
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("", (), "abort")


def test_a_queued_request_ends_at_once(llm: LLM) -> None:
    """While others take all places."""
    thread, results = in_thread(lambda: llm.generate([PROMPT] * 4, ENDLESS, request_id="first"))
    until(lambda: llm.stats().running == 4)
    waiting, others = in_thread(lambda: llm.generate(PROMPT, SHORT, request_id="second"))
    until(lambda: llm.stats().waiting == 1)
    llm.abort("second")
    waiting.join(60)
    assert (others[0][0].finish_reason, others[0][0].token_ids) == ("abort", ())
    llm.abort("first")
    thread.join(60)
    assert {output.finish_reason for output in results[0]} == {"abort"}


def test_a_session_goes_on_after_an_abort(llm: LLM) -> None:
    whole = alone(llm)
    with llm.session(PROMPT) as session:
        for pieces, _ in enumerate(session.stream(ENDLESS, request_id="talk")):
            if pieces == 9:
                llm.abort("talk")
        assert session.token_ids == (*PROMPT, *whole[:10])
        thread, results = in_thread(lambda: session.generate(ENDLESS, request_id="talk"))
        until(lambda: llm.stats().running == 1)
        llm.abort("talk")
        thread.join(60)
        assert results[0].request_id == "talk"
        assert results[0].finish_reason == "abort"
        answer = session.generate(SHORT)
        assert answer.finish_reason == "length"
        tokens = session.token_ids[len(PROMPT) :]
        assert tokens == whole[: len(tokens)]
        with pytest.raises(RequestError, match="request_id=''"):
            session.generate(SHORT, request_id="")
        with pytest.raises(RequestError, match="request_id=5"):
            session.stream(SHORT, request_id=5)  # type: ignore[arg-type]


def test_chat_and_equal_ids(llm: LLM) -> None:
    """An id may belong to several calls: all of them end."""
    messages = [{"role": "user", "content": "Hello"}]
    one, first = in_thread(lambda: llm.chat(messages, ENDLESS, request_id="same"))
    two, second = in_thread(lambda: llm.generate(PROMPT, ENDLESS, request_id="same"))
    until(lambda: llm.stats().running == 2)
    llm.abort("same")
    one.join(60)
    two.join(60)
    assert (first[0].finish_reason, second[0][0].finish_reason) == ("abort", "abort")


def test_ids_without_a_request_are_ignored(llm: LLM) -> None:
    ended = llm.generate(PROMPT, SHORT, request_id="done")
    for ids in ("done", "never", [], ["never", "done"], iter(["done"])):
        llm.abort(ids)
    assert ended[0].finish_reason == "length"
    assert llm.generate(PROMPT, SHORT, request_id="done")[0].finish_reason == "length"
    for wrong in (None, 5, "", b"done", ["done", 3], "x" * 257, [""]):
        with pytest.raises(RequestError, match=r"request_id=.*: give a string of 1 to 256 characters"):
            llm.abort(wrong)  # type: ignore[arg-type]


def test_after_close(tiny_model_f32: Path) -> None:
    llm = LLM(tiny_model_f32, n_ctx=256, n_threads=1)
    stream = llm.stream(PROMPT, ENDLESS, request_id="x")
    next(stream)
    llm.close()
    llm.abort("x")


def test_many_threads_abort_while_others_ask(llm: LLM) -> None:
    over, seen = threading.Event(), []

    def ask(number: int) -> None:
        for turn in range(12):
            outputs = llm.generate([PROMPT] * 2, ENDLESS, request_id=f"{number}.{turn}")
            seen.extend(output.finish_reason for output in outputs)

    def abort() -> None:
        while not over.is_set():
            llm.abort([f"{number}.{turn}" for number in range(3) for turn in range(12)])

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    aborters = [threading.Thread(target=abort) for _ in range(2)]
    for thread in askers + aborters:
        thread.start()
    for thread in askers:
        thread.join(120)
    over.set()
    for thread in aborters:
        thread.join(60)
    assert len(seen) == 72
    assert set(seen) <= {"abort", "length"}
    assert "abort" in seen


def test_asyncio(run: Callable[..., None]) -> None:
    async def body(llm: AsyncLLM) -> None:
        whole = (await llm.generate(PROMPT, ENDLESS))[0].token_ids
        pieces = []
        async for piece in llm.stream(PROMPT, ENDLESS, request_id="a"):
            pieces.append(piece)
            if len(pieces) == 5:
                await llm.abort("a")
        assert pieces[-1].finish_reason == "abort"
        tokens = tuple(token for piece in pieces for token in piece.token_ids)
        assert tokens == whole[: len(tokens)]
        task = asyncio.create_task(llm.generate([PROMPT] * 3, ENDLESS, request_id="b"))
        kept = asyncio.create_task(llm.generate(PROMPT, SHORT, request_id="c"))
        while (await llm.stats()).running + (await llm.stats()).waiting < 3:
            await asyncio.sleep(0)
        await llm.abort(["b", "nothing"])
        for output in await task:
            check_cut(output, whole)
        assert (await kept)[0].finish_reason == "length"
        async with await llm.session(PROMPT) as session:
            async for piece in session.stream(ENDLESS, request_id="s"):
                assert piece.request_id == "s"
                await llm.abort("s")
            assert piece.finish_reason == "abort"
            output = await session.generate(SHORT, request_id="t")
            assert (output.request_id, output.finish_reason) == ("t", "length")
        with pytest.raises(RequestError, match="request_id=7"):
            await llm.abort(7)  # type: ignore[arg-type]

    run(body)


def test_asyncio_before_the_load_and_after_close(tiny_model_f32: Path) -> None:
    """A request that waits for the model is aborted as soon as there is one."""

    async def body() -> None:
        llm = AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1)
        await llm.abort("x")
        task = asyncio.create_task(llm.generate(PROMPT, ENDLESS, request_id="x"))
        await asyncio.sleep(0)
        await llm.abort("x")
        assert (await task)[0].finish_reason == "abort"
        await llm.close()
        await llm.abort("x")

    asyncio.run(asyncio.wait_for(body(), 60))


class SlowTemplate:
    """A template that renders when `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        prompts = Chats.prompts

        def slowly(*args: Any, **options: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(60)
            return prompts(*args, **options)

        monkeypatch.setattr(Chats, "prompts", slowly)


MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_whose_template_renders(llm: LLM, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    template = SlowTemplate(monkeypatch)
    thread, results = in_thread(
        lambda: (
            [*llm.chat_stream(MESSAGES, ENDLESS, request_id="a")][-1].finish_reason
            if streams
            else llm.chat(MESSAGES, ENDLESS, request_id="a").finish_reason
        )
    )
    until(template.begun.is_set)
    llm.abort("a")
    template.go_on.set()
    thread.join(60)
    assert results == ["abort"]


@pytest.mark.parametrize("streams", [False, True])
def test_an_async_chat_whose_template_renders(
    tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    async def main() -> str | None:
        async with AsyncLLM(tiny_model_f32, n_ctx=512, n_threads=1) as llm:
            template = SlowTemplate(monkeypatch)

            async def answer() -> str | None:
                if not streams:
                    return (await llm.chat(MESSAGES, ENDLESS, request_id="a")).finish_reason
                pieces = [piece async for piece in llm.chat_stream(MESSAGES, ENDLESS, request_id="a")]
                return pieces[-1].finish_reason

            task = asyncio.create_task(answer())
            while not template.begun.is_set():
                await asyncio.sleep(0.001)
            await llm.abort("a")
            template.go_on.set()
            return await task

    assert asyncio.run(main()) == "abort"


def test_an_id_of_256_characters_names_a_call_of_many_prompts(llm: LLM) -> None:
    name = "é" * 256
    outputs = llm.generate([PROMPT] * 11, SHORT, request_id=name)
    assert [output.request_id for output in outputs] == [f"{name}-{number}" for number in range(11)]
    with pytest.raises(RequestError, match="256"):
        llm.generate([PROMPT] * 2, SHORT, request_id=name + "x")
