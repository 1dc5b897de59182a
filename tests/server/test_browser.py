"""The page at / in Chromium: its map is the engine's, and chat, forks, keys and restarts work."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyvelo.demo import DEMO_MODEL
from pyvelo.server.auth import Keys, Tenant, _digest
from pyvelo.server.settings import Settings

from .browsers import ALL_CHANGE, WAIT, agrees, becomes, held, pixels, say, serving, slow_down, until, visit
from .servers import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu"]
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=options, headless=True)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Return a page of the browser. An error of a script, or a refusal by the CSP, fails the test."""
    found: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.allowed_errors = ("Failed to load resource", "net::ERR")
    yield page
    context.close()
    assert [each for each in found if not each.startswith(page.allowed_errors)] == []


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving(n_ctx=2048, kv_cache_bytes=8 << 20, model=DEMO_MODEL) as server:
        yield server


# ---- the map ----


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pixels_of_the_grid_are_the_engines_blocks(page: Any, demo: Server, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    visit(page, demo)
    assert sum(pixels(page).values()) == demo.serving.engine.stats().blocks_total
    prompt = "The same words at the start. " * 40
    for end in ("One.", "Two."):
        demo.ask("/v1/completions", {"prompt": prompt + end, "max_tokens": 2})
    demo.ask("/v1/completions", {"prompt": "Other words, which none has. " * 20, "max_tokens": 2})
    session = demo.ask("/v1/sessions", {"prompt": prompt})["id"]
    twin = demo.ask(f"/v1/sessions/{session}/fork", {})["data"][0]["id"]
    until(page, lambda: pixels(page).get("shared", 0) > 4 and agrees(page, demo))
    assert {"free", "shared", "cached"} <= pixels(page).keys() <= {"free", "used", "shared", "cached"}
    assert page.evaluate("pyvelo.map.state.counts.shared") == pixels(page)["shared"]
    for name in (session, twin):
        demo.request("DELETE", f"/v1/sessions/{name}")
    until(page, lambda: not pixels(page).get("shared") and agrees(page, demo))


def test_colours_change_with_the_scheme(page: Any, demo: Server) -> None:
    visit(page, demo)
    light = page.evaluate("pyvelo.map.colours")
    page.emulate_media(color_scheme="dark")
    until(page, lambda: page.evaluate("pyvelo.map.colours") != light)
    dark = page.evaluate("pyvelo.map.colours")
    assert all(a != b for a, b in zip(light, dark, strict=True))
    until(page, lambda: agrees(page, demo))


def test_reserved_blocks_of_a_long_prompt(page: Any, endless_model: Path) -> None:
    with serving(model=endless_model, n_ctx=4096, block_size=64, max_batch_tokens=32) as server:
        visit(page, server)
        slow_down(server, 0.05)
        body = {"prompt": "a" * 3000, "max_tokens": 1, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.ask, "/v1/completions", body)
            until(page, lambda: server.serving.engine.stats().blocks_reserved > 10)
            with held(server):
                until(page, lambda: agrees(page, server) and pixels(page).get("reserved", 0) > 10)
                row = page.locator("#requests tr").first
                assert row.locator("td").nth(2).text_content() == "prefill"
            answer.result()
        until(page, lambda: page.locator("#requests tr").count() == 0 and agrees(page, server))
        assert page.locator("#no-requests").is_visible()


def test_the_keyboard_and_the_pointer_show_a_blocks_owner(page: Any, demo: Server) -> None:
    visit(page, demo)
    session = demo.ask("/v1/sessions", {"prompt": "Words that fill some blocks. " * 20})["id"]
    demo.ask(f"/v1/sessions/{session}/generate", {"max_tokens": 2})
    becomes(page, "pyvelo.map.rows.some((row) => row?.[1] === 1)")
    used = page.evaluate("pyvelo.map.rows.find((row) => row?.[1] === 1)[0]")
    page.focus("#grid")
    page.keyboard.press("Home")
    for _ in range(used):
        page.keyboard.press("ArrowRight")
    until(page, lambda: f"owner: session {session[5:11]}" in page.text_content("#detail"))
    text = page.text_content("#detail")
    assert text.startswith(f"Block {used}: used, 1 reference, ")
    page.keyboard.press("End")
    last = demo.serving.engine.stats().blocks_total - 1
    assert page.text_content("#detail").startswith(f"Block {last}: ")
    left, top, cell = page.evaluate("(block) => [...pyvelo.map.place(block), pyvelo.map.cell]", used)
    page.hover("#blocks", position={"x": left + cell / 2, "y": top + cell / 2})
    assert page.text_content("#detail") == text
    page.click("#table-view summary")
    becomes(page, "document.querySelectorAll('#ranges tr').length > 1")
    rows = page.locator("#ranges tr").all_text_contents()
    assert any(f"session {session[5:11]}" in row for row in rows), "the map as a table"
    demo.request("DELETE", f"/v1/sessions/{session}")


# ---- chat ----


def test_an_answer_appears_token_by_token(page: Any) -> None:
    with serving() as server:
        visit(page, server)
        page.evaluate(
            """() => {
                window.lengths = [];
                new MutationObserver(() => {
                    const part = document.querySelector(".log .assistant");
                    if (part) lengths.push(part.textContent.length);
                }).observe(document.querySelector("#branches"), {
                    childList: true, subtree: true, characterData: true,
                });
            }"""
        )
        slow_down(server, 0.05)
        say(page, "What is PyVelo?")
        lengths = page.evaluate("lengths")
        assert lengths == sorted(lengths)
        note = page.text_content(".log .cached")
        n_new = int(note.split()[-2])
        assert len(set(lengths)) > 0.7 * n_new > 10, "frames may show two tokens"
        assert page.text_content(".log .assistant").startswith("PyVelo")


def test_a_fork_shows_shared_blocks(page: Any, demo: Server) -> None:
    visit(page, demo)
    say(page, "This is Anna Berger 4821.")
    say(page, "What is PyVelo?")
    say(page, "What is 7 + 12?")
    page.click("#fork")
    becomes(page, "!pyvelo.chat.forking")
    until(page, lambda: pixels(page).get("shared", 0) > 1 and agrees(page, demo))
    states = page.locator("#requests tr td:nth-child(3)").all_text_contents()
    assert states == ["idle session", "idle session"]
    assert page.locator(".log").count() == 2
    first, second = page.locator(".log").all_text_contents()
    assert first == second
    say(page, "Who is Anna?")
    for log in page.locator(".log").all():
        assert "4821" in log.locator(".assistant").last.text_content()
        assert not log.locator(".cached").last.text_content().startswith("0 of")
    page.check("input[value=B]")
    say(page, "What is 12 + 30?")
    first, second = page.locator(".log").all_text_contents()
    assert "12 + 30" in second
    assert "12 + 30" not in first
    until(page, lambda: pixels(page).get("shared", 0) > 0)
    sessions = {each["id"]: each["n_tokens"] for each in demo.get("/v1/sessions").json["data"]}
    until(
        page,
        lambda: (
            sorted(page.evaluate("[...pyvelo.requests.values()].map((row) => [row.id, row.tokens])"))
            == sorted([name, n] for name, n in sessions.items())
        ),
    )
    page.click("#restart")
    until(page, lambda: page.locator("#requests tr").count() == 0)
    assert page.locator(".log").count() == 1


def test_an_answer_can_be_stopped(page: Any, endless_model: Path) -> None:
    with serving(model=endless_model, n_ctx=4096) as server:
        visit(page, server)
        page.fill("#message", "a")
        page.click("#send")
        becomes(page, "document.querySelector('.log .assistant')?.textContent.length > 20")
        page.click("#stop")
        becomes(page, "document.querySelector('#chat-status').textContent === 'A stopped.'")
        until(page, lambda: page.locator("#requests tr").count() == 0)
        assert page.locator(".log .error").count() == 0


def test_text_is_never_markup(page: Any) -> None:
    name = "<img src=x onerror=alert(1)>"
    with serving(Settings(page=True, model_names=(name,))) as server:
        visit(page, server)
        assert page.text_content("#model") == name
        say(page, name)
        assert name in page.text_content(".log .user")
        assert page.locator("img").count() == 0


# ---- keys, restarts, small screens ----


def test_a_key_is_asked_for_and_stays_in_memory(page: Any) -> None:
    keys = Keys([Tenant("anna", _digest("the key"))])
    with serving(Settings(page=True, keys=keys)) as server:
        page.goto(server.url)
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "clé")  # no header can hold it, so the browser says so
        page.keyboard.press("Enter")
        assert page.eval_on_selector("#key", "key => key.validity.patternMismatch")
        assert page.is_visible("#key-form")
        page.fill("#key", "another key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#status:has-text('unknown')")
        page.fill("#key", "the key")
        page.click("#key-form button")
        page.wait_for_selector("#status[data-state=live]")
        assert not page.is_visible("#key-form")
        say(page, "What is PyVelo?")
        assert page.text_content(".log .assistant").startswith("PyVelo")
        stored = page.evaluate(
            "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        )
        assert "the key" not in stored
        assert page.context.cookies() == []


def test_it_reconnects_after_the_server_restarts(page: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "pyvelo",
        "serve",
        "--port",
        str(port),
        "--ctx",
        "512",
        "-q",
        "--threads",
        "1",
    ]
    environment = {**os.environ, "PYVELO_API_KEY": ""}

    def start(stack: ExitStack) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        assert process.stdout is not None
        stack.callback(process.stdout.close)
        assert "served at" in process.stdout.readline()
        return process

    with ExitStack() as stack:
        first = start(stack)
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#status[data-state=live]")
        first.terminate()
        assert first.wait(20) == 0, "an open page does not delay the end"
        page.wait_for_selector("#status[data-state=lost]")
        start(stack)
        page.wait_for_selector("#status[data-state=live]")
        say(page, "What is PyVelo?")
        assert page.text_content(".log .assistant").startswith("PyVelo")


def test_a_hidden_page_ends_the_recording(page: Any, demo: Server) -> None:
    visit(page, demo)
    core = demo.serving.engine.core
    assert core.observer is not None
    page.evaluate(
        """() => {
            Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    until(page, lambda: core.observer is None)
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector("#status[data-state=live]")


def test_a_phone_has_one_column_without_scrolling_sideways(page: Any, demo: Server) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    visit(page, demo)
    say(page, "What is PyVelo?")
    page.click("#fork")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    lefts = page.evaluate("[...document.querySelectorAll('section')].map((part) => part.offsetLeft)")
    assert len(set(lefts)) == 1
    until(page, lambda: agrees(page, demo))
    page.click("#restart")


@pytest.mark.slow
def test_ten_thousand_blocks_take_less_than_a_third_of_a_core(page: Any, tiny_model: Path) -> None:
    with serving(model=tiny_model, kv_cache_bytes=10_000 * 32 * 1024, max_num_seqs=80, n_ctx=None) as server:
        visit(page, server)
        n_blocks = server.serving.engine.stats().blocks_total
        assert n_blocks >= 10_000
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def measured() -> dict[str, float]:
            found = session.send("Performance.getMetrics")["metrics"]
            return {metric["name"]: metric["value"] for metric in found}

        with ExitStack() as stack:
            open_lines = []
            for n in range(8):
                body = {"prompt": f"{n}" * 200, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
                url = f"{server.url}/v1/completions"
                answer = stack.enter_context(httpx.stream("POST", url, json=body, timeout=60))
                open_lines.append(answer.iter_lines())
                next(open_lines[-1])
            page.wait_for_timeout(1000)
            first, n_first = measured(), page.evaluate("pyvelo.map.state.n")
            page.wait_for_timeout(5000)
            last, n_last = measured(), page.evaluate("pyvelo.map.state.n")
        seconds = last["Timestamp"] - first["Timestamp"]
        updates = (n_last - n_first) / seconds
        share = (last["TaskDuration"] - first["TaskDuration"]) / seconds
        worst = page.evaluate(ALL_CHANGE)
        print(f"{n_blocks} blocks, {updates:.1f} updates/s: {100 * share:.1f} % of a core")
        print(f"an update of all blocks: {worst:.1f} ms")
        assert 1 < updates <= 5.2
        assert share < 0.3
        assert 5 * worst < 300, "30 % of a core, if every block changes each time"
