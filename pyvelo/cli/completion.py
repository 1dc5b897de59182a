"""Words that a shell offers for the values of arguments and options. Errors offer none.

Every command imports this module, but only a shell's request needs what the functions import.
"""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from pyvelo.errors import VeloError

__all__ = [
    "block_sizes",
    "cached_names",
    "chats",
    "kv_types",
    "model_names",
    "models_and_rows",
    "one_of",
    "poolings",
    "precisions",
    "quantizations",
    "whole_words",
]

SPLITS = {":", "="}
"""Characters at which bash splits a word in two, with a word of their own between them."""


def one_of(find: Callable[[], Iterable[object]]) -> Callable[[str], list[str]]:
    """Return a function that offers the values that begin with a text; `find` imports and returns them."""

    def offer(incomplete: str) -> list[str]:
        try:
            return [str(value) for value in find() if str(value).startswith(incomplete)]
        except (ImportError, VeloError, OSError):
            return []

    return offer


def _cached_names() -> Iterable[object]:
    from pyvelo.models.hub import cached_models

    return [model.name for model in cached_models()]


def _chats() -> Iterable[object]:
    from pyvelo.cli.chat_session import session_names

    return session_names()


def _quantizations() -> Iterable[object]:
    from pyvelo.models.families import QUANTIZATIONS

    return QUANTIZATIONS


cached_names = one_of(_cached_names)
chats = one_of(_chats)
quantizations = one_of(_quantizations)
"""Names of the models in the cache, names of kept chats, and quantizations that begin with a text."""


def model_names(incomplete: str) -> list[str]:
    """Return GGUF files, folders and the names of cached models that begin with a text."""
    found = glob.glob(f"{glob.escape(incomplete)}*")
    files = [path for path in found if path.lower().endswith(".gguf")]
    folders = [path + os.sep for path in found if os.path.isdir(path)]
    return [*sorted(files), *sorted(folders), *cached_names(incomplete)]


def models_and_rows(incomplete: str) -> list[str]:
    """Return what `model_names` returns, and files of rows that begin with a text."""
    files = glob.glob(f"{glob.escape(incomplete)}*.jsonl")
    return [*sorted(files), *model_names(incomplete)]


def block_sizes() -> Iterable[object]:
    """Return the sizes of blocks in tokens."""
    from pyvelo.kv.geometry import BLOCK_SIZES

    return BLOCK_SIZES


def precisions() -> Iterable[object]:
    """Return the precisions of attention."""
    from pyvelo.config import PRECISIONS

    return PRECISIONS


def poolings() -> Iterable[object]:
    """Return the poolings of vectors."""
    from pyvelo.outputs import Pooling

    return get_args(Pooling)


def kv_types(incomplete: str) -> list[str]:
    """Return types of K and V that begin with a text, or continue it after its comma."""
    from pyvelo.kv.types import KV_TYPES

    before, comma, begun = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in KV_TYPES if name.startswith(begun)]


@contextlib.contextmanager
def whole_words() -> Iterator[None]:
    """While bash asks for words: join what it has split, and offer what follows the last colon."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    at = os.environ.get("COMP_CWORD", "")
    if os.environ.get("_PYVELO_COMPLETE") != "complete_bash" or not at.isdigit() or len(words) <= int(at):
        yield
        return
    before, word = _joined(words[: int(at) + 1])
    os.environ.update(COMP_WORDS="\n".join([*before, word]), COMP_CWORD=str(len(before)))
    value = word.partition("=")[2] if word.startswith("--") else word
    known = value[: value.rfind(":") + 1] if words[int(at)] != word else ""
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            yield
    finally:  # the request ends with an exit
        lines = offered.getvalue().split("\n")
        print("\n".join(line.removeprefix(known) for line in lines), end="")


def _joined(words: list[str]) -> tuple[list[str], str]:
    """Return the words before the current one, which is the last, and that one."""
    found = words[:1]
    for last, word in itertools.pairwise(words):
        if word and (word in SPLITS or last in SPLITS):
            found[-1] += word
        else:
            found.append(word)
    return found[:-1], found[-1]
