"""Models by name: `org/repo` or `org/repo:QUANT` becomes a file in the cache of huggingface-hub.

That library decides the cache's folder, the token and the server, by its variables HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE. Only names need it (the extra `hub`), paths do not.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyvelo._version import __version__
from pyvelo.errors import ConfigError, ModelError, one_line
from pyvelo.models.gguf_names import ModelFile, find_models, matching
from pyvelo.models.hub_download import fetch_file, read_listing, set_main
from pyvelo.models.suggestions import suggest

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

__all__ = [
    "CachedModel",
    "HubName",
    "ModelChoiceError",
    "Pulled",
    "cached_models",
    "choice_names",
    "find_cached",
    "locate",
    "parse_name",
    "pull",
    "scan_cache",
]

_HOST = r"(?:www\.)?(?:hf|huggingface)\.co/"
_NAME = re.compile(
    rf"(?!{_HOST})"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.+-][\w.+/ -]*))?",
    re.ASCII,
)
_URL = re.compile(
    rf"(?:https?://)?{_HOST}(?P<repo>[^/:?#]+/[^/:?#]+)"
    r"(?:/(?:blob|resolve)/[^/?#]+/(?P<file>[^?#]+)|/tree/[^?#]*|/)?(?P<quant>:[^?#]+)?(?:[?#].*)?"
)
_GIB = 1 << 30
ANSWER_TIMEOUT = 60.0
"""Seconds without a byte until the hub counts as unreachable."""
MOST_LISTED = 20  # models in a message


@dataclass(frozen=True)
class HubName:
    """Repository `org/repo`, and the quantization or file after the colon."""

    repo: str
    quant: str | None

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True)
class CachedModel:
    """A complete model in the cache: its repository, tag, files (the first is for the loader) and bytes.

    `file` is the first file's name in the repository; `label` is the text after the colon.
    """

    repo: str
    tag: str
    file: str
    label: str
    paths: tuple[Path, ...]
    n_bytes: int
    used: float
    """Time of the last read, in seconds since 1970."""

    @property
    def name(self) -> str:
        """Name for `LLM` and `pyvelo run`."""
        return f"{self.repo}:{self.label}"


@dataclass(frozen=True)
class Pulled:
    """Result of `pull`; `was_cached`: nothing had to be downloaded."""

    repo: str
    tag: str
    paths: tuple[Path, ...]
    n_bytes: int
    was_cached: bool


class ModelChoiceError(ModelError):
    """Error for a name that matches no model of its repository, or several; `choices` has the models."""

    def __init__(self, message: str, repo: str, choices: Sequence[ModelFile]) -> None:
        super().__init__(message)
        self.repo = repo
        self.choices = tuple(choices)


def parse_name(text: str) -> HubName | None:
    """Parse the name of a repository, or the address of its page or of a file; None if it can only be a path.

    The revision in an address is ignored: names mean the current one.
    """
    if page := _URL.fullmatch(text):
        text = page["repo"] + (f":{page['file']}" if page["file"] else page["quant"] or "")
    match = _NAME.fullmatch(text)
    if match is None or (match["quant"] is None and text.lower().endswith(".gguf")):
        return None
    return HubName(match["repo"], match["quant"])


def locate(model: str | os.PathLike[str]) -> str:
    """Return the path of a model: an existing file, or a name on the hub.

    A name is looked up in the cache first, without any network. If it is not cached, the model is downloaded,
    with a progress bar on a terminal. `org/repo` without QUANT is the only cached model of the repository, or
    the only model in it.

    Raises:
        ModelError: `model` is no file and no known name.
        ModelChoiceError: several models match the name.
    """
    path = os.fspath(model)
    if not isinstance(path, str):
        raise ConfigError(f"model={model!r} is no text and no path")
    if os.path.exists(path):
        return path
    name = parse_name(path) if isinstance(model, str) else None
    if name is None:
        raise ModelError(
            f"there is no model at {path or repr(path)}: give a GGUF file, or a name on the hub such as "
            f"org/repo:Q4_K_M (pyvelo models lists well-known ones){suggest(path)}"
        )
    if not _has_library():
        raise ModelError(
            f"there is no file {path}, and to look for it on the hub as {name.repo} takes huggingface-hub: "
            'pip install "pyvelo[hub]"'
        )
    found = find_cached(name)
    return str((found or pull(name)).paths[0])


def pull(name: HubName | str) -> Pulled:
    """Download a model into the cache unless the cache has the hub's current version.

    An interrupted download is continued. With HF_HUB_OFFLINE only the cache is used.

    Raises:
        ConfigError: the text is no name.
        ModelError: the hub or the file is not available.
        ModelChoiceError: several models match the name.
    """
    named = parse_name(name) if isinstance(name, str) else name
    if named is None:
        hint = suggest(name) if isinstance(name, str) else ""
        raise ConfigError(f"{name!r} is no name on the hub: give org/repo or org/repo:QUANT{hint}")
    if not _has_library():
        raise ModelError(f'to pull {named} takes huggingface-hub: pip install "pyvelo[hub]"')
    from huggingface_hub import constants as hub

    if hub.HF_HUB_OFFLINE:
        found = find_cached(named)
        if found is None:
            raise ModelError(f"{named} is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub")
        return Pulled(found.repo, found.tag, found.paths, found.n_bytes, True)
    with _asking(named):
        answer = _description(named.repo)
    commit, sizes = read_listing(answer, named.repo)
    return _fetch(named, _choose(named, find_models(sizes), "it has"), commit)


def cached_models(repo: str | None = None) -> list[CachedModel]:
    """Return the complete models in the cache, of one repository or of all; none without the library."""
    cache = scan_cache()
    repos = cache.repos if cache is not None else ()
    wanted = [r for r in repos if r.repo_type == "model" and repo in (None, r.repo_id)]
    models = [model for r in wanted for model in _models_of(r)]
    return sorted(models, key=lambda model: (model.repo.casefold(), model.n_bytes))


def scan_cache() -> HFCacheInfo | None:
    """Return the repositories in the cache; None without the library or the folder.

    Raises:
        ModelError: the folder cannot be read.
    """
    if not _has_library():
        return None
    from huggingface_hub import CacheNotFound, scan_cache_dir
    from huggingface_hub import constants as hub

    try:
        return scan_cache_dir(hub.HF_HUB_CACHE)
    except CacheNotFound:
        return None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there is no home folder
        reason = getattr(error, "strerror", None) or one_line(str(error))
        raise ModelError(f"cannot read the cache {hub.HF_HUB_CACHE}: {reason}") from error


# ---- choosing ----


def _choose(name: HubName, models: list[ModelFile], has: str) -> ModelFile:
    """Return the only model that matches a name."""
    found = models if name.quant is None else matching(models, name.quant)
    if len(found) == 1:
        if found[0].missing:
            raise ModelError(f"{name}: {found[0].missing} of the parts of {found[0].name} are missing")
        return found[0]
    if not models:
        raise ModelChoiceError(f"{name.repo} has no GGUF model", name.repo, ())
    listed = found or models
    labels = _labels(listed)
    told = ", ".join(f"{label} ({_size(model.n_bytes)})" for label, model in labels[:MOST_LISTED])
    if len(labels) > MOST_LISTED:
        told += f" and {len(labels) - MOST_LISTED:,} more"
    what = f"{name.quant} is none of its models" if not found else f"{len(found)} models go by that name"
    example = f"{name.repo}:{labels[0][0]}"
    raise ModelChoiceError(f"{name}: {what}; {has} {told}. Name one, as in {example}", name.repo, listed)


def _labels(models: Iterable[ModelFile]) -> list[tuple[str, ModelFile]]:
    """Return the text after the colon for each model: its tag, or its file's name if the tag is ambiguous."""
    listed = list(models)
    tags = Counter(model.tag for model in listed)
    return [(m.tag if tags[m.tag] == 1 else m.name, m) for m in listed]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.1f} GiB" if n_bytes >= _GIB // 10 else f"{n_bytes / (1 << 20):.1f} MiB"


