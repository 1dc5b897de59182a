"""Compares our sandbox for chat templates with upstream's common/jinja, and prints a table.

Upstream's templates are rendered by both: are the texts equal, and does upstream mark what a user wrote? Then
upstream renders the hostile templates of tests/chat, each in a process with 2 GiB and 4 s of CPU time. Run it
when the pin moves: docs/ARCHITECTURE.md says why the sandbox is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.chat.marked import Marked
from pyvelo.chat.meter import Meter
from pyvelo.chat.template import ChatTemplate
from pyvelo.errors import TemplateError
from scripts._common import ROOT, ScriptError, run_main
from tests.chat.conversations import CONVERSATIONS
from tests.chat.hostile import BROKEN, ENDLESS, HUGE
from tests.upstream_models import models_folder

BUILD = ROOT / "build" / "jinja-lab"
SECONDS = 4
MEMORY = 2 << 30
RENDERED, REFUSED = "renderings", "renderings that one of the two engines alone refuses"
DIFFERENT = "renderings with another text"
UNMARKED = "renderings with text of messages or tools that upstream does not mark"
TEMPLATES, UNSAFE = "templates", "templates with such a rendering"


class Recorded(ChatTemplate):
    """A template that keeps what it was rendered with last."""

    names: dict[str, Any]

    def _run(self, names: dict[str, Any], meter: Meter) -> Marked:
        self.names = names
        return super()._run(names, meter)


def build() -> Path:
    """Compile upstream's engine with native/lab/jinja_lab.cpp; return the program."""
    tree = models_folder().parent
    names = ("lexer", "parser", "runtime", "string", "value")
    sources = [tree / "common" / "jinja" / f"{name}.cpp" for name in names]
    sources += [tree / "common" / "json.cpp", tree / "common" / "unicode.cpp"]
    program = BUILD / "jinja_lab"
    program.parent.mkdir(parents=True, exist_ok=True)
    include = [f"-I{tree / folder}" for folder in ("common", "vendor", "ggml/include")]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", *include]
    done = subprocess.run(
        [*command, str(ROOT / "native/lab/jinja_lab.cpp"), *map(str, sources), "-o", str(program)]
    )
    if done.returncode:
        raise ScriptError("common/jinja does not compile: see the compiler's errors above")
    return program


def limit() -> None:
    """Limit memory and CPU time of the process that renders."""
    import resource  # Windows has none

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def render(program: Path, source: str, names: dict[str, Any]) -> tuple[str, bytes, bytes]:
    """Render with upstream's engine: return how it ended, the text, and a mark for each byte of it."""
    with tempfile.TemporaryDirectory() as folder:
        template, context = Path(folder, "template"), Path(folder, "context")
        template.write_text(source, encoding="utf-8", newline="")
        context.write_text(json.dumps(names), encoding="utf-8")
        done = subprocess.run([program, template, context], preexec_fn=limit, capture_output=True, text=True)
    if done.returncode:
        return f"killed by signal {-done.returncode}", b"", b""
    text, marks = b"", b""
    for line in done.stdout.splitlines():
        kind, _, digits = line.partition(" ")
        part = bytes.fromhex(digits)
        if kind == "error":
            return "out of memory" if b"bad_alloc" in part else "refused", part, b""
        text += part
        marks += bytes((int(kind),)) * len(part)
    return "rendered", text, marks


def compare(program: Path) -> Counter[str]:
    """Render upstream's templates with the tests' conversations; count what both make of them."""
    counts = Counter(dict.fromkeys((RENDERED, REFUSED, DIFFERENT, UNMARKED, TEMPLATES, UNSAFE), 0))
    for path in sorted((models_folder() / "templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        template = Recorded(source, name=path.stem, bos="<BOS>", eos="<EOS>")
        unmarked = False
        for conversation in CONVERSATIONS.values():
            options = dict(conversation)
            try:
                ours = template.render_marked(
                    options.pop("messages"),
                    tools=options.pop("tools", None),
                    add_generation_prompt=options.pop("add_generation_prompt", True),
                    arguments=options,
                )
            except TemplateError:
                ours = None
            end, text, marks = render(program, source, template.names)
            counts[RENDERED] += 1
            if ours is None or end != "rendered":
                counts[REFUSED] += (ours is None) == (end == "rendered")
                continue
            if text != str.__str__(ours).encode():
                counts[DIFFERENT] += 1
                continue
            mask = b"".join(
                bytes((mark,)) * len(char.encode()) for char, mark in zip(ours, ours.mask, strict=True)
            )
            lost = any(mine > theirs for mine, theirs in zip(mask, marks, strict=True))
            counts[UNMARKED] += lost
            unmarked |= lost
        counts[TEMPLATES] += 1
        counts[UNSAFE] += unmarked
    return counts


def main() -> int:
    """Build the program, render and print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    program = build()
    for what, count in compare(program).items():
        print(f"{count:6} {what}")
    names = {
        "messages": [{"role": "user", "content": "Hi", "table": {f"k{index}": index for index in range(50)}}]
    }
    hostile = [*ENDLESS.values(), *HUGE.values(), *BROKEN.values()]
    ends = Counter(render(program, source, names)[0] for source in hostile)
    print(f"{len(hostile):6} hostile templates: {', '.join(f'{count} {end}' for end, count in ends.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
