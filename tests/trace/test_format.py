"""Traces are read as they were written, and errors name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.errors import ConfigError, TraceError, VeloError
from pyvelo.trace.blockmap import moments, replay, summarize
from pyvelo.trace.format import (
    Arrived,
    Evicted,
    Finished,
    Preempted,
    Started,
    TraceHeader,
    TraceWriter,
    read_trace,
)

HEADER = TraceHeader(n_blocks=8, block_size=4, block_bytes=64, n_ctx=16, n_swap_blocks=3)
EVENTS = [Arrived(1, 5, 6, 0, 0), Started(1, 0), Preempted(1, True), Finished(1, 6, "length"), Evicted(2)]

# a snapshot: the blocks and free slots of each owner, host blocks, and published blocks
Tables = st.dictionaries(
    st.integers(-2, 4), st.tuples(st.lists(st.integers(0, 7), max_size=4), st.integers(0, 3)), max_size=4
)
Snapshots = st.lists(
    st.tuples(
        Tables,
        st.dictionaries(st.integers(1, 4), st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=2),
        st.sets(st.integers(0, 7)),
    ),
    max_size=8,
)


@given(snapshots=Snapshots)
def test_every_block_map_can_be_rebuilt(snapshots: list, tmp_path_factory: pytest.TempPathFactory) -> None:  # type: ignore[type-arg]
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    writer = TraceWriter(path, HEADER)
    expected = []
    for number, (tables, swapped, hits) in enumerate(snapshots):
        held = {o: (blocks, max(0, 4 * len(blocks) - less)) for o, (blocks, less) in tables.items()}
        # an event forces a line
        writer.write(number, held, swapped, {b: b in hits for b in range(8)}, [Evicted(number)])
        expected.append((held, swapped, hits))
    writer.close()
    trace = read_trace(path)
    assert trace.header == HEADER
    for (step, blocks), (held, swapped, hits) in zip(replay(trace), expected, strict=True):
        assert step.time == blocks.time == step.line - 2
        assert {o: (table.blocks, table.n_tokens) for o, table in blocks.tables.items()} == held
        assert {o: list(host) for o, host in blocks.swapped.items()} == swapped
        references = [sum(table.count(b) for table, _ in held.values()) for b in range(8)]
        assert blocks.published == hits
        assert blocks.references == references
        assert blocks.n_used == sum(n > 0 for n in references)
        assert blocks.n_shared == sum(n > 1 for n in references)
        assert blocks.cached() == {b for b in hits if not references[b]}
        assert blocks.n_cached == len(blocks.cached())
        assert blocks.n_free == 8 - blocks.n_used - blocks.n_cached


def write(path: Path) -> Path:
    """Two sequences over a shared block; the first is preempted, the second ends."""
    writer = TraceWriter(path, HEADER)
    writer.write(0.5, {1: ([0, 1], 5)}, {}, {0: True}, EVENTS[:2])
    writer.write(1.0, {1: ([0, 1], 6), 2: ([0, 3], 7)}, {}, {}, [Arrived(2, 7, 2, 1, 4)])
    writer.write(1.5, {2: ([0, 3], 8)}, {1: [2, 0]}, {3: True}, [Preempted(1, True)])
    writer.write(1.5, {2: ([0, 3], 8)}, {1: [2, 0]}, {})  # no change, no line
    writer.write(2.5, {1: ([0, 4], 6)}, {}, {3: False}, [Finished(2, 2, "stop"), Evicted(3)])
    writer.write(3.0, {}, {}, {}, [Finished(1, 6, "length")])
    writer.close()
    writer.close()
    return path


def test_steps_and_events_are_typed(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "run.trace"))
    assert [step.line for step in trace.steps] == [2, 3, 4, 5, 6]
    assert [step.time for step in trace.steps] == [0.5, 1.0, 1.5, 2.5, 3.0]
    assert trace.steps[1].tables == ((2, 0, (0, 3), 7),)
    assert trace.steps[1].tokens == ((1, 6),)
    assert trace.steps[2].freed == (1,)
    assert trace.steps[2].swapped == ((1, (2, 0)),)
    assert trace.steps[3].unpublished == (3,)
    assert trace.steps[3].events == (Finished(2, 2, "stop"), Evicted(3))


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "run.trace"))
    run = list(moments(trace))
    assert [m.used for m in run] == [2, 3, 2, 2, 0]
    assert [m.shared for m in run] == [0, 1, 0, 0, 0]
    assert [m.cached for m in run] == [0, 0, 0, 0, 1]
    assert [m.swapped for m in run] == [0, 0, 2, 0, 0]
    assert [m.tokens_held for m in run] == [5, 13, 8, 6, 0]
    assert [m.tokens_stored for m in run] == [5, 9, 8, 6, 0], "the shared block's four count once"
    assert [m.reserved_ctx for m in run] == [16, 32, 16, 16, 0]
    assert [m.reserved_max for m in run] == [11, 20, 9, 11, 0]
    summary = summarize(trace)
    assert (summary.seconds, summary.requests, summary.finished) == (2.5, 2, 2)
    assert (summary.preemptions, summary.swaps, summary.evictions) == (1, 1, 1)
    held = 0.5 * 5 + 0.5 * 13 + 8 + 0.5 * 6
    assert summary.waste_reserved_ctx == pytest.approx(1 - held / (0.5 * 16 + 0.5 * 32 + 16 + 0.5 * 16))
    stored = 0.5 * 5 + 0.5 * 9 + 8 + 0.5 * 6
    assert summary.waste_paged == pytest.approx(1 - stored / (4 * (0.5 * 2 + 0.5 * 3 + 2 + 0.5 * 2)))
    assert summary.saved_by_sharing == pytest.approx(1 - 5.5 / 6)


def test_a_trace_without_steps(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "empty", HEADER).close()
    summary = summarize(read_trace(tmp_path / "empty"))
    assert (summary.steps, summary.seconds, summary.waste_paged) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("number", "text", "says"),
    [
        (1, "", "not JSON"),
        (1, "{}", "not a trace"),
        (1, '{"pyvelo_trace":9}', "version 9"),
        (1, '{"pyvelo_trace":1,"n_blocks":0}', "integer"),
        (3, '{"t":1.0,"n":[[1,', "not JSON"),
        (3, "[" * 100_000, "not JSON"),
        (3, "\xff", "not JSON"),
        (3, "[1]", "not an object"),
        (3, "{}", "time"),
        (3, '{"t":NaN}', "time"),
        (3, '{"t":true}', "time"),
        (3, '{"t":0.25}', "before"),
        (3, '{"t":1,"n":[[1,"6"]]}', "integer"),
        (3, '{"t":1,"n":[[1]]}', "list"),
        (3, '{"t":1,"n":3}', "list"),
        (3, '{"t":1,"b":[[2,0,[-1],0]]}', "integer"),
        (3, '{"t":1,"e":[["rain",1]]}', "unknown event"),
        (3, '{"t":1,"e":[[]]}', "unknown event"),
        (3, '{"t":1,"e":[["start",1]]}', "n_cached"),
        (3, '{"t":1,"e":[["start",1,true]]}', "n_cached"),
    ],
)
def test_a_damaged_file_names_the_line(tmp_path: Path, number: int, text: str, says: str) -> None:
    path = write(tmp_path / "run.trace")
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[number - 1] = text
    path.write_text("\n".join(lines), encoding="latin-1")
    with pytest.raises(TraceError, match=f"line {number}: .*{says}") as error:
        read_trace(path)
    assert isinstance(error.value, VeloError)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"b": [[2, 0, [8], 0]]}, "block 8 of 8"),
        ({"b": [[2, 1, [3], 0]]}, "has 0 blocks, not 1"),
        ({"b": [[2, 0, [3], 5]]}, "5 tokens in 1 blocks"),
        ({"n": [[2, 1]]}, "owner 2 has no blocks"),
        ({"n": [[1, 9]]}, "9 tokens in 2 blocks"),
        ({"f": [2]}, "owner 2 has no blocks"),
        ({"s": [[1, [3]]]}, "block 3 of 3"),
        ({"s": [[1, []]]}, "owner 1 has nothing in host memory"),
        ({"p": [0]}, "published already"),
        ({"u": [1]}, "was not published"),
    ],
)
def test_a_change_that_does_not_fit_names_the_line(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    path = write(tmp_path / "run.trace")
    lines = path.read_text(encoding="utf-8").splitlines()[:2]
    path.write_text("\n".join([*lines, json.dumps({"t": 1.0, **change})]), encoding="utf-8")
    trace = read_trace(path)
    with pytest.raises(TraceError, match=f"line 3: .*{says}"):
        summarize(trace)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(TraceError, match="line 1"):
        read_trace(tmp_path / "model.gguf")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none")


def test_a_descriptor_is_not_a_path(tmp_path: Path) -> None:
    with open(tmp_path / "mine", "wb") as mine:
        with pytest.raises(TypeError, match="give the path of a file"):
            TraceWriter(mine.fileno(), HEADER).close()  # type: ignore[arg-type]
        mine.write(b"x")
        mine.flush()


@pytest.mark.parametrize(("path", "says"), [("a\0b", "NUL character"), ("a\ud800", "not valid Unicode")])
def test_a_path_that_no_file_can_have(path: str, says: str) -> None:
    for use in (lambda: TraceWriter(path, HEADER), lambda: read_trace(path)):
        with pytest.raises(ConfigError, match=f"the path '.*{says}"):
            use()