def choice_names(models: Iterable[ModelFile]) -> list[dict[str, str | int]]:
    """Return the text after the colon, file, bytes and number of parts of each model."""
    return [
        {"name": label, "file": model.name, "bytes": model.n_bytes, "parts": len(model.files)}
        for label, model in _labels(models)
    ]


# ---- the cache ----


def find_cached(name: HubName) -> CachedModel | None:
    """Return the cached model that matches a name, None if there is none; ModelChoiceError for several."""
    models = {model.file: model for model in cached_models(name.repo)}
    files = [ModelFile(model.tag, ((file, model.n_bytes),)) for file, model in models.items()]
    if name.quant is not None:
        files = matching(files, name.quant)
    if not files:
        return None
    return models[_choose(name, files, "the cache has").name]


def _models_of(repo: CachedRepoInfo) -> Iterator[CachedModel]:
    revision = _current(repo)
    if revision is None:
        return
    root = revision.snapshot_path
    files = {file.file_path.relative_to(root).as_posix(): file for file in revision.files}
    found = find_models({name: file.size_on_disk for name, file in files.items()})
    for label, model in _labels(model for model in found if not model.missing):
        paths = tuple(root / name for name, _ in model.files)
        used = max(files[name].blob_last_accessed for name, _ in model.files)
        yield CachedModel(repo.repo_id, model.tag, model.name, label, paths, model.n_bytes, used)


