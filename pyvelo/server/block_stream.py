"""/v1/blocks/stream: the block map and its changes, as server-sent events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pyvelo.server.errors import not_found
from pyvelo.server.http import EVENTS

if TYPE_CHECKING:
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["watch"]


async def watch(serving: Serving, exchange: Exchange) -> None:
    """Answer with events of the block map until the client or the server ends."""
    if not serving.generates:
        raise not_found("this model embeds texts: it has no blocks")
    if exchange.method == "HEAD":
        await exchange.answer(b"", headers={"content-type": EVENTS})
        return
    live = serving.live
    viewer = await live.enter(exchange.tenant)
    gone = asyncio.ensure_future(exchange.gone())
    gone.add_done_callback(lambda _: viewer.wake.set())
    try:
        events = exchange.events()
        await events.write(live.header(exchange.tenant))
        while not gone.done() and live.recording is not None:
            if data := live.news(viewer):
                await events.write(data)
            await viewer.wake.wait()
            viewer.wake.clear()
        if not gone.done():
            await events.end(b"")
    finally:
        live.leave(viewer)
        gone.cancel()
