"""Checks of what a hub answers, made before any of it names a file or is shown.

A server behind HF_ENDPOINT is not trusted: its JSON may have any types, and the names, commits and ETags that
it gives would become paths below the cache.
"""

from __future__ import annotations

import re

from pyvelo.errors import ModelError, shown

__all__ = ["Listing", "check_commit", "check_etag", "read_listing"]

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
