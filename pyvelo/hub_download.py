"""A download into the cache of huggingface-hub that goes on where the last one stopped.

Recent versions of the library start anew after Ctrl+C: each writes to a file of its own and removes it. Here
the part lies where older versions kept it, `blobs/<etag>.incomplete`, under the library's own lock; what is
whole becomes the blob, which the library then finds in its place.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from pyvelo import __version__
from pyvelo.errors import ModelError

__all__ = ["fill_blob"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


def fill_blob(repo: str, file: str, commit: str | None) -> None:
    """Brings the content of a file of `repo` at `commit` into the cache, where it is not there.

    Files beyond the size that the hub serves over plain HTTP are left to the library's own way. Raises
    ModelError for content that is not what the hub says of it, and what the library raises.
    """
    from huggingface_hub import constants as hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    headers = build_hf_headers(library_name="pyvelo", library_version=__version__)
    url = hf_hub_url(repo, file, revision=commit)
    facts = get_hf_file_metadata(url, headers=headers)
    if (
        facts.etag is None
        or facts.size is None
        or facts.size > getattr(hub, "MAX_HTTP_DOWNLOAD_SIZE", facts.size)
    ):
        return
    folder = repo_folder_name(repo_id=repo, repo_type="model")
    blob = Path(hub.HF_HUB_CACHE, folder, "blobs", facts.etag)
    lock = Path(hub.HF_HUB_CACHE, ".locks", folder, f"{facts.etag}.lock")
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        part = Path(f"{blob}.incomplete")
        _download(url, headers, part, facts.size, file)
        _check(part, facts.size, facts.etag, file)
        os.replace(part, blob)


def _download(url: str, headers: dict[str, str], part: Path, size: int, file: str) -> None:
    if part.exists() and part.stat().st_size > size:
        part.unlink()
    try:
        _go_on(url, headers, part, size, file)
    except OSError:
        if part.stat().st_size <= size:
            raise
        part.unlink()  # older versions append all of it where a server knows no ranges
        _go_on(url, headers, part, size, file)


def _go_on(url: str, headers: dict[str, str], part: Path, size: int, file: str) -> None:
    from huggingface_hub.file_download import http_get

    have = part.stat().st_size if part.exists() else 0
    with part.open("ab") as target:
        http_get(
            url,
            target,
            resume_size=have,
            headers=headers,
            expected_size=size,
            displayed_filename=file.rpartition("/")[2],
        )


def _check(part: Path, size: int, etag: str, file: str) -> None:
    """Large files go by their SHA-256; of small ones only the size is known."""
    wrong = part.stat().st_size != size
    if not wrong and _SHA256.fullmatch(etag):
        digest = hashlib.sha256()
        with part.open("rb") as source:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
        wrong = digest.hexdigest() != etag
    if wrong:
        part.unlink()
        raise ModelError(f"{file} came damaged, and what came of it was removed: pull it once more")
