"""Draw the terminal after a short chat with the demo model.

    python scripts/demo/record_chat.py docs/chat.svg

Runs the real `pyvelo chat` in a pseudo-terminal, types the lines below and interprets the output with pyte.
The picture is an SVG without references to other files. Needs the extra `test`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable
from io import StringIO
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

TALK = ("This is Anna Berger 4821.", "What is PyVelo?", "What is 12 + 30?", "Who is Anna?", "/stats")
ARGUMENTS = ("chat", "--temperature", "0", "--threads", "1")
COLUMNS, ROWS = 88, 30
PROMPT = ">"
LIMIT = 60.0  # seconds for an answer
QUIET = 0.3  # seconds without output before a prompt counts as ready

# for Console.export_svg; uses installed fonts
PICTURE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>A talk with the demo model in pyvelo chat</title>
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


class Terminal:
    """Program in a terminal, and its screen."""

    def __init__(self, command: list[str]) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)

    def say(self, line: str) -> None:
        """Type a line and wait for the next prompt."""
        os.write(self._master, f"{line}\r".encode())
        self.wait()

    def wait(self) -> None:
        """Read until there is an empty prompt and no more output."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            if select.select([self._master], [], [], QUIET)[0]:
                # pyte has no dim text: gray comes close
                self._stream.feed(os.read(self._master, 65536).replace(b"\x1b[2m", b"\x1b[90m"))
            elif self.screen.display[self.screen.cursor.y].strip() == PROMPT:
                return
        raise SystemExit(f"no prompt within {LIMIT:g} s; the screen:\n" + "\n".join(self.screen.display))

    def close(self) -> None:
        """End the program as a user does."""
        os.write(self._master, b"\x04")
        try:
            self._process.wait(LIMIT)
        finally:
            self._process.kill()
            os.close(self._master)


def lines_of(screen: pyte.Screen) -> list[Text]:
    """Return the lines of a screen with their styles, without empty ones at the end."""
    lines = []
    for y in range(screen.lines):
        line = Text()
        cells = (screen.buffer[y][x] for x in range(screen.columns))
        for style, alike in groupby(cells, _style):
            line.append("".join(cell.data for cell in alike), style)
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _style(cell: pyte.screens.Char) -> Style:
    return Style(
        color=_color(cell.fg),
        bgcolor=_color(cell.bg),
        bold=cell.bold or None,
        italic=cell.italics or None,
        underline=cell.underscore or None,
        reverse=cell.reverse or None,
    )


def _color(name: str) -> str | None:
    """Return rich's name for a color of pyte's: a name, or six hexadecimal digits."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    # the last one is pyte's spelling
    odd = {"brown": "yellow", "brightbrown": "bright_yellow", "bfightmagenta": "bright_magenta"}
    return odd.get(name, name.replace("bright", "bright_"))


def draw(lines: Iterable[Text]) -> str:
    """Return an SVG of a terminal with these lines."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, legacy_windows=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    return console.export_svg(title=f"pyvelo {' '.join(ARGUMENTS)}", code_format=PICTURE, unique_id="chat")


def record(talk: Iterable[str] = TALK) -> str:
    """Chat, and return the picture of the final screen."""
    command = [sys.executable, "-m", "pyvelo.cli", *ARGUMENTS, "--no-history", "--no-status"]
    terminal = Terminal(command)
    try:
        terminal.wait()
        for line in talk:
            terminal.say(line)
    finally:
        terminal.close()
    return draw(lines_of(terminal.screen))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="write the SVG there")
    parser.parse_args().picture.write_text(record(), encoding="utf-8")


if __name__ == "__main__":
    main()
