"""Downloads into the cache of huggingface-hub, which continue where the last one stopped.

Recent versions of the library start anew after Ctrl+C: each writes to a file of its own and removes it. Here
the part is at the path of older versions, `blobs/<etag>.incomplete`, under the library's own lock. Blobs,
snapshots and refs have the library's layout. `read_listing` and `check_etag` check every name first, because
the hub's answers become paths.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from pyvelo._version import __version__
from pyvelo.errors import ModelError, shown

__all__ = ["Listing", "check_commit", "check_etag", "fetch_file", "read_listing", "set_main"]

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LARGEST = 1 << 62  # bytes

Listing = tuple[str, dict[str, int]]
"""A commit, and the bytes of each GGUF file in it by name."""


def read_listing(answer: object, repo: str) -> Listing:
    """Read the JSON that describes a repository.

    Raises:
        ModelError: A field has the wrong type, or a file name would leave the repository's folder.
    """
    if not isinstance(answer, dict):
        raise _wrong(repo, "its description", answer, "an object")
    files = answer.get("siblings")
    if files is not None and not isinstance(files, list):
        raise _wrong(repo, "siblings", files, "a list of files")
    sizes: dict[str, int] = {}
    for file in files or ():
        if not isinstance(file, dict):
            raise _wrong(repo, "an entry of siblings", file, "an object")
        name, size = file.get("rfilename"), file.get("size")
        if not isinstance(name, str):
            raise _wrong(repo, "rfilename", name, "a file name")
        if size is not None and (type(size) is not int or not 0 <= size <= _LARGEST):
            raise _wrong(repo, f"the size of {shown(name)}", size, "a number of bytes")
        if name.lower().endswith(".gguf"):
            sizes[_checked_name(repo, name)] = size or 0
    return check_commit(repo, answer.get("sha")), sizes


def check_commit(repo: str, commit: object) -> str:
    """Return the name of a commit, or raise ModelError if it is none."""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _wrong(repo, "sha", commit, "a commit, 40 hexadecimal digits")
    return commit


def check_etag(file: str, etag: str | None) -> str:
    """Return an ETag that is a digest: the file's SHA-256, or the SHA-1 of a git blob.

    Raises:
        ModelError: It is neither, so the content could not be verified and the ETag is no safe file name.
    """
    if etag is None or not _DIGEST.fullmatch(etag):
        raise ModelError(
            f"the hub gives the ETag {shown(etag)} for {shown(file)}, which is no digest: it must be a "
            "SHA-256 or SHA-1 in hexadecimal, so that the download can be verified; check HF_ENDPOINT"
        )
    return etag


def _checked_name(repo: str, name: str) -> str:
    """Return a file name that stays below the repository's folder and has no control characters."""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or {"", ".", ".."} & set(parts):
        raise _wrong(repo, "rfilename", name, "a relative path of printable characters")
    return name


def _wrong(repo: str, what: str, value: object, expected: str) -> ModelError:
    return ModelError(
        f"the hub's answer for {repo} is not valid: {what} is {shown(value)}, not {expected}; "
        "check HF_ENDPOINT"
    )


_CHUNK = 1 << 20


def fetch_file(repo: str, file: str, commit: str) -> tuple[Path, bool]:
    """Return the path of a file of `repo` at `commit` in the cache, and whether it had to be downloaded.

    Args:
        repo: `org/name`.
        file: Name of the file in the repository, checked by `read_listing`.
        commit: The commit to take it from, checked by `read_listing`.

    Raises:
        ModelError: The hub's description is not valid, or the content differs from it.
        Exception: An error of the library.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    folder, locks = _folders(repo)
    pointer = folder / "snapshots" / commit / file
    if pointer.exists():
        return pointer, False
    headers = build_hf_headers(library_name="pyvelo", library_version=__version__)
    url = hf_hub_url(repo, file, revision=commit)
    facts = get_hf_file_metadata(url, headers=headers)
    if facts.commit_hash not in (None, commit):
        raise ModelError(f"{repo} was changed on the hub while it was downloaded: pull it once more")
    etag = check_etag(file, facts.etag)
    blob = folder / "blobs" / etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    locks.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / f"{etag}.lock"):
        if not blob.exists():
            part = Path(f"{blob}.incomplete")
            _download(url, headers, part, facts, file)
            _check(part, facts.size, etag, file)
            os.replace(part, blob)
        _point(pointer, blob)
    return pointer, True


def set_main(repo: str, commit: str) -> None:
    """Record `commit` as the last known revision of `main`."""
    ref = _folders(repo)[0] / "refs" / "main"
    if ref.exists() and ref.read_bytes() == commit.encode():
        return  # the cache may be read-only
    ref.parent.mkdir(parents=True, exist_ok=True)
    written = ref.with_name(f"main.{os.getpid()}.tmp")
    written.write_bytes(commit.encode())
    os.replace(written, ref)


def _folders(repo: str) -> tuple[Path, Path]:
    """Return the folder of a repository in the cache, and the folder of its locks."""
    from huggingface_hub import constants as hub
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repo, repo_type="model")
    return Path(hub.HF_HUB_CACHE, name), Path(hub.HF_HUB_CACHE, ".locks", name)


def _point(pointer: Path, blob: Path) -> None:
    """Link `pointer` to `blob`, or move the blob there if the file system has no links."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.unlink(missing_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        os.replace(blob, pointer)


def _download(url: str, headers: dict[str, str], part: Path, facts: Any, file: str) -> None:
    """Complete `part` by HTTP, or by Xet if the file is too large for the hub's HTTP."""
    from huggingface_hub import constants as hub
    from huggingface_hub.file_download import xet_get

    size = facts.size
    title = file.rpartition("/")[2]
    data = facts.xet_file_data
    if data is not None and size is not None and size > hub.MAX_HTTP_DOWNLOAD_SIZE:
        xet_get(
            incomplete_path=part,
            xet_file_data=data,
            headers=headers,
            expected_size=size,
            displayed_filename=title,
        )
        return
    if part.exists() and (size is None or part.stat().st_size > size):
        part.unlink()
    try:
        _go_on(url, headers, part, size, title)
    except OSError:
        if size is None or part.stat().st_size <= size:
            raise
        part.unlink()  # older versions append the whole file if the server knows no ranges
        _go_on(url, headers, part, size, title)


def _go_on(url: str, headers: dict[str, str], part: Path, size: int | None, title: str) -> None:
    from huggingface_hub.file_download import http_get

    have = part.stat().st_size if part.exists() else 0
    with part.open("ab") as target:
        http_get(url, target, resume_size=have, headers=headers, expected_size=size, displayed_filename=title)


def _check(part: Path, size: int | None, etag: str, file: str) -> None:
    """Raise ModelError unless the content has the hub's size and digest.

    A SHA-1 is a git blob's, or the content's as on some mirrors.
    """
    n_bytes = part.stat().st_size
    if len(etag) == 64:
        digests = [hashlib.sha256()]
    else:
        header = b"blob %d\0" % n_bytes
        digests = [hashlib.sha1(start, usedforsecurity=False) for start in (header, b"")]
    with part.open("rb") as source:
        while chunk := source.read(_CHUNK):
            for digest in digests:
                digest.update(chunk)
    if size not in (None, n_bytes) or etag not in [digest.hexdigest() for digest in digests]:
        part.unlink()
        raise ModelError(f"the download of {file} is damaged and was removed: pull it once more")
