"""Make README's links absolute and add the project's addresses to pyproject.toml, before a release is built.

    python scripts/build/release_links.py https://github.com/OWNER/NAME v0.1.0

A package index shows README without the repository's other files, so that relative links lead nowhere there.
The command changes the files of the checkout: run it on a copy that is thrown away.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
ABSOLUTE = re.compile(r"[a-z]+:|#")
TABLE = "[project.optional-dependencies]\n"
"""Part of pyproject.toml before which the addresses are inserted."""


def absolute(text: str, root: Path, repository: str, revision: str) -> str:
    """Return Markdown whose relative links lead into the repository at a revision.

    Raises:
        ScriptError: a link names a file that root does not have.
    """

    def replaced(link: re.Match[str]) -> str:
        target = link["target"]
        if ABSOLUTE.match(target):
            return link[0]
        file = target.partition("#")[0]
        if not (root / file).exists():
            raise ScriptError(f"README.md links to {file}, which does not exist")
        kind = "raw" if link["picture"] else "tree" if (root / file).is_dir() else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{kind}/{revision}/{target})"

    return LINK.sub(replaced, text)


def with_addresses(pyproject: str, repository: str, revision: str) -> str:
    """Return pyproject.toml with [project.urls].

    Raises:
        ScriptError: it has them already, or lacks the table that follows.
    """
    if "[project.urls]" in pyproject or pyproject.count(TABLE) != 1:
        raise ScriptError(f"pyproject.toml must have one {TABLE.strip()} and no [project.urls]")
    urls = {
        "Source": f"{repository}/tree/{revision}",
        "Documentation": f"{repository}/tree/{revision}/docs",
        "Changelog": f"{repository}/blob/{revision}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    return pyproject.replace(TABLE, f"[project.urls]\n{lines}\n{TABLE}")


def main() -> int:
    """Change README.md and pyproject.toml in place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", help="its address, as https://github.com/OWNER/NAME")
    parser.add_argument("revision", help="the tag of the release")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the checkout; default: this one")
    given = parser.parse_args()
    repository = given.repository.rstrip("/")
    if not re.fullmatch(r"https://[^\s()\"]+", repository) or not re.fullmatch(r"[\w./+-]+", given.revision):
        raise ScriptError("give an address that begins with https:// and the name of a tag")
    readme, pyproject = given.root / "README.md", given.root / "pyproject.toml"
    new_readme = absolute(readme.read_text(encoding="utf-8"), given.root, repository, given.revision)
    new_pyproject = with_addresses(pyproject.read_text(encoding="utf-8"), repository, given.revision)
    readme.write_text(new_readme, encoding="utf-8")
    pyproject.write_text(new_pyproject, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
