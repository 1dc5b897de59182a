"""Values that a sequence alone stores in each group of layers, and the answers that the toy model draws.

The value that a token stores is a digest of the values that its window allows in each group, of the salt of
its sequence and of the token. So it depends on all tokens before it, directly or through other values.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from pyvelo.engine.request import Request
from pyvelo.kv.prefix import Window

N_VOCAB = 16
END = 0


def digest(value: int, before: int) -> int:
    """Return a digest of both, of 32 bits."""
    return zlib.crc32(value.to_bytes(8, "little"), before)


class Attention:
    """Values of a sequence in each group, from a position on, and what its queries make of them."""

    def __init__(self, windows: Sequence[Window], salt: str) -> None:
        self.windows = windows
        self.start = zlib.crc32(salt.encode())  # what a sequence attends to before its first token
        self.begins = [0] * len(windows)  # position of the first value of each group
        self.values = [array("q") for _ in windows]

    def attend(self, position: int, end: int) -> int:
        """Return a digest of the values before `end` that a query at `position` may read."""
        found = self.start
        for window, begin, values in zip(self.windows, self.begins, self.values, strict=True):
            found = zlib.crc32(values[window.first_token(position) - begin : end - begin].tobytes(), found)
        return found

    def add(self, position: int, token: int) -> int:
        """Store the values of the next token; return the logits behind it."""
        before = self.attend(position, position)
        for group, values in enumerate(self.values):
            values.append(digest((token * len(self.values) + group) % (1 << 64), before))
        return self.attend(position, position + 1)


class Values(Attention):
    """The same of a sequence alone, which grows, and the logits before its first token and behind each."""

    def __init__(self, windows: Sequence[Window], salt: str, tokens: Sequence[int] = ()) -> None:
        super().__init__(windows, salt)
        self.logits = [self.start]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.logits.append(self.add(len(self.logits) - 1, token))


class Expected:
    """The values of requests, each token computed once."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows
        self._known: dict[int, tuple[Sequence[int], Values]] = {}  # by the id of the tokens

    def values(self, request: Request) -> Values:
        tokens = request.tokens
        if id(tokens) not in self._known:
            self._known[id(tokens)] = tokens, Values(self._windows, salt_of(request))
        _, values = self._known[id(tokens)]
        values.extend(tokens[len(values.logits) - 1 :])
        return values


def salt_of(request: Request) -> str:
    return request.hashes.extra.decode()


def next_token(logits: int, seed: int, number: int, allowed: Sequence[int]) -> int:
    """Return the token that a sampler with this seed draws as its `number`-th."""
    return allowed[digest(seed * 1000 + number, logits) % len(allowed)]


def logprob(logits: int, token: int) -> float:
    return -(digest(token, logits) % 997) / 100


def allowed_tokens(matcher: int | None, number: int) -> list[int]:
    """Return the tokens that a matcher allows as the `number`-th of an answer; None: it is free."""
    if matcher is None:
        return list(range(N_VOCAB))
    return [token for token in range(1, N_VOCAB) if digest(token, matcher + number) % 3] or [1]


def ends(request: Request, token: int) -> bool:
    """Return whether the token would end the answer."""
    return token in request.stop_ids or (token == END and not request.params.ignore_eos)
