"""Prompts and grammars are prepared beside the event loop; a task that stops waiting leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyvelo import AsyncLLM, SamplingParams
from pyvelo.errors import ClosedError, RequestError
from pyvelo.grammar.compiler import GrammarCompiler
from pyvelo.native import Model

WAIT = 60  # seconds until something hangs

Run = Callable[..., None]


class Slow:
    """Gate that waits until `go` is set, in another thread than the event loop's."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.threads: set[int] = set()

    def wait(self) -> None:
        self.threads.add(threading.get_ident())
        self.begun.release()
        assert self.go.wait(WAIT)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=WAIT)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Grammars compile slowly."""
    slow, original = Slow(), GrammarCompiler._made

    def made(compiler: GrammarCompiler, name: str, source: str) -> Any:
        slow.wait()
        return original(compiler, name, source)

    monkeypatch.setattr(GrammarCompiler, "_made", made)
    yield slow
    slow.go.set()


@pytest.fixture
def tokenizing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """The text "slow" is tokenized slowly."""
    slow, original = Slow(), Model.tokenize

    def tokenize(model: Model, text: str, **options: Any) -> list[int]:
        if text == "slow":
            slow.wait()
        return original(model, text, **options)

    monkeypatch.setattr(Model, "tokenize", tokenize)
    yield slow
    slow.go.set()


GUIDED = SamplingParams(regex="[ab]{3}", seed=1)
FREE = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


def test_the_loop_and_others_go_on(run: Run, compiling: Slow, tokenizing: Slow) -> None:
    async def body(llm: AsyncLLM) -> None:
        session = await llm.session("Once")
        waiting = [
            asyncio.create_task(llm.generate(["a", "b"], [FREE, GUIDED])),
            asyncio.create_task(llm.generate("slow", FREE)),
            asyncio.create_task(session.append("slow")),
        ]
        await compiling.has_begun()
        for _ in range(2):
            await tokenizing.has_begun()
        assert len((await llm.generate("c", FREE))[0].token_ids) == 3
        assert len([piece async for piece in llm.stream("d", FREE)]) == 3
        assert not any(task.done() for task in waiting)
        compiling.go.set()
        tokenizing.go.set()
        first, second, _ = await asyncio.gather(*waiting)
        assert first[1].text in {x + y + z for x in "ab" for y in "ab" for z in "ab"}
        assert len(second[0].token_ids) == 3
        assert len(session) > len(await llm.session("Once"))
        assert threading.get_ident() not in compiling.threads | tokenizing.threads
        await session.close()

    run(body)


def test_grammars_take_no_thread_from_prompts(run: Run, compiling: Slow) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = [SamplingParams(regex=f"a{{{n + 1}}}") for n in range(12)]
        waiting = [asyncio.create_task(llm.generate("a", param)) for param in params]
        await compiling.has_begun()
        assert len((await llm.generate("c", FREE))[0].token_ids) == 3
        compiling.go.set()
        outputs = await asyncio.gather(*waiting)
        assert [output[0].text for output in outputs] == ["a" * (n + 1) for n in range(12)]

    run(body)


@pytest.mark.parametrize("kind", ["generate", "stream", "session"])
def test_a_cancelled_task_leaves_nothing(run: Run, compiling: Slow, kind: str) -> None:
    async def body(llm: AsyncLLM) -> None:
        session = await llm.session("Once upon")

        async def ask() -> None:
            if kind == "generate":
                await llm.generate(["a", "b"], GUIDED)
            elif kind == "stream":
                [piece async for piece in llm.stream("a", GUIDED)]
            else:
                await session.generate(GUIDED)

        task = asyncio.create_task(ask())
        await compiling.has_begun()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        compiling.go.set()
        n = len(session)
        assert len((await session.generate(FREE)).token_ids) == 3
        assert len(session) == n + 3
        assert (await session.generate(GUIDED)).finish_reason == "stop"
        await session.close()
        assert (await llm.stats()).requests_finished == 2

    run(body)


def test_a_cancelled_append_appends_nothing(run: Run, tokenizing: Slow) -> None:
    async def body(llm: AsyncLLM) -> None:
        async with await llm.session("Once") as session:
            before = session.token_ids
            task = asyncio.create_task(session.append("slow"))
            await tokenizing.has_begun()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            tokenizing.go.set()
            await llm.generate("c", FREE)
            assert session.token_ids == before

    run(body)


def test_errors_reach_the_task_that_asked(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        wrong: list[Any] = [
            SamplingParams(regex="("),
            SamplingParams(grammar="root ::"),
            None,
            "no params",
        ]
        asked = [llm.generate("a", [param]) for param in wrong] + [llm.generate([[1], []], FREE)]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, RequestError)
        with pytest.raises(RequestError, match="regex"):
            [piece async for piece in llm.stream("a", wrong[0])]
        with pytest.raises(RequestError, match="regex"):
            await llm.generate(["a", "b"], [SamplingParams(regex="[0-9]"), SamplingParams(regex="[")])

    run(body)


def test_a_deadline_ends_the_wait(run: Run, compiling: Slow) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(regex="[ab]{3}", timeout=0.05)
        output = (await llm.generate("a", params))[0].outputs[0]
        assert (output.token_ids, output.error, output.finish_reason) == ((), None, "timeout")
        assert not compiling.go.is_set()

    run(body)


def test_closing_ends_the_wait(run: Run, compiling: Slow) -> None:
    async def body(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.generate("a", GUIDED))
        await compiling.has_begun()
        other = AsyncLLM(llm._config.model, n_ctx=256, n_threads=1)
        async with other:
            waiting = asyncio.create_task(other.generate("a", GUIDED))
            await compiling.has_begun()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await other.generate("a", FREE)
        compiling.go.set()
        assert (await task)[0].finish_reason == "stop"

    run(body)


def test_seeds_follow_the_order_of_the_calls(run: Run, compiling: Slow) -> None:
    """However long each of them is prepared."""
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    texts: list[list[str]] = []

    async def body(llm: AsyncLLM) -> None:
        slow = SamplingParams(regex="[ab]{12}", max_tokens=30)
        first = asyncio.create_task(llm.generate("a", slow))
        await asyncio.sleep(0)
        second = asyncio.create_task(llm.generate("a", free))
        if texts:
            compiling.go.set()
            await first
        await second
        compiling.go.set()
        texts.append([(await task)[0].text for task in (first, second)])

    run(body, seed=5)
    compiling.go.clear()
    run(body, seed=5)
    assert texts[0] == texts[1]