def _current(repo: CachedRepoInfo) -> CachedRevisionInfo | None:
    """Return the revision that was last fetched as `main`, else the newest one."""
    return repo.refs.get("main") or max(repo.revisions, key=lambda r: r.last_modified, default=None)


# ---- the network ----


def _description(repo: str) -> object:
    """Return the JSON that the hub answers for a repository."""
    from huggingface_hub import constants as hub
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers(library_name="pyvelo", library_version=__version__)
    url = f"{hub.ENDPOINT}/api/models/{repo}"
    answer = get_session().get(url, headers=headers, params={"blobs": True}, timeout=ANSWER_TIMEOUT)
    hf_raise_for_status(answer)
    return answer.json()


def _fetch(name: HubName, model: ModelFile, commit: str) -> Pulled:
    with _asking(name):
        fetched = [fetch_file(name.repo, file, commit) for file, _ in model.files]
        set_main(name.repo, commit)
        n_bytes = sum(path.stat().st_size for path, _ in fetched)
    paths = tuple(path for path, _ in fetched)
    return Pulled(name.repo, model.tag, paths, n_bytes, not any(was_missing for _, was_missing in fetched))


@contextmanager
def _asking(name: HubName) -> Iterator[None]:
    """Convert each error of a download into a ModelError of one line."""
    from huggingface_hub import errors

    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name.repo} is open only to users who accepted its terms: do so on its page, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no file {name} and no repository {name.repo} on the hub, or it is private: "
            "see to the spelling, or set HF_TOKEN"
        ) from error
    except Exception as error:
        # the library's own, its HTTP client's, or the disk's: which classes depends on its version
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, OSError) and error.filename is not None:
            first = f"{error.filename}: {error.strerror}"
        first = re.sub(r"^\[Errno -?\d+\] ", "", first)
        is_away = re.search("Connect|Timeout|LocalEntryNotFound", type(error).__name__)
        hint = "; without a network, a path or a name of pyvelo list works" if is_away else ""
        raise ModelError(f"cannot get {name} from the hub: {first}{hint}") from error


def _has_library() -> bool:
    try:
        from huggingface_hub import constants  # noqa: F401
    except ModuleNotFoundError:
        return False
    except ValueError as error:  # it reads its variables then
        raise ModelError(f"huggingface-hub cannot be used, check HF_ENDPOINT: {error}") from error
    return True
