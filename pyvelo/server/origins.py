"""Web pages: which ones may use the server (CORS), and the refusal of all others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from pyvelo.hosts import address_of, is_loopback
from pyvelo.server.errors import HttpError

if TYPE_CHECKING:
    from pyvelo.server.http import Exchange
    from pyvelo.server.settings import Settings

__all__ = ["check_page", "cors_headers", "is_host", "is_origin", "preflight_headers"]

_HOST = re.compile(r"\*|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?", re.IGNORECASE)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def check_page(exchange: Exchange, settings: Settings) -> None:
    """Refuse a web page that is neither the server's own nor allowed.

    A browser sends the header Origin with every POST of a page. Without keys it is all that keeps the pages
    that a user visits from a server on the user's machine; with a name in Host that another site has pointed
    at this machine, they would even read the answers.

    Raises: HttpError 403.
    """
    host, origin = exchange.header("host"), exchange.header("origin")
    if not settings.keys.needed and not _is_own(_split(host).hostname or "", settings):
        message = f"Host: {host[:100]!r} is no known name of this server: give --allow-host, or set API keys"
        raise HttpError(403, message)
    if origin and not _allowed(origin, settings) and _split(origin.partition("//")[2]).netloc != host:
        message = f"pages of {origin[:100]!r} may not use this server; --cors-origin allows an origin"
        raise HttpError(403, message)


def cors_headers(exchange: Exchange, settings: Settings) -> dict[str, str]:
    """Return the headers for a web page of an allowed origin."""
    origin = exchange.header("origin")
    if not origin or not _allowed(origin, settings):
        return {}
    return {
        "Access-Control-Allow-Origin": "*" if "*" in settings.origins else origin,
        "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
        "Vary": "Origin",
    }


def preflight_headers(exchange: Exchange) -> dict[str, str]:
    """Return the headers that tell a browser what an allowed page may send."""
    return {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": exchange.header("access-control-request-headers") or "*",
        "Access-Control-Max-Age": "600",
    }


def is_origin(text: str) -> bool:
    """Return whether a browser can send a text in the header Origin, or whether it is "*"."""
    return _ORIGIN.fullmatch(text) is not None


def is_host(text: str) -> bool:
    """Return whether a text is a name or an address without a port, or "*"."""
    return _HOST.fullmatch(text) is not None or ("[" not in text and address_of(text) is not None)


def _is_own(name: str, settings: Settings) -> bool:
    """Return whether a name is the server's own, and not one that another site has pointed at it.

    A site can point only names with a dot at a server, and no addresses. A server that listens at this
    machine alone needs only this machine's names.
    """
    if is_loopback(name) or not {"*", name}.isdisjoint(settings.hosts):
        return True
    return bool(name) and not settings.local and ("." not in name or address_of(name) is not None)


def _split(place: str) -> SplitResult:
    """Return the parts of a name and port, empty ones if it is neither."""
    try:
        return urlsplit(f"//{place}")
    except ValueError:
        return urlsplit("")


def _allowed(origin: str, settings: Settings) -> bool:
    return "*" in settings.origins or origin in settings.origins
