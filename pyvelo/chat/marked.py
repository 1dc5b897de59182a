"""Strings that record which of their characters came from a user.

A chat template writes control tokens around the text of users. Users must not be able to write them too. So
every character has a mark, which survives the string methods of templates: slices, strip, replace, join. If
a method does not tell where each character went, the whole result counts as the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

__all__ = ["Marked", "is_marked", "mask_of", "merge", "ours", "theirs"]

OURS, THEIRS = b"\0", b"\1"


class Marked(str):
    """Text with a mask of one byte for each character: 1 for a user's, 0 for the template's."""

    __slots__ = ("mask",)
    mask: bytes

    def __new__(cls, text: str, mask: bytes) -> Marked:
        self = super().__new__(cls, text)
        self.mask = mask
        return self

    def __str__(self) -> str:
        return self  # str() must not take the marks off

    def __getitem__(self, key: Any) -> Marked:
        text = str.__getitem__(self, key)
        return Marked(text, self.mask[key] if isinstance(key, slice) else bytes((self.mask[key],)))

    def __iter__(self) -> Iterator[str]:
        pairs = zip(str.__iter__(self), self.mask, strict=True)
        return (Marked(char, THEIRS if mark else OURS) for char, mark in pairs)

    # ---- joining ----

    def __add__(self, other: str) -> Marked:
        return merge((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Marked:
        return merge((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Marked:
        return Marked(str.__mul__(self, count), self.mask * count)

    __rmul__ = __mul__

    def join(self, items: Iterable[str]) -> Marked:
        parts: list[str] = []
        for item in items:
            parts += (self, item) if parts else (item,)
        return merge(parts)

    # ---- cutting ----

    def lstrip(self, chars: str | None = None) -> Marked:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> Marked:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> Marked:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Marked:
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> Marked:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = str.split(self, sep, maxsplit)
        return self._split_at_spaces(pieces) if sep is None else self.consecutive(pieces, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = str.rsplit(self, sep, maxsplit)
        return self._alike(pieces) if sep is None else self.consecutive(pieces, len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self.consecutive(str.splitlines(self, True), 0)
        shown = str.splitlines(self, keepends)
        return [line[: len(text)] for line, text in zip(lines, shown, strict=True)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        first, middle, last = self.consecutive(str.partition(self, sep), 0)
        return first, middle, last

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        first, middle, last = self.consecutive(str.rpartition(self, sep), 0)
        return first, middle, last

    def consecutive(self, pieces: Sequence[str], gap: int) -> list[str]:
        """Return pieces with their marks; in this text they follow each other, `gap` characters apart."""
        at = 0
        found: list[str] = []
        for piece in pieces:
            found.append(self[at : at + len(piece)])
            at += len(piece) + gap
        return found

    def _split_at_spaces(self, pieces: Sequence[str]) -> list[str]:
        at = 0
        found: list[str] = []
        for piece in pieces:
            while str.__getitem__(self, at).isspace():
                at += 1
            found.append(self[at : at + len(piece)])
            at += len(piece)
        return found

    # ---- changing ----

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Marked:
        if old:
            return ours(new).join(self.split(old, count))
        return self.like(str.replace(self, old, new, count), new)

    def upper(self) -> Marked:
        return self.like(str.upper(self))

    def lower(self) -> Marked:
        return self.like(str.lower(self))

    def title(self) -> Marked:
        return self.like(str.title(self))

    def capitalize(self) -> Marked:
        return self.like(str.capitalize(self))

    def swapcase(self) -> Marked:
        return self.like(str.swapcase(self))

    def center(self, width: SupportsIndex, fillchar: str = " ") -> Marked:
        return self._padded(str.center(self, width, fillchar), fillchar, str.center)

    def ljust(self, width: SupportsIndex, fillchar: str = " ") -> Marked:
        return self._padded(str.ljust(self, width, fillchar), fillchar, str.ljust)

    def rjust(self, width: SupportsIndex, fillchar: str = " ") -> Marked:
        return self._padded(str.rjust(self, width, fillchar), fillchar, str.rjust)

    def zfill(self, width: SupportsIndex) -> Marked:
        return self.whole(str.zfill(self, width))

    def expandtabs(self, tabsize: SupportsIndex = 8) -> Marked:
        return self.whole(str.expandtabs(self, tabsize))

    def _padded(self, text: str, fill: str, pad: Callable[[str, int, str], str]) -> Marked:
        """Return self between fill characters as `text`; `pad` shows how many of them are on the left."""
        ruler = pad("\1" * len(self), len(text), "\0")
        left = max(0, ruler.find("\1")) if self else 0
        padding = (THEIRS if is_marked(fill) else OURS) * (len(text) - len(self))
        return Marked(text, padding[:left] + self.mask + padding[left:])

    def like(self, text: str, *others: str) -> Marked:
        """Return `text` with the marks of self if it is as long, else with one mark for all of it."""
        if len(text) == len(self):
            return Marked(text, self.mask)
        return self.whole(text, *others)

    def whole(self, text: str, *others: str) -> Marked:
        mark = THEIRS if any(map(is_marked, (self, *others))) else OURS
        return Marked(text, mark * len(text))

    def _alike(self, pieces: Sequence[str]) -> list[str]:
        return [self.whole(piece) for piece in pieces]


def mask_of(text: str) -> bytes:
    """Return the marks of a string; a plain string is the template's."""
    return text.mask if isinstance(text, Marked) else bytes(len(text))


def is_marked(text: str) -> bool:
    """Return whether a user wrote a character of the text."""
    return isinstance(text, Marked) and 1 in text.mask


def theirs(text: str) -> Marked:
    """Return a string with every character marked as a user's."""
    return Marked(text, THEIRS * len(text))


def ours(text: str) -> Marked:
    """Return a plain string as the template's; a marked string is returned as it is."""
    return text if isinstance(text, Marked) else Marked(text, bytes(len(text)))


def merge(parts: Iterable[str]) -> Marked:
    """Return the concatenation of strings; TypeError if a part is no string."""
    listed = list(parts)
    return Marked("".join(listed), b"".join(map(mask_of, listed)))
