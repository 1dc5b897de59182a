"""Routes: patterns of paths, and their description in /openapi.json."""

from __future__ import annotations

import pytest

from pyvelo.server.app import ROUTES
from pyvelo.server.openapi import openapi
from pyvelo.server.pages import FILES
from pyvelo.server.routes import ENDPOINTS, Router

PATHS = {
    "/v1/sessions": ("/v1/sessions", ""),
    "/sessions": ("/v1/sessions", ""),
    "/v1/sessions/a": ("/v1/sessions/{id}", "a"),
    "/v1/sessions/a/fork": ("/v1/sessions/{id}/fork", "a"),
    "/sessions/a/fork": ("/v1/sessions/{id}/fork", "a"),
    "/v1/sessions/{id}": ("/v1/sessions/{id}", "{id}"),
    "/v1/sessions/": ("", ""),
    "/v1/sessions/a/": ("", ""),
    "/v1/sessions/a/b": ("", ""),
    "/v1/sessions/a/b/fork": ("", ""),
    f"/v1/sessions/{'a' * 128}": ("/v1/sessions/{id}", "a" * 128),
    f"/v1/sessions/{'a' * 129}": ("", ""),
    "/v1Xsessions": ("", ""),
    "/v1/v1/sessions": ("", ""),
    "/v1/sessions/a\n": ("/v1/sessions/{id}", "a\n"),
}


@pytest.mark.parametrize("path", PATHS)
def test_patterns(path: str) -> None:
    assert Router(ENDPOINTS)(path) == PATHS[path]


def test_the_description_has_every_route() -> None:
    paths = openapi()["paths"]
    described = {(path, name.upper()) for path, methods in paths.items() for name in methods} - {
        (path, "PARAMETERS") for path in paths
    }
    served = {(path, method) for path, methods in ROUTES.items() for method in methods if path not in FILES}
    assert served - described <= {("/v1/blocks/stream", "GET")}
    assert described - served == set()
    for path, methods in paths.items():
        assert ("parameters" in methods) == ("{id}" in path)
