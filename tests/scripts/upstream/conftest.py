"""A small upstream: a source distribution and a patch series in the shape of the real ones; no network."""

from __future__ import annotations

import difflib
import io
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts._common import ROOT
from scripts.upstream._pin import Pin, sha256_file
from tests import forks

TOP = "llama_cpp_small-1.0"
HEADER = "Reason: a test needs it.\nTouches: a line.\nDrop-When: never.\n"

LLAMA = "".join(f"int line_{number};\n" for number in range(40))
TREE = {
    "CMakeLists.txt": "project(llama.cpp)\n",
    "LICENSE": "MIT\n",
    "ggml/CMakeLists.txt": "project(ggml)\n",
    "src/llama.cpp": LLAMA,
    "src/other.cpp": "int other;\n",
    "run.sh": "#!/bin/sh\n",
}

# An in-tree build backend without requirements, so that pip reads the metadata offline.
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BACKEND = """
import pathlib
METADATA = "Metadata-Version: 2.1\\nName: llama-cpp-small\\nVersion: 1.0\\n"
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "llama_cpp_small-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    return info.name
def get_requires_for_build_wheel(config_settings=None):
    return []
def build_wheel(*args, **kwargs):
    raise SystemExit("nobody asked for a build")
"""


def write_sdist(path: Path, members: dict[str, str], extra: list[tarfile.TarInfo] | None = None) -> Path:
    """A .tar.gz with `members` by their full names, and with ready-made entries that have no content."""
    with tarfile.open(path, "w:gz") as stream:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            info.mode = 0o755 if name.endswith(".sh") else 0o644
            stream.addfile(info, io.BytesIO(text.encode()))
        for info in extra or []:
            stream.addfile(info)
    return path


def sdist_members() -> dict[str, str]:
    """Return the files of a good distribution: the tree, a submodule's stray .git, and unneeded files."""
    members = {f"{TOP}/vendor/llama.cpp/{name}": text for name, text in TREE.items()}
    members |= {
        f"{TOP}/vendor/llama.cpp/.git": "gitdir: ../../.git/modules/vendor/llama.cpp\n",
        f"{TOP}/pyproject.toml": PYPROJECT,
        f"{TOP}/backend.py": BACKEND,
        f"{TOP}/PKG-INFO": "Metadata-Version: 2.1\nName: llama-cpp-small\nVersion: 1.0\n",
        f"{TOP}/vendor/unrelated/file": "no\n",
    }
    return members


def write_tree(path: Path) -> Path:
    """The same llama.cpp as a folder."""
    for name, text in TREE.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def make_patch(file: str, before: str, after: str, header: str = HEADER) -> str:
    """A patch file that turns `before` into `after`."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{file}", f"b/{file}"
    )
    return f"{header}\ndiff --git a/{file} b/{file}\n{''.join(lines)}"


@dataclass(frozen=True)
class Repository:
    """A checkout of ours in small: scripts/ and vendor/, and the source distribution that vendor/ pins."""

    root: Path
    archive: Path
    pin: Pin

    @property
    def vendor(self) -> Path:
        """The folder with upstream.txt, series and patches/."""
        return self.root / "vendor"

    def set_series(self, **patches: str) -> None:
        """Writes the series anew; the n-th keyword names the patch 000n-keyword.patch."""
        shutil.rmtree(self.vendor / "patches", ignore_errors=True)
        (self.vendor / "patches").mkdir()
        names = []
        for number, (name, text) in enumerate(patches.items(), start=1):
            names.append(f"{number:04}-{name}.patch")
            (self.vendor / "patches" / names[-1]).write_text(text)
        (self.vendor / "series").write_text("".join(f"{name}\n" for name in names))

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the copy of a script with the environment of the test."""
        return forks.run([forks.PYTHON, str(self.root / "scripts" / script), *arguments], text=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A small repository with two patches; its cache is empty, and PYVELO_UPSTREAM is not set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYVELO_UPSTREAM", raising=False)
    monkeypatch.delenv("PYTHONPATH")  # has the real scripts
    root = tmp_path / "repository"
    shutil.copytree(ROOT / "scripts/upstream", root / "scripts/upstream")
    shutil.copy(ROOT / "scripts/_common.py", root / "scripts")
    archive = write_sdist(tmp_path / f"{TOP}.tar.gz", sdist_members())
    pin = Pin("llama-cpp-small", "1.0", sha256_file(archive))
    (root / "vendor").mkdir()
    (root / "vendor" / "upstream.txt").write_text(f"# a comment\n{pin.requirement}\n")
    made = Repository(root, archive, pin)
    made.set_series(
        first=make_patch("src/llama.cpp", LLAMA, LLAMA.replace("line_10;", "line_10; int hook;")),
        second=make_patch("src/other.cpp", TREE["src/other.cpp"], "int other;\nint hook;\n"),
    )
    return made
