"""Fixtures: a server that all tests share, servers of single tests, and the same model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pyvelo import LLM
from pyvelo.demo import DEMO_MODEL
from pyvelo.server.settings import Settings
from tests.chat.upstream_templates import upstream_template

from .servers import SETTINGS, Server

Serve = Callable[..., Server]
WithTemplate = Callable[[str], Server]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Return a server that all tests share: a test may not count on its cache or its counters alone."""
    with ExitStack() as stack:
        opened = Server(Settings(model_names=("demo",)))
        stack.callback(opened.close)
        yield opened


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a server: serve(n_ctx=64, max_queue=2) takes fields of both settings."""
    with ExitStack() as stack:

        def start(*, send_buffer: int = 0, **given: Any) -> Server:
            names = Settings.__dataclass_fields__
            settings = {name: given.pop(name) for name in list(given) if name in names}
            server = Server(Settings(**{"model_names": ("demo",), **settings}), send_buffer, **given)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def with_template(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> WithTemplate:
    """Return a function that starts a server whose model has another chat template."""

    def start(name: str) -> Server:
        server = serve(n_ctx=2048)
        monkeypatch.setattr(server.serving.chats, "_known", {"": upstream_template(name)})
        return server

    return start


@pytest.fixture(scope="session")
def oracle() -> Iterator[LLM]:
    """Return the model that `server` has."""
    with LLM(DEMO_MODEL, **SETTINGS) as llm:
        yield llm
