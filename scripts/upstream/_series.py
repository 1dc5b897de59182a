"""The patch series of vendor/ as plain data, and git to apply it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts._common import ScriptError

MAX_PATCHES = 14
MAX_CHANGED_LINES = 180
HEADER_FIELDS = ("Reason", "Touches", "Drop-When")

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
# The user's and the machine's git settings must not change the result of an apply or an export.
_GIT_SETTINGS = {
    "safe.directory": "*",
    "user.name": "PyVelo",
    "user.email": "pyvelo@localhost",
    "core.autocrlf": "false",
    "core.compression": "0",
    "gc.auto": "0",
}


@dataclass(frozen=True)
class Patch:
    """One patch file: `header` is the text before the first "diff --git", `diff` the rest."""

    name: str
    header: str
    diff: str

    @property
    def text(self) -> str:
        """Content of the patch file."""
        return f"{self.header.rstrip()}\n\n{self.diff}"

    @property
    def files(self) -> list[str]:
        """Upstream files that the patch changes, in order."""
        return re.findall(r"^diff --git a/(\S+) b/\S+$", self.diff, re.MULTILINE)

    @property
    def missing_fields(self) -> list[str]:
        """Fields of the header that are absent or empty."""
        return [
            field for field in HEADER_FIELDS if not re.search(rf"^{field}: *\S", self.header, re.MULTILINE)
        ]

    @property
    def changed_lines(self) -> int:
        """Number of added and removed lines, counted inside the hunks alone."""
        count = old = new = 0
        for line in self.diff.split("\n"):
            if old <= 0 and new <= 0:
                if hunk := _HUNK.match(line):
                    old, new = (int(size) if size is not None else 1 for size in hunk.groups())
                continue
            old -= line[:1] not in ("+", "\\")
            new -= line[:1] not in ("-", "\\")
            count += line[:1] in ("+", "-")
        return count


def parse_patch(name: str, text: str) -> Patch:
    """Split a patch file into its header and its diff."""
    start = 0 if text.startswith("diff --git ") else text.find("\ndiff --git ") + 1
    if start == 0 and not text.startswith("diff --git "):
        raise ScriptError(
            f"{name} has no line that begins with 'diff --git': export it with patches.py refresh"
        )
    return Patch(name, text[:start], text[start:])


def read_series(vendor: Path) -> list[Patch]:
    """Return the patches in the order of vendor/series.

    Raises: ScriptError if the series and the folder disagree.
    """
    names = [line for line in (vendor / "series").read_text(encoding="utf-8").split("\n") if line.strip()]
    present = {path.name for path in (vendor / "patches").glob("*.patch")}
    if absent := [name for name in names if name not in present]:
        raise ScriptError(f"{vendor / 'series'} names {absent[0]}, which {vendor / 'patches'} does not hold")
    if strays := sorted(present - set(names)):
        raise ScriptError(
            f"{vendor / 'patches' / strays[0]} is not in {vendor / 'series'}: add it there or remove it"
        )
    if len(set(names)) != len(names):
        raise ScriptError(f"{vendor / 'series'} names a patch twice")
    return [parse_patch(name, _read(vendor / "patches" / name)) for name in names]


def _read(path: Path) -> str:
    # bytes as they are: a patch may hold other line ends
    return path.read_bytes().decode("utf-8", "surrogateescape")


def write_series(vendor: Path, patches: Sequence[Patch]) -> None:
    """Replace vendor/patches and vendor/series."""
    folder = vendor / "patches"
    folder.mkdir(exist_ok=True)
    keep = {patch.name for patch in patches}
    for path in folder.glob("*.patch"):
        if path.name not in keep:
            path.unlink()
    for patch in patches:
        (folder / patch.name).write_bytes(patch.text.encode("utf-8", "surrogateescape"))
    (vendor / "series").write_text("".join(f"{patch.name}\n" for patch in patches), encoding="utf-8")


def git_program() -> str:
    """Return the path of git.

    Raises: ScriptError if it is not installed.
    """
    program = shutil.which("git")
    if program is None:
        raise ScriptError(
            "git is needed to apply the patches to llama.cpp: install it and see that it is in PATH"
        )
    return program


def git(tree: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run git in `tree` as if it lay in no other repository: inside one, `git apply` silently skips files."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "LC_ALL": "C",
    }
    settings = [word for key, value in _GIT_SETTINGS.items() for word in ("-c", f"{key}={value}")]
    done = subprocess.run(
        [git_program(), *settings, *arguments],
        cwd=tree,
        env=environment,
        input=stdin.encode("utf-8", "surrogateescape"),
        capture_output=True,
    )
    out, err = (stream.decode("utf-8", "surrogateescape") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def is_applied(tree: Path, patch: Patch) -> bool:
    """Return whether the tree carries this patch."""
    return git(tree, "apply", "--reverse", "--check", stdin=patch.text).returncode == 0


def apply_series(tree: Path, patches: Sequence[Patch]) -> list[Patch]:
    """Apply in place the patches that are not applied yet, each whole or not at all; return them.

    Raises: ScriptError that names the first patch that does not apply.
    """
    applied = []
    for patch in patches:
        if is_applied(tree, patch):
            continue
        done = git(tree, "apply", stdin=patch.text)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["git gave no reason"])[0]
            raise ScriptError(
                f"{patch.name} does not apply to {tree} ({reason}): this is not the llama.cpp of "
                f"vendor/upstream.txt, or it was changed; take a pristine one, or adapt the patch"
            )
        applied.append(patch)
    return applied
