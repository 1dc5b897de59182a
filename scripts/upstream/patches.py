"""Apply, check and maintain the patch series of vendor/.

The series is hooks only. Every patch opens with Reason:, Touches: and Drop-When:, and becomes one commit of
an edited tree:

    patches.py edit DIR                makes a llama.cpp in DIR, a git repository with a commit for each patch
    (cd DIR; edit; git commit -a --fixup=HASH; git rebase -i --autosquash --root)
    patches.py refresh DIR             exports the commits: the subject names the file, the body is its header

To move to the next version of upstream:

    patches.py refresh --to VERSION    prints the hunks that fail there
    patches.py refresh --to VERSION DIR    keeps the tree for repair, with the failed hunks as .rej files
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts.upstream._pin import VENDOR, Pin, exclusive, publish, read_pin, sha256_file
from scripts.upstream._series import (
    HEADER_FIELDS,
    MAX_CHANGED_LINES,
    MAX_PATCHES,
    Patch,
    apply_series,
    git,
    git_program,
    is_applied,
    parse_patch,
    read_series,
    write_series,
)
from scripts.upstream.fetch import STAMP, Tree, download, is_llama, is_source, locate, unpack


def patched_copy(tree: Tree, patches: Sequence[Patch]) -> Path:
    """Return the cached copy of a pristine tree with the series; make it, or repair it if it was changed."""
    digest = hashlib.sha256(tree.identity.encode())
    for patch in patches:
        digest.update(f"\0{patch.name}\0".encode() + patch.text.encode("utf-8", "surrogateescape"))
    target = tree.cache / f"patched-{digest.hexdigest()[:12]}" / "llama.cpp"

    def fill(fresh: Path) -> None:
        copy_sources(tree.path, fresh)
        apply_series(fresh, patches)

    with exclusive(target.parent.with_suffix(".lock")):
        if not (is_llama(target) and all(is_applied(target, patch) for patch in patches)):
            publish(target, fill)
    return target


def copy_sources(source: Path, target: Path) -> None:
    """Copy a llama.cpp folder, without git's files and build folders, into the empty folder `target`."""

    def skip(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not is_source(source, Path(folder, name))]

    shutil.copytree(source, target, ignore=skip, dirs_exist_ok=True, ignore_dangling_symlinks=True)


def apply(tree: Path | None, vendor: Path = VENDOR) -> Path:
    """Patch `tree` in place, or make the cached copy if it is None; return its path."""
    patches = read_series(vendor)
    git_program()  # fail before a download
    if tree is None:
        return patched_copy(locate(read_pin(vendor)), patches)
    if not is_llama(tree):
        raise ScriptError(f"{tree} holds no llama.cpp: name the folder that has its CMakeLists.txt")
    for patch in apply_series(tree, patches):
        print(f"applied {patch.name}", file=sys.stderr)
    return tree


def check(vendor: Path = VENDOR) -> str:
    """Raise ScriptError if the series breaks a rule or does not apply; else return a line of figures."""
    patches = read_series(vendor)
    for patch in patches:
        if missing := patch.missing_fields:
            raise ScriptError(
                f"{patch.name} has no {missing[0]}: in its header, which needs {', '.join(HEADER_FIELDS)}"
            )
    changed = sum(patch.changed_lines for patch in patches)
    if len(patches) > MAX_PATCHES:
        raise ScriptError(
            f"{len(patches)} patches are over the budget of {MAX_PATCHES}: join two, or drop one"
        )
    if changed > MAX_CHANGED_LINES:
        raise ScriptError(
            f"{changed} changed lines are over the budget of {MAX_CHANGED_LINES}: move logic to our own files"
        )
    with tempfile.TemporaryDirectory(prefix="pyvelo-") as scratch:
        tree = Path(scratch, "llama.cpp")
        copy_sources(locate(read_pin(vendor)).path, tree)
        apply_series(tree, patches)
        # else a patch whose place a later one changes would be applied twice
        if again := [patch.name for patch in patches if not is_applied(tree, patch)]:
            raise ScriptError(f"a later patch changes lines that {again[0]} wrote or stands on: join the two")
    return (
        f"{len(patches)} patches of {MAX_PATCHES}, {changed} changed lines of {MAX_CHANGED_LINES}, "
        f"{len({file for patch in patches for file in patch.files})} files of upstream: all apply"
    )


def edit(target: Path, tree: Tree, patches: Sequence[Patch], label: str) -> list[str]:
    """Make `target` a git repository of the tree with one commit for each patch.

    A patch that does not apply is committed as far as it does. Returns a line for each failed hunk.
    """
    if target.exists() and any(target.iterdir()):
        raise ScriptError(f"{target} is not empty: name a folder that can be made")
    copy_sources(tree.path, target)
    (target / STAMP).unlink(missing_ok=True)
    _git(target, "init", "--quiet")
    _commit(target, label)
    failures = []
    for patch in patches:
        done = git(target, "apply", stdin=patch.text)
        if done.returncode != 0:
            failures += rejected(patch, git(target, "apply", "--reject", stdin=patch.text).stderr)
        _commit(target, f"{patch.name}\n\n{patch.header}")
    return failures


def _commit(tree: Path, message: str) -> None:
    # upstream's .gitignore covers files that it tracks; rejected hunks stay untracked and visible
    _git(tree, "add", "--all", "--force", "--", ".", ":(exclude,glob)**/*.rej")
    _git(
        tree,
        "commit",
        "--quiet",
        "--allow-empty",
        "--no-verify",
        "--cleanup=verbatim",
        "-F",
        "-",
        stdin=message,
    )


