"""A recorded run: who held which block when, as lines of JSON, so that every block map can be rebuilt.

The first line is the header. Every other line is a moment between two steps, and says what has changed since
the line before: blocks that owners gained or lost, tokens that they store, what is in host memory, which
blocks became a hit for others or ceased to be one, and what happened to requests. The text itself is not
recorded, only which beginnings were alike.

An owner is a request, by its number in the order of arrival; below 0 it is a block table that no request
holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import IO, Any, NamedTuple

from pyvelo.errors import TraceError

__all__ = [
    "Arrived",
    "Evicted",
    "Finished",
    "Preempted",
    "Started",
    "TableDelta",
    "Trace",
    "TraceEvent",
    "TraceHeader",
    "TraceStep",
    "TraceWriter",
    "read_trace",
]

VERSION = 1


@dataclass(frozen=True)
class TraceHeader:
    """The pool that was recorded: blocks, tokens in a block, bytes of a block, the longest sequence in
    tokens, and blocks of host memory."""

    n_blocks: int
    block_size: int
    block_bytes: int
    n_ctx: int
    n_swap_blocks: int


class Arrived(NamedTuple):
    """A request with `n_prompt` tokens that may generate `max_new`. The first `n_shared` tokens, in whole
    blocks, are those of the request `like` (0: no other began alike)."""

    owner: int
    n_prompt: int
    max_new: int
    like: int
    n_shared: int


class Started(NamedTuple):
    """It runs; of its tokens `n_cached` were there."""

    owner: int
    n_cached: int


class Preempted(NamedTuple):
    """A request lost its blocks and waits again; `swapped`: they were swapped out to host memory."""

    owner: int
    swapped: bool


class Finished(NamedTuple):
    """It has ended, after so many tokens of its own."""

    owner: int
    n_generated: int
    reason: str


class Evicted(NamedTuple):
    """A block that was a hit was taken for other tokens."""

    block: int


TraceEvent = Arrived | Started | Preempted | Finished | Evicted


class TableDelta(NamedTuple):
    """The owner keeps its first `n_kept` blocks, then has `blocks`; they store `n_tokens` tokens."""

    owner: int
    n_kept: int
    blocks: tuple[int, ...]
    n_tokens: int


@dataclass(frozen=True)
class TraceStep:
    """What changed up to `time`, in seconds since the recording began; `line` is its line in the file."""

    line: int
    time: float
    tables: tuple[TableDelta, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()  # owner, tokens that it stores now, in the same blocks
    freed: tuple[int, ...] = ()  # owners without blocks
    swapped: tuple[tuple[int, tuple[int, ...]], ...] = ()  # owner, blocks of host memory; none: back
    published: tuple[int, ...] = ()  # blocks that are a hit now
    unpublished: tuple[int, ...] = ()
    events: tuple[TraceEvent, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A recorded run; the steps are in the order of time."""

    path: str
    header: TraceHeader
    steps: tuple[TraceStep, ...]


# the name of each event in the file, and the types of its fields
_EVENTS: dict[str, tuple[type[TraceEvent], list[type]]] = {
    "arrive": (Arrived, [int] * 5),
    "start": (Started, [int, int]),
    "preempt": (Preempted, [int, bool]),
    "finish": (Finished, [int, int, str]),
    "evict": (Evicted, [int]),
}
_NAMES = {kind: name for name, (kind, _) in _EVENTS.items()}


# ---- writing ----


class TraceWriter:
    """Writes a trace: is told the whole picture, and writes down what changed. OSError where it cannot."""

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader) -> None:
        self._tables: dict[int, tuple[list[int], int]] = {}
        self._swapped: dict[int, list[int]] = {}
        self._published: set[int] = set()
        # an int would be a descriptor, which belongs to the caller or to the engine
        self._file: IO[str] = open(os.fspath(path), "w", encoding="utf-8")  # noqa: SIM115
        self._put({"pyvelo_trace": VERSION, **asdict(header)})

    def write(
        self,
        time: float,
        tables: Mapping[int, tuple[list[int], int]],
        swapped: Mapping[int, list[int]],
        published: Mapping[int, bool],
        events: Iterable[TraceEvent] = (),
    ) -> None:
        """Writes a line, unless nothing has changed.

        `tables` has the blocks and the stored tokens of every owner, `swapped` the blocks in host memory of
        those that have some; `published` says of blocks whose case may have changed whether they are a hit.
        """
        line: dict[str, Any] = {"t": round(time, 6)}
        grown, tokens = self._compare(tables)
        host = [
            [owner, list(blocks)] for owner, blocks in swapped.items() if self._swapped.get(owner) != blocks
        ]
        changed = {block: hit for block, hit in published.items() if hit != (block in self._published)}
        parts = {
            "b": grown,
            "n": tokens,
            "f": [owner for owner in self._tables if owner not in tables],
            "s": host + [[owner, []] for owner in self._swapped if owner not in swapped],
            "p": [block for block, hit in changed.items() if hit],
            "u": [block for block, hit in changed.items() if not hit],
            "e": [[_NAMES[type(event)], *event] for event in events],
        }
        line.update((key, part) for key, part in parts.items() if part)
        if len(line) > 1:
            self._put(line)
        for owner in parts["f"]:
            del self._tables[owner]
        self._swapped = {owner: list(blocks) for owner, blocks in swapped.items()}
        self._published.difference_update(parts["u"])
        self._published.update(parts["p"])

    def close(self) -> None:
        """Writes out what is left; may be called twice."""
        self._file.close()

    def _compare(self, tables: Mapping[int, tuple[list[int], int]]) -> tuple[list[Any], list[Any]]:
        """Owners whose blocks changed, and those that only store more in them."""
        grown: list[Any] = []
        tokens: list[Any] = []
        for owner, (blocks, n_tokens) in tables.items():
            before, n_before = self._tables.get(owner, ([], 0))
            if before != blocks:
                n_kept = _common(before, blocks)
                grown.append([owner, n_kept, list(blocks[n_kept:]), n_tokens])
                self._tables[owner] = list(blocks), n_tokens
            elif n_tokens != n_before or owner not in self._tables:
                tokens.append([owner, n_tokens])
                self._tables[owner] = before, n_tokens
        return grown, tokens

    def _put(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _common(before: Sequence[int], now: Sequence[int]) -> int:
    """How many blocks at the start of both are the same; a table mostly grew at its end."""
    if before == now[: len(before)]:
        return len(before)
    return next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(now))


