"""Removal of a model from the cache of huggingface-hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyvelo.errors import ConfigError, ModelError, shown
from pyvelo.models.hub import cached_models, find_cached, parse_name, scan_cache

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, DeleteCacheStrategy

__all__ = ["Removal", "plan_removal", "remove"]


@dataclass(frozen=True)
class Removal:
    """Files of one model in the cache, in all its versions there, to remove.

    links: the files in the folders of the versions.
    blobs: their contents in the cache, unless another file has the same.
    n_bytes: bytes on the disk that become free.
    whole: removal of the repository, if nothing else of it is left; else None.
    """

    name: str
    repo: str
    links: tuple[Path, ...]
    blobs: tuple[Path, ...]
    n_bytes: int
    whole: DeleteCacheStrategy | None


def plan_removal(text: str) -> Removal:
    """Return what to remove for a name such as `org/repo:QUANT`; nothing is removed yet.

    Raises:
        ConfigError: the text is no name.
        ModelError: the cache has no such model.
        ModelChoiceError: several models match the name.
    """
    named = parse_name(text)
    if named is None:
        raise ConfigError(
            f"{shown(text)} is no name on the hub: give org/repo or org/repo:QUANT, as pyvelo list shows it"
        )
    model, cache = find_cached(named), scan_cache()
    if model is None or cache is None:
        there = ", ".join(each.name for each in cached_models()) or "nothing"
        raise ModelError(f"{named} is not in the cache, which has {there}")
    repo = next(each for each in cache.repos if (each.repo_type, each.repo_id) == ("model", model.repo))
    files = list(_files(repo))
    root = model.paths[0].parents[model.file.count("/")]
    names = {path.relative_to(root).as_posix() for path in model.paths}
    gone = [file for name, file in files if name in names]
    others = {file.blob_path for name, file in files if name not in names}
    home = repo.repo_path.resolve()  # a link may lead to a file outside, which is not the cache's to remove
    contents = {path: path.resolve() for path in {file.blob_path for file in gone} - others}
    blobs = [path for path in contents if (path.parent.resolve() / path.name).is_relative_to(home)]
    freed = [path for path in blobs if contents[path].is_relative_to(home) and path.exists()]
    versions = [version.commit_hash for version in repo.revisions] if len(gone) == len(files) else []
    return Removal(
        name=model.name,
        repo=model.repo,
        links=tuple(file.file_path for file in gone),
        blobs=tuple(blobs),
        n_bytes=sum(path.stat().st_size for path in freed),
        whole=cache.delete_revisions(*versions) if versions else None,
    )


def remove(removal: Removal) -> None:
    """Remove the files; raise ModelError if the system refuses. What is gone already is no error."""
    try:
        if removal.whole is not None:
            removal.whole.execute()
            return
        for path in (*removal.links, *removal.blobs):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{removal.name} cannot be removed: {error.filename}: {error.strerror}") from error


def _files(repo: CachedRepoInfo) -> Iterator[tuple[str, CachedFileInfo]]:
    """Yield the name in the repository and the file, of each version."""
    for revision in repo.revisions:
        for file in revision.files:
            yield file.file_path.relative_to(revision.snapshot_path).as_posix(), file
