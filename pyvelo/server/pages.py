"""Files of the page at /, which shows the block map and has a chat."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["FILES", "HEADERS", "file_of"]

FILES = {
    "/": ("index.html", "text/html"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/map.js": ("map.js", "text/javascript"),
    "/chat.js": ("chat.js", "text/javascript"),
}
"""Name and type of the file at each path."""

HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Headers of every file: scripts, styles and connections of this server only."""

_FOLDER = Path(__file__).parent / "page"


@cache
def file_of(path: str) -> tuple[bytes, dict[str, str]]:
    """Return the content and the headers of a path of FILES."""
    name, kind = FILES[path]
    return (_FOLDER / name).read_bytes(), {**HEADERS, "content-type": f"{kind}; charset=utf-8"}