def _git(tree: Path, *arguments: str, stdin: str = "") -> str:
    done = git(tree, *arguments, stdin=stdin)
    if done.returncode != 0:
        raise ScriptError(
            f"git {arguments[0]} failed in {tree} ({done.stderr.strip()}): is it a tree of patches.py edit?"
        )
    return done.stdout


def rejected(patch: Patch, report: str) -> list[str]:
    """Return a line for each hunk or file that `git apply --reject` could not apply."""
    lines = []
    file = ""
    for line in report.splitlines():
        if match := re.match(r"Applying patch (\S+) with", line):
            file = match[1]
        elif match := re.match(r"Rejected hunk #(\d+)", line):
            lines.append(f"{patch.name}: {file}: hunk {match[1]}{_hunk_title(patch, file, int(match[1]))}")
        elif match := re.match(r"error: (\S+): (No such file or directory|does not exist.*)", line):
            lines.append(f"{patch.name}: {match[1]}: the file is gone")
    # never report a failed patch as applied, whatever git prints
    return lines or [f"{patch.name}: {report.strip() or 'does not apply'}"]


def _hunk_title(patch: Patch, file: str, number: int) -> str:
    """Return the place of a hunk: the text after its second @@."""
    for part in re.split(r"^(?=diff --git )", patch.diff, flags=re.MULTILINE):
        if part.startswith(f"diff --git a/{file} "):
            titles = re.findall(r"^@@ -(\d+).*? @@ ?(.*)$", part, re.MULTILINE)
            if number <= len(titles):
                line, title = titles[number - 1]
                return f" (line {line}{': ' if title else ''}{title})"
    return ""


def refresh(tree: Path, vendor: Path = VENDOR) -> list[Patch]:
    """Export the commits of an edited tree as the series, in their order; return the patches."""
    if not (tree / ".git").exists():
        raise ScriptError(f"{tree} is no git repository: make one with patches.py edit")
    if dirty := _git(tree, "status", "--porcelain").splitlines():
        raise ScriptError(
            f"{tree} has changes without a commit ({dirty[0].strip()}): give each to the commit of its patch"
        )
    first, *commits = _git(tree, "rev-list", "--reverse", "--first-parent", "HEAD").split()
    patches = []
    parent = first
    for commit in commits:
        name, _, header = _git(tree, "log", "-1", "--format=%B", commit).partition("\n")
        if not re.fullmatch(r"\d{4}-[A-Za-z0-9._-]+\.patch", name):
            raise ScriptError(
                f"commit {commit[:10]} is called {name!r}: a patch's commit is called like 0001-name.patch"
            )
        diff = _git(
            tree, "diff", "--no-color", "--no-ext-diff", "--no-renames", "--abbrev=10", parent, commit
        )
        patch = parse_patch(name, f"{header.strip()}\n\n{diff}")
        if patch.missing_fields:
            raise ScriptError(f"the message of {name}'s commit has no {patch.missing_fields[0]}: line")
        patches.append(patch)
        parent = commit
    write_series(vendor, patches)
    return patches


def try_version(version: str, target: Path | None, vendor: Path = VENDOR) -> int:
    """Try the series on another version of upstream and print what fails; return 0 if all applies."""
    with tempfile.TemporaryDirectory(prefix="pyvelo-") as scratch:
        pin = Pin(read_pin(vendor).name, version, "")
        archive = download(pin, Path(scratch))
        pin = Pin(pin.name, version, sha256_file(archive))
        home = Path(scratch, "home")
        tree = Tree(
            publish(home / "llama.cpp", partial(unpack, archive, identity=pin.sha256)), pin.sha256, home
        )
        patches = read_series(vendor)
        failures = edit(target or Path(scratch, "tried"), tree, patches, f"upstream {pin.name} {version}")
    broken = {line.partition(":")[0] for line in failures}
    for patch in patches:
        print(f"{'FAILS' if patch.name in broken else 'ok   '} {patch.name}")
    print("".join(f"  {line}\n" for line in failures), end="")
    print(f"{len(failures)} failures; the line of vendor/upstream.txt for this version:\n{pin.requirement}")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "apply", help="patch TREE in place, or make a patched copy in the cache; prints its path"
    )
    one.add_argument("tree", nargs="?", type=Path)
    commands.add_parser("check", help="the series keeps its rules and applies to the pristine tree")
    one = commands.add_parser("edit", help="make a git repository with one commit for each patch")
    one.add_argument("tree", type=Path, metavar="DIR")
    one = commands.add_parser(
        "refresh", help="export an edited tree's commits, or try another version of upstream"
    )
    one.add_argument("tree", nargs="?", type=Path, metavar="DIR")
    one.add_argument("--to", metavar="VERSION", help="try this version; DIR keeps the tree")
    return parser


def main() -> int:
    """Run the command; output for programs goes to stdout, everything else to stderr."""
    parser = _parser()
    given = parser.parse_args()
    if given.command == "apply":
        print(apply(given.tree))
    elif given.command == "check":
        print(check())
    elif given.command == "edit":
        pin = read_pin()
        if failures := edit(
            given.tree, locate(pin), read_series(VENDOR), f"upstream {pin.name} {pin.version}"
        ):
            raise ScriptError(f"{failures[0]} does not apply")
        print(given.tree)
    elif given.to:
        return try_version(given.to, given.tree)
    elif given.tree is None:
        parser.error("refresh needs DIR, --to VERSION, or both")
    else:
        print(f"{len(refresh(given.tree))} patches written to {VENDOR / 'patches'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
