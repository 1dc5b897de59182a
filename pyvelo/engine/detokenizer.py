"""Text from tokens as they come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopFilter"]

_utf8 = codecs.getincrementaldecoder("utf-8")


class StopFilter:
    """Passes text on up to the first stop string.

    Text that may yet turn out to be the beginning of one is held back. The stop string that is complete first
    counts, the longest where several are, so that the result does not depend on how the text is cut. One that
    is complete within text that may not stop is text.
    """

    __slots__ = ("_held", "_stops", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None  # the one that was met

    def push(self, text: str, may_stop: bool = True) -> str:
        """Return the text that can be shown now; nothing more once `stop` is set."""
        if self.stop is not None:
            return ""
        n_held = len(self._held)
        text = self._held + text
        first = self._first_stop(text, n_held) if may_stop else None
        if first is not None:
            begin, self.stop = first
            self._held = ""
            return text[:begin]
        safe = len(text) - self._beginning(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str, n_before: int) -> tuple[int, str] | None:
        """Return the stop string that ends first behind `n_before` characters, after where it begins."""
        found = []
        for stop in self._stops:
            at = text.find(stop, max(0, n_before - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        return min(found)[1:] if found else None

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class Detokenizer:
    """Joins the bytes of tokens to text.

    `token_bytes` gives the bytes of a token. Bytes that are not UTF-8 become U+FFFD, exactly as
    `bytes.decode("utf-8", "replace")` of all of them together would have it.
    """

    __slots__ = ("_decode", "_stops", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decode = _utf8("replace").decode
        self._stops = StopFilter(stops) if stops else None

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return None if self._stops is None else self._stops.stop

    def push(self, token: int, may_stop: bool = True) -> str:
        """Return the text that the token completes; `may_stop`: a stop string that it completes counts."""
        text = self._decode(self._token_bytes(token))
        return self._stops.push(text, may_stop) if self._stops is not None else text

    def finish(self, may_stop: bool = True) -> str:
        """Return the rest of the text, when no more tokens will come."""
        rest = self._decode(b"", True)
        return self._stops.push(rest, may_stop) + self._stops.flush() if self._stops is not None else rest
