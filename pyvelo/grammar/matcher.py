"""States of compiled grammars after the tokens of one output."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyvelo.errors import ComputeError, RequestError, one_line
from pyvelo.lazy import lazy_property

__all__ = ["GrammarMatcher", "LateMatcher", "LazyMatcher", "Marks", "error_of"]


class GrammarMatcher:
    """State of a compiled grammar after the tokens of one output.

    late: the deadline passed before it was compiled, so it allows no token.
    """

    late = False

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self) -> bytes | None:
        """Return the bitmask of the allowed next tokens: bit t % 8 of byte t // 8 for token t; None: all.

        Raises:
            RequestError: the grammar allows no token, or became too complex.
        """
        bits: bytes = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token: int) -> bool:
        """Append a token; return whether the output is complete, so that no token can follow.

        Raises:
            RequestError: as `mask`.
        """
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def copy(self) -> GrammarMatcher:
        """Return a copy in the same state."""
        return GrammarMatcher(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {error_of(self._matcher)}")


class LateMatcher(GrammarMatcher):
    """Matcher of a request whose deadline passed before its grammar was compiled; allows no token."""

    late = True

    def __init__(self) -> None:
        super().__init__(None)

    def mask(self) -> bytes:
        raise ComputeError("the deadline passed before the grammar was compiled")

    def copy(self) -> GrammarMatcher:
        return self


@dataclass(frozen=True)
class Marks:
    """Marks in the text of an answer: words that begin the grammar, and the borders of reasoning.

    think: begins reasoning; b"": there is none.
    ends: end it.
    """

    words: tuple[bytes, ...]
    think: bytes = b""
    ends: tuple[bytes, ...] = ()

    @lazy_property
    def longest(self) -> int:
        """Bytes of the longest mark."""
        return max(map(len, (*self.words, self.think, *self.ends)), default=0)

    def first(self, text: bytes, start: int, thinks: bool) -> tuple[int, bytes] | None:
        """Return the place of the first mark that counts from `start` on, and the mark."""
        marks = self.ends if thinks else (*self.words, *((self.think,) if self.think else ()))
        found = [(place, mark) for mark in marks if (place := text.find(mark, start)) >= 0]
        return min(found, default=None)


class LazyMatcher(GrammarMatcher):
    """Matcher that allows every token until a word has come; the grammar begins with that word.

    Args:
        matcher: of the grammar, at its beginning; None: every token is allowed to the end.
        thinks: the answer begins within reasoning.
        text_of: returns the bytes of a token, also of control tokens.
        tokens_of: returns tokens of a text.
    """

    def __init__(
        self,
        matcher: Any,
        marks: Marks,
        thinks: bool,
        text_of: Callable[[int], bytes],
        tokens_of: Callable[[bytes], list[int]],
    ) -> None:
        super().__init__(matcher)
        self._marks, self._thinks = marks, thinks
        self._text_of, self._tokens_of = text_of, tokens_of
        self._recent: list[tuple[int, bytes]] = []  # the tokens in which a mark may have begun
        self._start = 0  # byte of their text from which marks count
        self._follows = False

    def mask(self) -> bytes | None:
        """Return the mask as `GrammarMatcher.mask`; None as long as every token is allowed."""
        return super().mask() if self._follows else None

    def accept(self, token: int) -> bool:
        """Append a token; return whether the output is complete."""
        if self._follows:
            return super().accept(token)
        if self._matcher is None:
            return False
        self._recent.append((token, self._text_of(token)))
        text = b"".join(part for _, part in self._recent)
        while (found := self._marks.first(text, self._start, self._thinks)) is not None:
            place, mark = found
            if not self._thinks and mark in self._marks.words:
                return self._follow(place)
            # the end of reasoning may begin a call
            self._start = place if self._thinks else place + len(mark)
            self._thinks = not self._thinks
        self._forget(max(self._start, len(text) - self._marks.longest + 1))
        return False

    def copy(self) -> GrammarMatcher:
        """Return a copy in the same state."""
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        found = LazyMatcher(matcher, self._marks, self._thinks, self._text_of, self._tokens_of)
        found._recent, found._start, found._follows = list(self._recent), self._start, self._follows
        return found

    def _follow(self, place: int) -> bool:
        """Follow the grammar from a place in the recent text on; if it cannot follow, allow all tokens."""
        place -= self._forget(place)
        tokens = [token for token, _ in self._recent]
        if place > 0:
            tokens[:1] = self._tokens_of(self._recent[0][1][place:])
        if self._matcher.try_consume_tokens(tokens) == len(tokens) and not self._matcher.is_error():
            self._follows = True
            return bool(self._matcher.is_stopped())
        self._matcher = None
        return False

    def _forget(self, n_bytes: int) -> int:
        """Drop the first tokens that end within `n_bytes` bytes; return how many bytes they had."""
        n_tokens = dropped = 0
        for _, part in self._recent:
            if dropped + len(part) > n_bytes:
                break
            n_tokens, dropped = n_tokens + 1, dropped + len(part)
        del self._recent[:n_tokens]
        self._start = max(0, self._start - dropped)
        return dropped


def error_of(matcher: Any) -> str:
    """Return llguidance's error without its dump of the state."""
    text = str(matcher.get_error())
    if text.startswith("panic:"):
        return "it is too large: shorten it"
    if "NoExtension" in text:
        return "no token can come next"
    return one_line(re.split(r"<(?:state|non-verbose)", text)[0])
