"""Actions and readings of a page in a browser, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyvelo.server.settings import Settings

from .servers import Server

WAIT = 60_000
"""Milliseconds after which something is taken to hang."""

COUNT = """() => {
    const map = pyvelo.map, found = {};
    const names = ["free", "used", "shared", "cached", "reserved", "swapped"];
    const probe = document.createElement("canvas").getContext("2d");
    const colours = map.colours.map((colour) => {
        probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
        return probe.getImageData(0, 0, 1, 1).data.join();
    });
    const image = map.context.getImageData(0, 0, map.canvas.width, map.canvas.height);
    for (let cell = 0; cell < map.header.blocks; cell++) {
        const [left, top] = map.place(cell);
        const middle = Math.floor(map.cell / 2);
        const at = 4 * ((top + middle) * image.width + left + middle);
        const name = names[colours.indexOf(image.data.slice(at, at + 4).join())] ?? "unknown";
        found[name] = (found[name] ?? 0) + 1;
    }
    return found;
}"""
"""Count the cells of the grid by the colour of the pixel in their middle."""

ALL_CHANGE = """() => {
    const map = pyvelo.map, times = [];
    for (let turn = 0; turn < 5; turn++) {
        const blocks = [...Array(map.header.blocks).keys()].map((n) => [n, 1 + ((n + turn) % 2), 1, 32, 1]);
        const begin = performance.now();
        map.update({ ...map.state, blocks }, false);
        map.context.getImageData(0, 0, 1, 1);
        times.push(performance.now() - begin);
    }
    return Math.min(...times);
}"""
"""Return the shortest time in milliseconds of an update of every block, with its drawing."""


@contextmanager
def serving(settings: Settings | None = None, **config: Any) -> Iterator[Server]:
    server = Server(settings or Settings(page=True), **config)
    try:
        yield server
    finally:
        server.close()


def visit(page: Any, server: Server) -> None:
    page.goto(server.url)
    page.wait_for_selector("#status[data-state=live]")
    becomes(page, "pyvelo.map.state.n > 0")


def say(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.keyboard.press("Enter")
    becomes(page, "!pyvelo.chat.aborter && document.querySelector('#chat-status').textContent")


def until(page: Any, done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT / 1000
    while not done():
        assert time.monotonic() < end, "it does not happen"
        page.wait_for_timeout(20)


def slow_down(server: Server, seconds: float) -> None:
    """Let each forward pass take longer, so that the state of the engine stays for a while."""
    server.serving.engine.core.before_run.append(lambda _: time.sleep(seconds))


@contextmanager
def held(server: Server) -> Iterator[None]:
    """Let the engine's steps do nothing within a block, so that a page has the time to show its state."""
    core = server.serving.engine.core
    step = core.step

    def wait() -> bool:
        time.sleep(0.01)
        return True

    core.step = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        core.step = step  # type: ignore[method-assign]


def becomes(page: Any, expression: str) -> None:
    """Wait until an expression is true; playwright's own wait would need eval, which the CSP forbids."""
    until(page, lambda: page.evaluate(expression))


def pixels(page: Any) -> dict[str, int]:
    found: dict[str, int] = page.evaluate(COUNT)
    return found


def agrees(page: Any, server: Server) -> bool:
    """Return whether the pixels of the grid are the numbers of blocks of the engine."""
    stats, found = server.serving.engine.stats(), pixels(page)
    reserved = min(stats.blocks_reserved, stats.blocks_free)
    return (
        found.get("free", 0) == stats.blocks_free - reserved
        and found.get("reserved", 0) == stats.blocks_reserved
        and found.get("cached", 0) == stats.blocks_cached - (stats.blocks_reserved - reserved)
        and found.get("used", 0) + found.get("shared", 0) == stats.blocks_used
    )
