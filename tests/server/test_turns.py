"""Requests begin their work one by one, in their order, and the event loop turns between them."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from pyvelo.server.turns import Turns


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_one_request_begins_in_each_turn_in_the_order_of_arrival(cancelled: list[bool]) -> None:
    begun: list[tuple[int, int]] = []

    async def main() -> None:
        turns, n_turns, loop = Turns(), 0, asyncio.get_running_loop()

        def turn() -> None:
            nonlocal n_turns
            n_turns += 1
            loop.call_soon(turn)

        async def work(number: int) -> None:
            await turns.wait()
            begun.append((number, n_turns))

        turn()
        tasks = [asyncio.ensure_future(work(number)) for number in range(len(cancelled))]
        await asyncio.sleep(0)  # the first has begun, the others wait
        for task, gone in zip(tasks[1:], cancelled[1:], strict=True):
            if gone:
                task.cancel()
        await asyncio.wait(tasks)
        await turns.wait()  # the turn is free again

    asyncio.run(main())
    assert [number for number, _ in begun] == [n for n, gone in enumerate(cancelled) if not (gone and n)]
    assert len({turn for _, turn in begun}) == len(begun)


def test_a_request_that_is_alone_begins_at_once() -> None:
    async def main() -> None:
        with_turn = Turns().wait()
        try:
            with_turn.send(None)
        except StopIteration:
            return
        raise AssertionError("it waits")

    asyncio.run(main())
