"""States of compiled grammars after the tokens of one output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pyvelo.errors import ComputeError, one_line

__all__ = ["GrammarMatcher", "LateMatcher", "LazyMatcher", "error_of"]


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
            ComputeError: the grammar allows no token, or became too complex.
        """
        bits: bytes = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token: int) -> bool:
        """Append a token; return whether the output is complete, so that no token can follow.

        Raises:
            ComputeError: as `mask`.
        """
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def copy(self) -> GrammarMatcher:
        """Return a copy in the same state."""
        return GrammarMatcher(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ComputeError(f"the grammar cannot be followed: {error_of(self._matcher)}")


class LateMatcher(GrammarMatcher):
    """Matcher of a request whose deadline passed before its grammar was compiled; allows no token."""

    late = True

    def __init__(self) -> None:
        super().__init__(None)

    def mask(self) -> bytes:
        raise ComputeError("the deadline passed before the grammar was compiled")

    def copy(self) -> GrammarMatcher:
        return self


class LazyMatcher(GrammarMatcher):
    """Matcher that allows every token until a word has come; the grammar begins with that word.

    Args:
        matcher: of the grammar, at its beginning; None: every token is allowed to the end.
        words: the output follows the grammar from the first of them on.
        text_of: returns the bytes of a token, also of control tokens.
        tokens_of: returns tokens of a text.
    """

    def __init__(
        self,
        matcher: Any,
        words: Sequence[bytes],
        text_of: Callable[[int], bytes],
        tokens_of: Callable[[bytes], list[int]],
    ) -> None:
        super().__init__(matcher)
        self._words = words
        self._text_of, self._tokens_of = text_of, tokens_of
        self._recent: list[tuple[int, bytes]] = []  # the tokens in which a word may have begun
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
        places = [place for word in self._words if (place := text.find(word)) >= 0]
        if places:
            return self._start(min(places))
        self._forget(len(text) - max(map(len, self._words)) + 1)
        return False

    def copy(self) -> GrammarMatcher:
        """Return a copy in the same state."""
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        found = LazyMatcher(matcher, self._words, self._text_of, self._tokens_of)
        found._recent, found._follows = list(self._recent), self._follows
        return found

    def _start(self, place: int) -> bool:
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
        dropped = 0
        while self._recent and dropped + len(self._recent[0][1]) <= n_bytes:
            dropped += len(self._recent.pop(0)[1])
        return dropped


def error_of(matcher: Any) -> str:
    """Return llguidance's error without its dump of the state."""
    text = str(matcher.get_error())
    if text.startswith("panic:"):
        return "it is too large: shorten it"
    if "NoExtension" in text:
        return "no token can come next"
    return one_line(re.split(r"<(?:state|non-verbose)", text)[0])
