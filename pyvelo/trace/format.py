"""Trace of a run as lines of JSON, from which every block map can be rebuilt.

The first line is the header. Every other line is a moment between two steps, with the changes since the line
before: blocks that owners gained or lost, tokens that they store, blocks in host memory, blocks that were
published or unpublished, and events of requests. The text itself is not recorded, only which requests start
with the same tokens.

An owner is a request, by its number in the order of arrival. An owner below 0 is a block table that belongs
to no request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import IO, Any, NamedTuple

from pyvelo.errors import TraceError, check_path

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
    """Geometry of the recorded pool: blocks, tokens of a block, bytes of a block, tokens of the longest
    sequence, and blocks of host memory.
    """

    n_blocks: int
    block_size: int
    block_bytes: int
    n_ctx: int
    n_swap_blocks: int


class Arrived(NamedTuple):
    """Arrival of a request with `n_prompt` tokens that may generate `max_new`. It has its first `n_shared`
    tokens, whole blocks, in common with the request `like` (0: no common start).
    """

    owner: int
    n_prompt: int
    max_new: int
    like: int
    n_shared: int


class Started(NamedTuple):
    """Start of a request with a prefix hit of `n_cached` tokens."""

    owner: int
    n_cached: int


class Preempted(NamedTuple):
    """Preemption of a request: it waits again. `swapped`: its blocks were swapped out to host memory."""

    owner: int
    swapped: bool


class Finished(NamedTuple):
    """End of a request after `n_generated` tokens."""

    owner: int
    n_generated: int
    reason: str


class Evicted(NamedTuple):
    """Eviction of a cached block: it was allocated for other tokens."""

    block: int


TraceEvent = Arrived | Started | Preempted | Finished | Evicted


class TableDelta(NamedTuple):
    """Table of an owner: its first `n_unchanged` blocks, then `blocks`. All store `n_tokens` tokens."""

    owner: int
    n_unchanged: int
    blocks: tuple[int, ...]
    n_tokens: int


@dataclass(frozen=True)
class TraceStep:
    """Changes up to `time`, in seconds since the recording began. `line` is its line in the file."""

    line: int
    time: float
    tables: tuple[TableDelta, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()  # owner, tokens that its blocks store now
    freed: tuple[int, ...] = ()  # owners without blocks
    swapped: tuple[tuple[int, tuple[int, ...]], ...] = ()  # owner, blocks of host memory; none: swapped in
    published: tuple[int, ...] = ()  # blocks
    unpublished: tuple[int, ...] = ()
    events: tuple[TraceEvent, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Recorded run. Its steps are in the order of time."""

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
    """Writer of a trace: gets complete snapshots, and writes their changes.

    Raises:
        OSError: the file cannot be written.
        ConfigError: no file can have this path.
    """

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader) -> None:
        self._tables: dict[int, tuple[list[int], int]] = {}
        self._swapped: dict[int, list[int]] = {}
        self._published: set[int] = set()
        # an int would be a descriptor, which belongs to the caller or to the engine
        self._file: IO[str] = open(check_path(path), "w", encoding="utf-8")  # noqa: SIM115
        self._put({"pyvelo_trace": VERSION, **asdict(header)})

    def write(
        self,
        time: float,
        tables: Mapping[int, tuple[list[int], int]],
        swapped: Mapping[int, list[int]],
        published: Mapping[int, bool],
        events: Iterable[TraceEvent] = (),
    ) -> None:
        """Write a line if anything has changed.

        Args:
            time: seconds since the recording began.
            tables: blocks and number of stored tokens of every owner.
            swapped: blocks in host memory, of every owner that has some.
            published: blocks that may have changed, and whether each is published now.
            events: since the last call.
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
        """Flush and close the file. May be called again."""
        self._file.close()

    def _compare(self, tables: Mapping[int, tuple[list[int], int]]) -> tuple[list[Any], list[Any]]:
        """Return the owners whose blocks changed, and the owners with more tokens in the same blocks."""
        grown: list[Any] = []
        tokens: list[Any] = []
        for owner, (blocks, n_tokens) in tables.items():
            before, n_before = self._tables.get(owner, ([], 0))
            if before != blocks:
                n_unchanged = _common(before, blocks)
                grown.append([owner, n_unchanged, list(blocks[n_unchanged:]), n_tokens])
                self._tables[owner] = list(blocks), n_tokens
            elif n_tokens != n_before or owner not in self._tables:
                tokens.append([owner, n_tokens])
                self._tables[owner] = before, n_tokens
        return grown, tokens

    def _put(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _common(before: Sequence[int], now: Sequence[int]) -> int:
    """Return how many blocks at the start of both are equal. A table mostly grew at its end."""
    if before == now[: len(before)]:
        return len(before)
    return next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(now))


# ---- reading ----


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a whole trace.

    Replaying it (`pyvelo.trace.blockmap`) checks whether each step follows from the steps before.

    Raises:
        OSError: the file cannot be read.
        TraceError: the file is no trace or is damaged; the message has the line.
        ConfigError: no file can have this path.
    """
    name = check_path(path)
    with open(name, "rb") as file:
        lines = iter(enumerate(file, 1))
        _, first = next(lines, (1, b""))
        header = _header(name, first)
        steps = tuple(_step(_Line(name, number, text)) for number, text in lines)
    for before, after in pairwise(steps):
        if after.time < before.time:
            raise TraceError(f"{name}, line {after.line}: time {after.time} is before {before.time}")
    return Trace(name, header, steps)


class _Line:
    """Parsed line of a trace. Its methods raise TraceError, with the line, for wrong values."""

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
        """Return the lists of `length` items in the list `key`."""
        return (self.items(row, length) for row in self.items(self.values.get(key, [])))


def _header(path: str, text: bytes) -> TraceHeader:
    line = _Line(path, 1, text)
    version = line.values.get("pyvelo_trace")
    if version != VERSION:
        raise line.error("not a trace of PyVelo" if version is None else f"a trace of version {version!r}")
    least = {"n_blocks": 1, "block_size": 1, "n_ctx": 1}
    names = [field.name for field in fields(TraceHeader)]
    return TraceHeader(**{name: line.integer(line.values.get(name), least.get(name, 0)) for name in names})


def _step(line: _Line) -> TraceStep:
    time = line.values.get("t")
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < float("inf"):
        raise line.error(f"time {str(time)[:40]!r} is not a number of seconds")
    whole = line.integer
    return TraceStep(
        line=line.number,
        time=float(time),
        tables=tuple(
            TableDelta(whole(owner, None), whole(n_unchanged), line.integers(blocks), whole(n_tokens))
            for owner, n_unchanged, blocks, n_tokens in line.rows("b", 4)
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
