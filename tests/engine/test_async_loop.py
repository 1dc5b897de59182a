"""Calls in threads that a task waits for."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from pyvelo.engine.async_loop import run_in_thread


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
