"""scripts/build/release_links.py makes README fit for a package index."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts._common import ROOT, ScriptError
from scripts.build.release_links import absolute

REPOSITORY = "https://example.org/owner/name"


def test_every_link_of_readme_leads_into_the_repository(tmp_path: Path) -> None:
    """In a copy of all that README links to."""
    for name in ("README.md", "pyproject.toml", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "examples", "LICENSES"):
        shutil.copytree(ROOT / name, tmp_path / name)
    script = ROOT / "scripts/build/release_links.py"
    command = [sys.executable, str(script), REPOSITORY + "/", "v1.2", "--root", str(tmp_path)]
    subprocess.run(command, check=True)
    before = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    after = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text(encoding="utf-8"))
    assert len(before) == len(after) > 20
    for old, new in zip(before, after, strict=True):
        if old.startswith(("http", "#")):
            assert new == old
        else:
            assert re.fullmatch(rf"{REPOSITORY}/(blob|raw|tree)/v1\.2/{re.escape(old)}", new)
    assert f"![A chat with the demo model in a terminal]({REPOSITORY}/raw/v1.2/docs/chat.svg)" in (
        tmp_path / "README.md"
    ).read_text(encoding="utf-8")
    pyproject = (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.urls]\nSource = "{REPOSITORY}/tree/v1.2"\n' in pyproject
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    assert again.returncode == 1
    assert "[project.urls]" in again.stderr


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"docs/NOWHERE\.md"):
        absolute("See [this](docs/NOWHERE.md#part).", tmp_path, REPOSITORY, "v1")


@pytest.mark.parametrize("arguments", [("example.org/a", "v1"), (REPOSITORY, "v1)")])
def test_no_address_and_no_tag(tmp_path: Path, arguments: tuple[str, str]) -> None:
    script = ROOT / "scripts/build/release_links.py"
    command = [sys.executable, str(script), *arguments, "--root", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "https://" in done.stderr
