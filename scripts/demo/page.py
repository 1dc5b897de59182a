"""Take a picture of the page that `pyvelo serve` shows, with requests, sessions and a forked chat.

    python scripts/demo/page.py docs/page.png

Serves the demo model at a free port, lets some clients use it, chats in Chromium and forks the chat. Needs
the extras `serve` and `test`, and Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts._served import served

SERVE = ("--ctx", "1024", "--kv-cache-bytes", "16M", "--swap-bytes", "2M")
TALK = ("This is Anna Berger 4821.", "What is PyVelo?", "What is 12 + 30?")
FORKED = "Who is Anna?"
INSTRUCTION = "You answer questions about PyVelo, in short sentences. " * 20
CLIENTS = 5
WIDTH, HEIGHT = 1200, 1120


def post(url: str, body: dict[str, Any], name: str) -> None:
    """Send a request and read the whole answer, which may be a stream."""
    headers = {"content-type": "application/json", "x-request-id": name}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def use(url: str, number: int, ended: threading.Event) -> None:
    """Ask again and again, as one client, until `ended`. All clients have the same instruction."""
    draw = random.Random(number)
    turn = 0
    while not ended.is_set():
        turn += 1
        question = f"Client {number} asks question {draw.randrange(1000)}. "
        prompt = INSTRUCTION + question * draw.randrange(1, 12)
        body = {"prompt": prompt, "max_tokens": draw.randrange(50, 350), "ignore_eos": True, "stream": True}
        with suppress(OSError):
            post(f"{url}/v1/completions", body, f"client-{number}-{turn}")
        ended.wait(draw.random() * 1.5)


def talk(page: Any, text: str) -> None:
    """Send a message of the chat and wait for the end of the answer."""
    page.fill("#message", text)
    page.keyboard.press("Enter")
    page.wait_for_timeout(100)
    page.wait_for_selector("#send:not([disabled])")


def take_picture(url: str, path: Path, dark: bool, seconds: float) -> None:
    """Chat, fork, and write a picture of the page."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise ScriptError("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="dark" if dark else "light"
        )
        page.goto(url)
        page.wait_for_selector("#status[data-state=live]")
        for text in TALK:
            talk(page, text)
        page.wait_for_timeout(1000 * seconds)
        page.click("#fork")
        page.wait_for_timeout(100)
        page.wait_for_selector("#send:not([disabled])")
        talk(page, FORKED)
        page.wait_for_selector("#requests tr:has-text('client')")
        page.hover("#blocks", position={"x": WIDTH / 40, "y": 10})
        page.wait_for_timeout(300)
        page.screenshot(path=path)
        browser.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("--dark", action="store_true", help="draw the dark colours")
    parser.add_argument("--seconds", type=float, default=60.0, help="time that the charts show (60)")
    arguments = parser.parse_args(argv)
    ended = threading.Event()
    with served(*SERVE) as server:
        url = server.url
        clients = [threading.Thread(target=use, args=(url, n, ended)) for n in range(1, CLIENTS + 1)]
        for client in clients:
            client.start()
            time.sleep(0.1)
        try:
            take_picture(url, arguments.picture, arguments.dark, arguments.seconds)
        finally:
            ended.set()
            for client in clients:
                client.join()
    print(f"{arguments.picture}: {arguments.picture.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    run_main(main)
