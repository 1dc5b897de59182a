"""Collect the licences of upstream's code in LICENSES/upstream.txt, or check that they are complete there.

    python scripts/upstream/licences.py check
    python scripts/upstream/licences.py write

Both need the sources that vendor/upstream.txt pins, which are downloaded if they are not cached. The check
fails if a new version of upstream has another licence, or a notice that the file lacks.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.upstream._pin import read_pin
from scripts.upstream.fetch import locate

TARGET = ROOT / "LICENSES" / "upstream.txt"
SCANNED = ("ggml/include", "ggml/src", "include", "src", "common", "vendor/nlohmann")
"""Folders with sources that are compiled into the library; their files may bear notices of their own."""
BACKENDS = re.compile(r"ggml/src/ggml-(?!cpu/|cuda/)[a-z]+/|/kleidiai/|ggml/include/ggml-(cann|sycl)\.h")
"""Files of backends that are not built."""
SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc"}
NOTICE = re.compile(r"(?:SPDX-FileCopyrightText: |Copyright (?:\(c\) )?(?=\d{4}))(.*?)\s*$", re.I | re.M)
OTHER = re.compile(r"Apache License|General Public|Mozilla Public|SPDX-License-Identifier: (?!MIT\b)", re.I)
"""Licences whose conditions are others than MIT's."""
APACHE = {"vendor/nlohmann/json.hpp": "2018 The Abseil Authors"}
"""Files with a part under the Apache License, and the part's holder."""
COMMENT = re.compile(r"(?:^//.*\n)+", re.M)


def sources(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each source that is compiled."""
    for folder in SCANNED:
        for file in sorted((tree / folder).rglob("*")):
            name = file.relative_to(tree).as_posix()
            if file.suffix in SOURCES and not BACKENDS.search(name):
                yield name, file.read_text(encoding="utf-8", errors="replace")


def notices(tree: Path) -> dict[str, str]:
    """Return the copyright holders that compiled sources name, and a file that does so.

    Raises: ScriptError if one names a licence that is neither MIT's nor known.
    """
    found: dict[str, str] = {}
    for name, text in sources(tree):
        other = OTHER.search(text)
        if other is not None and name not in APACHE:
            raise ScriptError(f"{name} names another licence than MIT's: {other[0]!r}: look what it asks for")
        for holder in NOTICE.findall(text):
            found.setdefault(holder, name)
    return found


def licences(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each licence in upstream's tree."""
    yield "llama.cpp and ggml", (tree / "LICENSE").read_text(encoding="utf-8")
    for file in sorted((tree / "licenses").iterdir()):
        yield file.name.removeprefix("LICENSE-"), file.read_text(encoding="utf-8")
    sgemm = tree / "ggml" / "src" / "ggml-cpu" / "llamafile" / "sgemm.cpp"
    header = COMMENT.match(sgemm.read_text(encoding="utf-8"))
    if header is None or "Permission is hereby granted" not in header[0]:
        raise ScriptError(f"{sgemm} no longer begins with its licence: look where it is now")
    lines = (line.removeprefix("//").strip() for line in header[0].splitlines())
    yield "llamafile's matrix products (ggml/src/ggml-cpu/llamafile)", "\n".join(lines)


def collected(tree: Path) -> str:
    """Return the text of LICENSES/upstream.txt for a tree."""
    found = list(licences(tree))
    known = "".join(text for _, text in found)
    others = {holder: f"{holder} ({file})" for holder, file in notices(tree).items() if holder not in known}
    apache = [others.pop(holder) for holder in APACHE.values() if holder in others]
    same = "\n".join(others.values())
    found.append(("Other holders of copyright in these sources, under the same MIT licence", same))
    if apache:
        found.append(("Under the Apache License 2.0, see apache-2.0.txt beside this file", "\n".join(apache)))
    return "\n\n".join(f"{title}\n{'=' * len(title)}\n\n{text.strip()}\n" for title, text in found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["check", "write"])
    command = parser.parse_args().command
    text = collected(locate(read_pin()).path)
    if command == "write":
        TARGET.write_text(text, encoding="utf-8")
    elif not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
        raise ScriptError(
            "LICENSES/upstream.txt differs from upstream's tree: licences.py write, and read it"
        )
    print("LICENSES/upstream.txt has the licences of upstream's tree")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