# ---- reading ----


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a whole trace back.

    OSError where there is no such file; TraceError, with the line, where it is no trace or is damaged.
    Whether the moments follow from each other is seen when they are replayed (`pyvelo.trace.blockmap`).
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        lines = iter(enumerate(file, 1))
        _, first = next(lines, (1, b""))
        header = _header(name, first)
        steps = tuple(_step(_Line(name, number, text)) for number, text in lines)
    for before, after in pairwise(steps):
        if after.time < before.time:
            raise TraceError(f"{name}, line {after.line}: time {after.time} is before {before.time}")
    return Trace(name, header, steps)


class _Line:
    """A line of a file, taken apart; whatever is not as it should be is a TraceError that names it."""

    def __init__(self, path: str, number: int, text: bytes) -> None:
        self.number = number
        self._where = f"{path}, line {number}"
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            raise self.error("not JSON; is the file cut off?") from None
        if not isinstance(parsed, dict):
            raise self.error("not an object")
        self.values: dict[str, Any] = parsed

    def error(self, message: str) -> TraceError:
        return TraceError(f"{self._where}: {message}")

    def integer(self, value: Any, least: int | None = 0) -> int:
        if type(value) is not int or (least is not None and value < least):
            raise self.error(f"{str(value)[:40]!r} where an integer is expected")
        return value

    def items(self, value: Any, length: int | None = None) -> list[Any]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise self.error(f"{str(value)[:40]!r} where a list is expected")
        return value

    def integers(self, value: Any) -> tuple[int, ...]:
        return tuple(self.integer(item) for item in self.items(value))

    def rows(self, key: str, length: int) -> Iterator[list[Any]]:
        """The lists in the list `key`."""
        return (self.items(row, length) for row in self.items(self.values.get(key, [])))


def _header(path: str, text: bytes) -> TraceHeader:
    line = _Line(path, 1, text)
    version = line.values.get("pyvelo_trace")
    if version != VERSION:
        raise line.error("no trace of PyVelo" if version is None else f"a trace of version {version!r}")
    least = {"n_blocks": 1, "block_size": 1, "n_ctx": 1}
    names = [field.name for field in fields(TraceHeader)]
    return TraceHeader(**{name: line.integer(line.values.get(name), least.get(name, 0)) for name in names})


def _step(line: _Line) -> TraceStep:
    time = line.values.get("t")
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < float("inf"):
        raise line.error(f"time {str(time)[:40]!r} is no number of seconds")
    whole = line.integer
    return TraceStep(
        line=line.number,
        time=float(time),
        tables=tuple(
            TableDelta(whole(owner, None), whole(n_kept), line.integers(blocks), whole(n_tokens))
            for owner, n_kept, blocks, n_tokens in line.rows("b", 4)
        ),
        tokens=tuple((whole(owner, None), whole(n)) for owner, n in line.rows("n", 2)),
        freed=tuple(whole(owner, None) for owner in line.items(line.values.get("f", []))),
        swapped=tuple((whole(owner, None), line.integers(blocks)) for owner, blocks in line.rows("s", 2)),
        published=line.integers(line.values.get("p", [])),
        unpublished=line.integers(line.values.get("u", [])),
        events=tuple(_event(line, line.items(event)) for event in line.items(line.values.get("e", []))),
    )


def _event(line: _Line, values: list[Any]) -> TraceEvent:
    known = _EVENTS.get(values[0]) if values and isinstance(values[0], str) else None
    if known is None:
        raise line.error(f"unknown event {str(values)[:40]}")
    kind, types = known
    if [type(value) for value in values[1:]] != types:
        raise line.error(f"event {str(values)[:60]} has other fields than {', '.join(kind._fields)}")
    return kind(*values[1:])
