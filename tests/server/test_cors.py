"""Headers for web pages of other origins."""

from __future__ import annotations

import pytest

from pyvelo.server.auth import read_keys

from .conftest import Serve
from .servers import Server

COMPLETIONS = "/v1/completions"
PAGE = "https://page.example"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-b"}


@pytest.fixture
def page_server(serve: Serve) -> Server:
    return serve(n_ctx=64, origins=(PAGE, "http://localhost:3000"))


def test_nothing_is_allowed_by_default(server: Server) -> None:
    answer = server.request("GET", "/health", headers={"Origin": PAGE})
    assert answer.status == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert server.request("OPTIONS", COMPLETIONS, headers={"Origin": PAGE, **ASKS}).status == 403


def test_a_page_of_an_allowed_origin_may_read_every_answer(page_server: Server) -> None:
    for method, path, status in (("GET", "/health", 200), ("POST", COMPLETIONS, 400), ("GET", "/x", 404)):
        answer = page_server.request(method, path, headers={"Origin": PAGE})
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "Origin"
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


def test_a_stream_has_the_headers_too(page_server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    answer = page_server.post(COMPLETIONS, body, {"Origin": PAGE})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)


def test_a_preflight_is_answered(page_server: Server) -> None:
    answer = page_server.request("OPTIONS", COMPLETIONS, headers={"Origin": PAGE, **ASKS})
    assert (answer.status, answer.data) == (204, b"")
    assert not {"content-length", "transfer-encoding"} & set(answer.headers)
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-b"


@pytest.mark.parametrize("origin", ["https://page.example.evil.example", "http://page.example", "null", "*"])
def test_other_origins_get_no_header(page_server: Server, origin: str) -> None:
    answer = page_server.request("GET", "/health", headers={"Origin": origin})
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert page_server.request("OPTIONS", COMPLETIONS, headers={"Origin": origin, **ASKS}).status == 403


def test_any_origin_can_be_allowed(serve: Serve) -> None:
    server = serve(n_ctx=64, origins=("*",))
    answer = server.request("GET", "/health", headers={"Origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in server.get("/health").headers


def test_a_preflight_needs_no_key(serve: Serve) -> None:
    """Browsers send none with it."""
    from pyvelo.server.auth import read_keys

    server = serve(n_ctx=64, origins=(PAGE,), keys=read_keys(None, ["secret"]))
    assert server.request("OPTIONS", COMPLETIONS, headers={"Origin": PAGE, **ASKS}).status == 204
    answer = server.request("POST", COMPLETIONS, {}, {"Origin": PAGE})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, PAGE)


def test_a_page_that_is_not_allowed_cannot_use_the_server(page_server: Server) -> None:
    """A browser sends a page's POST without asking first; the answer alone would be hidden from the page."""
    for origin in ("https://evil.example", "null", "http://localhost:3001"):
        answer = page_server.post(COMPLETIONS, {"prompt": "a"}, {"Origin": origin})
        assert answer.status == 403
        assert "--cors-origin" in answer.json["error"]["message"]


def test_the_servers_own_page_may_use_it(server: Server) -> None:
    own = {"Origin": "http://myself:80", "Host": "myself:80"}
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, own).status == 200
    assert server.post(COMPLETIONS, {"prompt": "a"}, own | {"Host": "other:80"}).status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "127.0.0.1", "127.9.0.1:1", "[::1]:8000", "[::1]"]
)
def test_names_of_this_machine(serve: Serve, host: str) -> None:
    local = serve(n_ctx=64, local=True)
    assert local.request("GET", "/v1/models", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "", "["]
)
def test_other_names_of_this_machine_are_refused(serve: Serve, host: str) -> None:
    """A site may point its own name at this machine, so that a browser takes both for one origin."""
    local = serve(n_ctx=64, local=True)
    assert local.request("GET", "/v1/models", headers={"Host": host}).status == 403
    assert local.request("GET", "/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["10.0.0.1:8000", "[fd00::1]", "box", "box:8000", "localhost", "Pyvelo.Example:1"]
)
def test_names_of_a_server_that_other_machines_use(serve: Serve, host: str) -> None:
    """No other site can point an address, or a name without a dot, at this server."""
    shared = serve(n_ctx=64, hosts=("pyvelo.example",))
    assert shared.request("GET", "/v1/models", headers={"Host": host}).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.0.0.1.evil.example", "", "["])
def test_other_names_of_a_server_that_other_machines_use_are_refused(serve: Serve, host: str) -> None:
    shared = serve(n_ctx=64, hosts=("pyvelo.example",))
    refused = shared.request("GET", "/v1/models", headers={"Host": host})
    assert refused.status == 403
    assert "--allow-host" in refused.json["error"]["message"]
    assert shared.request("GET", "/health", headers={"Host": host}).status == 200
    assert serve(n_ctx=64, hosts=("*",)).request("GET", "/v1/models", headers={"Host": host}).status == 200


@pytest.mark.parametrize("local", [True, False])
def test_an_allowed_name_is_enough(serve: Serve, local: bool) -> None:
    named = serve(n_ctx=64, local=local, hosts=("pyvelo.example",))
    assert named.request("GET", "/v1/models", headers={"Host": "pyvelo.example"}).status == 200


def test_keys_are_enough(serve: Serve) -> None:
    keyed = serve(n_ctx=64, local=True, keys=read_keys(None, ["secret"]))
    given = {"Host": "proxy.example", "Authorization": "Bearer secret"}
    assert keyed.request("GET", "/v1/models", headers=given).status == 200
