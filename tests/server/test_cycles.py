"""A request leaves nothing to the garbage collector, whose pauses all streams would wait for."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Serve
from .servers import Server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 6}
PROMPT: dict[str, Any] = {"prompt": "The KV cache", "max_tokens": 6}

REQUESTS: dict[str, Callable[[Server], object]] = {
    "chat": lambda server: server.post("/v1/chat/completions", CHAT),
    "chat stream": lambda server: server.post("/v1/chat/completions", {**CHAT, "stream": True}),
    "completion": lambda server: server.post("/v1/completions", PROMPT),
    "stream": lambda server: server.post("/v1/completions", {**PROMPT, "stream": True}),
    "samples": lambda server: server.post("/v1/completions", {**PROMPT, "n": 3}),
    "messages": lambda server: server.post("/v1/messages", CHAT),
    "responses": lambda server: server.post("/v1/responses", {"input": "Hi", "store": False}),
    "wrong": lambda server: server.post("/v1/completions", {"prompt": {}}),
    "too long": lambda server: server.post("/v1/completions", {"prompt": [5] * 600}),
    "nowhere": lambda server: server.get("/nowhere"),
    "health": lambda server: server.get("/health"),
}


def garbage_of(server: Server, ask: Callable[[Server], object], n: int) -> Counter[str]:
    """Return the types of objects in cycles that so many requests leave, of the server's packages."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(n):
            ask(server)
        time.sleep(0.1)  # the connections close
        gc.collect()
        types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return Counter(
        {name: count for name, count in types.items() if name.startswith(("pyvelo.", "uvicorn.", "jinja2."))}
    )


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_leaves_no_cycle(serve: Serve, kind: str) -> None:
    server = serve()
    for _ in range(3):
        REQUESTS[kind](server)
    # What an earlier test left may be freed in one of two times of asking, not in both.
    found = garbage_of(server, REQUESTS[kind], 10) & garbage_of(server, REQUESTS[kind], 10)
    assert max(found.values(), default=0) < 5, found.most_common(10)
