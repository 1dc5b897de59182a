"""The page at /: its files, its headers, when it is off, and its colours for colour-blind people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest

import pyvelo
from pyvelo.cli import main
from pyvelo.server import pages
from pyvelo.server.auth import Keys, Tenant, _digest
from pyvelo.server.settings import Settings

from .servers import Server

FOLDER = Path(pages.__file__).parent / "page"
NAMES = ("free", "used", "shared", "cached", "reserved", "swapped")


@pytest.fixture(scope="module")
def open_server() -> Iterator[Callable[[Settings], Server]]:
    with ExitStack() as stack:

        def start(settings: Settings) -> Server:
            server = Server(settings)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="module")
def server(open_server: Callable[[Settings], Server]) -> Server:
    keys = Keys([Tenant("one", _digest("secret"))])
    return open_server(Settings(page=True, keys=keys))


@pytest.mark.parametrize("path", pages.FILES)
def test_each_file_has_its_type_and_its_headers(server: Server, path: str) -> None:
    name, kind = pages.FILES[path]
    answer = server.get(path)
    assert answer.status == 200, "no key is needed"
    assert answer.data == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_every_file_of_the_folder_is_served(server: Server) -> None:
    assert {path.name for path in FOLDER.iterdir()} == {name for name, _ in pages.FILES.values()}


def test_other_methods_and_paths(server: Server) -> None:
    assert server.post("/", {}).status == 405
    assert server.request("HEAD", "/").data == b""
    assert server.get("/page/index.html").status == 404
    assert server.get("/../page.js").status == 404
    assert server.get("/v1/blocks/stream").status == 401, "the data needs a key"


def test_the_page_is_off_unless_asked_for(open_server: Callable[[Settings], Server]) -> None:
    closed = open_server(Settings())
    for path in pages.FILES:
        answer = closed.get(path)
        assert answer.status == 404
        assert "--page" in answer.error["message"]


@pytest.mark.parametrize(
    ("host", "asked", "on"),
    [
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("localhost", False, True),
        ("0.0.0.0", False, False),
        ("192.0.2.1", False, False),
        ("0.0.0.0", True, True),
    ],
)
def test_the_command_shows_it_to_this_machine(
    monkeypatch: pytest.MonkeyPatch, host: str, asked: bool, on: bool
) -> None:
    seen: list[Settings] = []

    class Serve:
        def __init__(self, config: object, settings: Settings, **others: object) -> None:
            seen.append(settings)

        def run(self) -> None:
            pass

    monkeypatch.setattr("pyvelo.server.run.Serve", Serve)
    page = ["--page"] if asked else []
    with pytest.raises(SystemExit) as end:
        main(["serve", "--host", host, "--insecure", "--quiet", *page])
    assert end.value.code == 0
    assert seen[0].page is on


def test_nothing_foreign_and_nothing_inline() -> None:
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", html)
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//\w+\.\w+/|@import|url\(", text), path
    for name in ("page.js", "map.js", "chat.js"):
        text = (FOLDER / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text)
        assert not re.search(r"localStorage|sessionStorage|document\.cookie|indexedDB", text)


def test_every_control_has_a_name() -> None:
    html = (FOLDER / "index.html").read_text()
    fields = re.findall(r"<(?:input|textarea)\b[^>]*>", html)
    assert len(fields) > 3
    for field in fields:
        name = re.search(r'\bid="([^"]+)"', field)
        within_label = re.search(rf"<label>\s*{re.escape(field)}", html)
        assert within_label or (name and f'<label for="{name[1]}">' in html), field
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for attribute in ("aria-labelledby", "aria-describedby"):
        for value in re.findall(rf'{attribute}="([^"]+)"', html):
            assert set(value.split()) <= set(ids)


# ---- colours ----


def colours(dark: bool) -> dict[str, tuple[float, ...]]:
    """Return the colours of blocks, each as three linear values from 0 to 1."""
    text = (FOLDER / "page.css").read_text()
    part = re.findall(r":root \{(.*?)\}", text, re.S)[dark]
    found = dict(re.findall(r"--(\w+): #([0-9a-f]{6});", part))
    return {name: tuple(map(_linear, bytes.fromhex(found[name]))) for name in NAMES}


def _linear(value: int) -> float:
    share = value / 255
    return float(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)


# sight without one kind of cones, as matrices over linear RGB (Viénot, Brettel and Mollon, 1999)
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "no middle": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
    "grey": ((0.2126, 0.7152, 0.0722),) * 3,
}


def _lab(colour: tuple[float, ...]) -> tuple[float, ...]:
    """Return a colour in Oklab, whose distances are perceived differences."""
    red, green, blue = colour
    cones = (
        0.4122 * red + 0.5363 * green + 0.0514 * blue,
        0.2119 * red + 0.6807 * green + 0.1074 * blue,
        0.0883 * red + 0.2817 * green + 0.6300 * blue,
    )
    a, b, c = (max(0.0, value) ** (1 / 3) for value in cones)
    return (
        0.2105 * a + 0.7936 * b - 0.0041 * c,
        1.9780 * a - 2.4286 * b + 0.4506 * c,
        0.0259 * a + 0.7828 * b - 0.8087 * c,
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_differ_with_any_sight(sight: str, dark: bool) -> None:
    matrix = SIGHTS[sight]
    seen = {
        name: _lab(tuple(sum(f * v for f, v in zip(row, colour, strict=True)) for row in matrix))
        for name, colour in colours(dark).items()
    }
    for first, second in combinations(NAMES, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[first], seen[second], strict=True)) ** 0.5
        assert distance > (0.03 if sight == "grey" else 0.1), (first, second, distance)


# ---- packages ----


def test_the_files_are_installed_with_the_package() -> None:
    folder = Path(pyvelo.__file__).parent / "server" / "page"
    assert all((folder / name).is_file() for name, _ in pages.FILES.values())
