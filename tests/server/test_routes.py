"""Routes: patterns of paths, and their description in /openapi.json."""

from __future__ import annotations

import pytest

from pyvelo.server.app import ROUTES
from pyvelo.server.openapi import openapi
from pyvelo.server.pages import FILES
from pyvelo.server.routes import ENDPOINTS, Router, Work
from pyvelo.server.schemas import IGNORED

from .servers import Server

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


def test_the_description_lists_the_statuses_of_errors() -> None:
    paths = openapi()["paths"]
    work = {"200", "400", "401", "403", "404", "408", "413", "415", "429", "503", "504"}
    expected = {
        ("/v1/completions", "post"): work,
        ("/v1/sessions/{id}/generate", "post"): work | {"409"},
        ("/v1/sessions/{id}", "get"): {"200", "401", "403", "404", "409", "503"},
        ("/v1/models", "get"): {"200", "401", "403"},
        ("/health", "get"): {"200", "503"},
    }
    for (path, method), statuses in expected.items():
        assert set(paths[path][method]["responses"]) == statuses


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
def test_errors_have_the_shape_of_the_description(server: Server, path: str) -> None:
    description = openapi()
    answer = server.post(path, {"no such field": 1})
    content = description["paths"][path]["post"]["responses"][str(answer.status)]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    shape = description["components"]["schemas"][name]
    assert set(answer.json) == set(shape["required"])
    error = shape["properties"]["error"]
    if error["type"] == "object":
        assert set(error["required"]) <= set(answer.json["error"]) <= set(error["properties"])
    else:
        assert isinstance(answer.json["error"], str)


def test_bodies_have_no_other_fields() -> None:
    fields = openapi()["components"]["schemas"]["CompletionRequest"]
    assert fields["additionalProperties"] is False
    assert {"prompt", "max_tokens", *IGNORED} <= set(fields["properties"])


GENERATES = {
    "/v1/completions": {"prompt": "a"},
    "/completion": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {"model": "demo", "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"model": "demo", "prompt": "a"},
    "/v1/sessions/{id}/generate": {},
}


def test_paths_that_generate_read_the_header_of_the_time(server: Server) -> None:
    described = {
        path
        for path, methods in openapi()["paths"].items()
        if any(each["name"] == "Request-Timeout-Ms" for each in methods.get("post", {}).get("parameters", ()))
    }
    assert described == set(GENERATES)
    name = server.ask("/v1/sessions", {"prompt": "a"})["id"]
    for path, body in GENERATES.items():
        answer = server.post(path.replace("{id}", name), body, {"Request-Timeout-Ms": "soon"})
        assert (path, answer.status) == (path, 400)
        assert "Request-Timeout-Ms" in answer.data.decode()
    assert server.request("DELETE", f"/v1/sessions/{name}").status == 200
    server.until_idle()


def test_the_description_says_which_bodies_may_be_missing() -> None:
    paths = openapi()["paths"]
    for path, handlers in ENDPOINTS.items():
        handler = handlers.get("POST")
        if isinstance(handler, Work) and path in paths:
            assert paths[path]["post"]["requestBody"]["required"] is not handler.optional, path
