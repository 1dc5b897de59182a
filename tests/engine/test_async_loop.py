"""Calls in threads that a task waits for, threads that prepare requests, and the engine's own thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pyvelo import SamplingParams
from pyvelo.engine import async_loop
from pyvelo.engine.async_loop import AsyncEngineLoop, Preparer, open_engine_loop
from pyvelo.engine.output import Submission
from pyvelo.errors import Cancelled, ClosedError, ComputeError, OutOfMemory
from pyvelo.outputs import StreamPiece
from pyvelo.threads import FEW, LATER, Outbox, run_in_thread

from .fakes import FakeSampler, answer, text_of
from .test_loop import WAIT, Stand, in_thread, submission


def test_a_call_in_a_thread_gives_what_it_returns_or_raises() -> None:
    assert asyncio.run(run_in_thread(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_thread(lambda: 1 // 0))


def test_a_cancelled_task_waits_for_its_call_and_takes_its_error() -> None:
    begun, go_on, logged = threading.Event(), threading.Event(), list[dict[str, Any]]()

    def fail() -> None:
        begun.set()
        assert go_on.wait(30)
        raise ValueError("too late")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        task = asyncio.create_task(run_in_thread(fail))
        assert await asyncio.to_thread(begun.wait, 30)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await asyncio.sleep(0)

    try:
        asyncio.run(main())
    finally:
        go_on.set()
    assert not logged


# ---- threads that prepare requests ----


class FakeProcessor:
    """Input processor whose grammars are futures, and whose clock a test sets."""

    def __init__(self, futures: list[Future[Any]]) -> None:
        self._futures = iter(futures)
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def compiling(self, params: SamplingParams) -> Future[Any] | None:
        return next(self._futures, None)


def preparer(*futures: Future[Any]) -> tuple[Preparer, FakeProcessor]:
    processor = FakeProcessor(list(futures))
    return Preparer(cast(Any, SimpleNamespace(processor=processor))), processor


def test_each_grammar_is_waited_for_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that the first one took is gone for the second; a deadline that has passed waits for nothing."""
    waited: list[float | None] = []
    preparing, processor = preparer(Future(), Future(), Future())

    async def wait(futures: list[asyncio.Future[Any]], timeout: float | None) -> None:
        waited.append(timeout)
        processor.now += 3.0

    async def body() -> None:
        monkeypatch.setattr(asyncio, "wait", wait)
        assert await preparing.run(lambda: 7, [SamplingParams(timeout=t) for t in (4.0, 5.0, 2.0)]) == 7

    try:
        asyncio.run(body())
    finally:
        preparing.close()
    assert waited == [4.0, 2.0, 0.0]


def test_no_error_of_a_grammar_is_logged_by_asyncio() -> None:
    """The first error is raised; the others were asked for by the same call."""
    logged: list[dict[str, Any]] = []
    futures: list[Future[Any]] = [Future() for _ in range(3)]
    for number, future in enumerate(futures[:2]):
        future.set_exception(ValueError(f"bad grammar {number}"))
    preparing, _ = preparer(*futures)

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        with pytest.raises(ValueError, match="bad grammar 0"):
            await preparing.run(lambda: 7, [SamplingParams(), SamplingParams(), SamplingParams()])
        for future in futures[:2]:
            cast(Exception, future.exception()).__traceback__ = None  # its frames hold what is waited for
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(body())
    preparing.close()
    assert futures[2].cancelled()
    gc.collect()
    assert not logged


def test_closing_waits_for_no_thread() -> None:
    begun, go_on = threading.Event(), threading.Event()
    preparing, _ = preparer()

    def make() -> int:
        begun.set()
        assert go_on.wait(WAIT)
        return 7

    async def body() -> None:
        task = asyncio.create_task(preparing.run(make))
        assert await asyncio.to_thread(begun.wait, WAIT)
        preparing.close()
        assert not task.done()
        go_on.set()
        assert await task == 7
        with pytest.raises(ClosedError):
            await preparing.run(lambda: 8)

    try:
        asyncio.run(body())
    finally:
        go_on.set()


# ---- the engine's thread ----


@pytest.fixture
def stand() -> Stand:
    return Stand(n_blocks=128)


@pytest.fixture
def start(stand: Stand) -> Iterator[Callable[[], AsyncEngineLoop]]:
    """Start the engine's thread; it is ended after the test."""
    started: list[AsyncEngineLoop] = []
    engine = SimpleNamespace(
        parts=stand,
        loop=stand.loop,
        core=stand.core,
        processor=FakeProcessor([]),
        close=lambda: stand.loop.close(stand.stop.set),
    )

    def make() -> AsyncEngineLoop:
        started.append(AsyncEngineLoop(cast(Any, engine), asyncio.get_running_loop()))
        return started[-1]

    yield make
    for each in started:
        each.close()


def test_the_thread_ends_with_the_interpreter_and_releases_its_team_without_requests(
    stand: Stand, start: Callable[[], AsyncEngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It releases the team of the forward pass before each wait, and only then."""
    released = threading.Semaphore(0)
    monkeypatch.setattr(async_loop, "release_team", released.release)

    async def body() -> None:
        before = set(threading.enumerate())  # other tests' engines
        loop = start()
        (thread,) = (t for t in {*threading.enumerate()} - before if t.name == "pyvelo-engine")
        assert thread.daemon
        for _ in range(2):
            assert await asyncio.to_thread(released.acquire, timeout=WAIT)
            asked = submission(stand, [1, 2], 3)
            await loop.run([asked])
            assert asked.requests[0].generated_ids == answer([1, 2], 3)

    asyncio.run(asyncio.wait_for(body(), WAIT))
    stand.assert_idle()


def test_a_thread_that_ends_leaves_no_task_waiting(
    stand: Stand, start: Callable[[], AsyncEngineLoop]
) -> None:
    """A finalizer ends it while a request runs."""
    stepping, go_on = stand.hold_steps()

    async def body() -> None:
        loop = start()
        asked = submission(stand, [1, 2], 50)
        task = asyncio.create_task(loop.run([asked]))
        assert await asyncio.to_thread(stepping.wait, WAIT)
        loop._worker.wake.put(False)
        go_on.set()
        with contextlib.suppress(ClosedError):
            await task
        assert asked.requests[0].finish_reason == "abort"
        await asyncio.to_thread(loop._thread.join, WAIT)
        with pytest.raises(ClosedError):
            await loop.preparer.run(lambda: 7)

    asyncio.run(asyncio.wait_for(body(), WAIT))


def test_a_stream_raises_the_error_of_its_request_after_its_pieces(
    stand: Stand, start: Callable[[], AsyncEngineLoop]
) -> None:
    stand.make_sampler = lambda request: FakeSampler(status=int(request.tokens[0] == 2))
    texts: list[str] = []

    async def read(loop: AsyncEngineLoop, token: int) -> None:
        def prepare(put: Callable[[StreamPiece], None]) -> Submission:
            return submission(stand, [token], 3, on_piece=put)

        async for piece in loop.pieces(prepare, SamplingParams()):
            texts.append(piece.text)

    async def body() -> None:
        loop = start()
        await read(loop, 1)
        with pytest.raises(ComputeError, match="no token can be drawn"):
            await read(loop, 2)

    asyncio.run(asyncio.wait_for(body(), WAIT))
    assert "".join(texts) == text_of(answer([1], 3))
    stand.assert_idle()


def test_a_stream_that_is_closed_early_ends_its_request(
    stand: Stand, start: Callable[[], AsyncEngineLoop]
) -> None:
    asked: list[Submission] = []

    def prepare(put: Callable[[StreamPiece], None]) -> Submission:
        asked.append(submission(stand, [1], 1900, on_piece=put))
        return asked[0]

    async def body() -> None:
        pieces = start().pieces(prepare, SamplingParams())
        assert (await anext(pieces)).text
        await pieces.aclose()
        with stand.loop.visit():
            assert asked[0].requests[0].finish_reason == "abort"

    asyncio.run(asyncio.wait_for(body(), WAIT))
    stand.assert_idle()


def test_pieces_arrive_while_the_next_step_runs(stand: Stand, start: Callable[[], AsyncEngineLoop]) -> None:
    second, go_on = threading.Event(), threading.Event()

    def wait_in_the_second() -> None:
        if stand.core.counters.steps == 1:
            second.set()
            assert go_on.wait(WAIT)

    stand.context.before_run = wait_in_the_second

    async def body() -> None:
        pieces = start().pieces(lambda put: submission(stand, [1], 3, on_piece=put), SamplingParams())
        try:
            assert (await anext(pieces)).text
            assert await asyncio.to_thread(second.wait, WAIT)
            assert stand.core.counters.steps == 1
        finally:
            go_on.set()
        assert [piece.finish_reason async for piece in pieces][-1] == "length"

    asyncio.run(asyncio.wait_for(body(), WAIT))
    stand.assert_idle()


def test_pieces_arrive_while_a_visitor_keeps_the_next_step_waiting(
    stand: Stand, start: Callable[[], AsyncEngineLoop]
) -> None:
    visiting, leave, entered = threading.Event(), threading.Event(), threading.Event()

    def visit() -> None:
        visiting.set()
        with stand.loop.visit():
            entered.set()
            assert leave.wait(WAIT)

    def let_it_wait() -> None:
        if not visiting.is_set():
            in_thread(visit)
            while not stand.loop._n_visiting:
                time.sleep(0.001)

    stand.context.before_run = let_it_wait

    async def body() -> None:
        pieces = start().pieces(lambda put: submission(stand, [1], 3, on_piece=put), SamplingParams())
        try:
            assert (await anext(pieces)).text
            assert await asyncio.to_thread(entered.wait, WAIT)
            assert stand.core.counters.steps == 1
        finally:
            leave.set()
        assert [piece.finish_reason async for piece in pieces][-1] == "length"

    asyncio.run(asyncio.wait_for(body(), WAIT))
    stand.assert_idle()


@pytest.mark.parametrize("n", [0, 1, FEW, FEW + 1, 3 * FEW])
def test_many_calls_wait_until_a_c_call_has_begun(n: int) -> None:
    async def body() -> None:
        loop, ran = asyncio.get_running_loop(), []
        outbox, turn = Outbox(loop), loop.create_future()
        for number in range(n):
            outbox.put(partial(ran.append, number))
        outbox.deliver_in_c()
        loop.call_soon_threadsafe(turn.set_result, None)  # the next turn of the event loop
        await turn
        assert ran == ([] if n > FEW else list(range(n)))
        while len(ran) < n:
            await asyncio.sleep(LATER)
        assert ran == list(range(n))

    asyncio.run(body())


def test_an_outbox_wakes_its_loop_once_for_all_calls() -> None:
    taken: list[int] = []

    async def body() -> Outbox:
        loop = asyncio.get_running_loop()
        outbox, woken = Outbox(loop), []
        call_soon = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: woken.append(call_soon(*args))  # type: ignore[method-assign]
        outbox.deliver_soon()
        assert not woken
        for number in range(3):
            outbox.put(partial(taken.append, number))
        outbox.deliver_soon()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (len(woken), taken) == (1, [0, 1, 2])
        return outbox

    outbox = asyncio.run(body())
    outbox.put(partial(taken.append, 3))
    assert not outbox.closed
    outbox.deliver_soon()
    assert outbox.closed
    assert taken == [0, 1, 2]


def test_an_outbox_does_not_keep_the_last_call() -> None:
    """An event loop that no longer runs would keep the engine behind it."""

    class Owner:
        def call(self) -> None:
            raise AssertionError("the event loop does not run")

    loop = asyncio.new_event_loop()
    outbox, owner = Outbox(loop), Owner()
    outbox.deliver_then(owner.call)
    dropped = weakref.ref(owner)
    del owner
    loop.close()
    assert dropped() is None
    assert not outbox.closed
    outbox.deliver_then(lambda: None)
    assert outbox.closed


def test_closing_cuts_the_step_in_progress_short(stand: Stand, start: Callable[[], AsyncEngineLoop]) -> None:
    stepping = threading.Event()

    def wait() -> None:
        stepping.set()
        assert stand.stop.wait(WAIT)
        raise Cancelled("stopped")

    stand.context.before_run = wait

    async def body() -> None:
        loop = start()
        asked = submission(stand, [1, 2], 50)
        task = asyncio.create_task(loop.run([asked]))
        assert await asyncio.to_thread(stepping.wait, WAIT)
        await asyncio.to_thread(loop.close)
        with contextlib.suppress(ClosedError):
            await task
        assert asked.requests[0].finish_reason == "abort"

    asyncio.run(body())
    stand.assert_idle()


def test_steps_that_are_cancelled_are_closed(stand: Stand, start: Callable[[], AsyncEngineLoop]) -> None:
    """At once, even if the caller keeps the generator."""
    stepping, go_on = stand.hold_steps()
    closed: list[bool] = []

    def search() -> Generator[list[Submission], None, None]:
        try:
            yield [submission(stand, [1, 2], 50)]
        finally:
            closed.append(True)

    async def body() -> None:
        steps = search()
        task = asyncio.create_task(start().run_steps(steps))
        assert await asyncio.to_thread(stepping.wait, WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]
        go_on.set()

    asyncio.run(asyncio.wait_for(body(), WAIT))


@pytest.mark.parametrize("at", ["loading", "end", None])
def test_an_engine_that_is_closed_while_it_loads_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, at: str | None
) -> None:
    """Loading notices it, or has just ended; without `close`, an interrupt stays one."""
    closed, engine_closed = threading.Event(), threading.Event()

    def load(config: object, cancelled: threading.Event) -> Any:
        assert cancelled is closed
        if at is not None:
            closed.set()
        if at == "end":
            return SimpleNamespace(close=engine_closed.set)
        raise Cancelled("loading was cancelled")

    monkeypatch.setattr(async_loop, "open_engine", load)
    with pytest.raises(Cancelled if at is None else ClosedError):
        asyncio.run(open_engine_loop(cast(Any, None), closed))
    assert engine_closed.is_set() == (at == "end")


def refuse_threads(patch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", refuse)


def test_a_request_that_no_thread_prepares_raises_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not prepared later."""
    preparing, _ = preparer()
    ran: list[int] = []
    try:
        with monkeypatch.context() as patch:
            refuse_threads(patch)
            with pytest.raises(OutOfMemory, match="no thread can be started"):
                asyncio.run(preparing.run(lambda: ran.append(7)))
        asyncio.run(preparing.run(lambda: ran.append(8)))
    finally:
        preparing.close()
    assert ran == [8]


def test_a_thread_prepares_the_requests_for_which_no_other_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preparing, _ = preparer()
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> int:
        begun.set()
        assert go_on.wait(WAIT)
        return 1

    async def body() -> None:
        first = asyncio.create_task(preparing.run(wait))
        assert await asyncio.to_thread(begun.wait, WAIT)
        refuse_threads(monkeypatch)
        second = asyncio.create_task(preparing.run(lambda: 2))
        await asyncio.sleep(0)
        monkeypatch.undo()
        go_on.set()
        assert await asyncio.gather(first, second) == [1, 2]

    try:
        asyncio.run(body())
    finally:
        go_on.set()
        preparing.close()


def test_the_end_of_the_interpreter_is_not_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    preparing, _ = preparer()

    def refuse(*args: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(preparing._threads, "submit", refuse)
    with pytest.raises(ClosedError, match="interpreter shutdown"):
        asyncio.run(preparing.run(lambda: 7))
    preparing.close()
