"""The file of the results: what a run finds there, and whole lines in it."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pyvelo.batch.output import MIN_RECENT, Held, Numbers, open_output
from pyvelo.batch.rows import parse_row, result_line
from pyvelo.errors import ConfigError

from .batches import row


def result(custom_id: str, status: int = 200) -> bytes:
    return result_line(parse_row(1, row(custom_id)), "0123456789abcdef", status, b'{"text":"x"}')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def held_of(path: Path) -> Held:
    with open_output(path) as (_, held):
        return held


def test_numbers_are_found_again() -> None:
    numbers, keys = Numbers(), [hash(str(n)) for n in range(3 * MIN_RECENT // 2)]
    for number, key in enumerate(keys):
        assert numbers.get(key) is None
        numbers.add(key, number)
    assert len(numbers) == len(keys)
    assert [numbers.get(key) for key in keys] == list(range(len(keys)))
    assert numbers.get(hash("another")) is None


def test_what_a_file_holds(path: Path) -> None:
    nameless = parse_row(5, b"nonsense")
    path.write_bytes(result("a") + result("b", 400) + result_line(nameless, "1f", 400, b"{}"))
    held = held_of(path)
    assert [held.failed("a", 1), held.failed("b", 2), held.failed("c", 3)] == [False, True, None]
    assert [held.failed(None, 5), held.failed(None, 1)] == [True, None]


def test_every_cut_leaves_the_results_before_it(path: Path) -> None:
    lines = [result("a"), result("b"), result("c")]
    whole = b"".join(lines)
    ends = [0, len(lines[0]), len(lines[0] + lines[1]), len(whole)]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        n = sum(end <= cut for end in ends[1:])
        n += cut + 1 in ends  # the line end alone is missing
        held = held_of(path)
        assert [held.failed(name, 1) is not None for name in "abc"] == [i < n for i in range(3)]
        assert path.read_bytes() == whole[: ends[n]]


def test_results_are_appended(path: Path) -> None:
    for lines in (result("a"), result("b") + result("c")):
        with open_output(path) as (output, _):
            output.append(lines)
    assert path.read_bytes() == result("a") + result("b") + result("c")


@pytest.mark.parametrize(
    "content",
    [
        *(b"hello", b"hello\n", b"\0", b"{", b"{}\n", row("a") + b"\n", b"\n"),
        *(result("a") + b"hello\n" + result("b"), result("a") + b"hello", b"\x7fELF" + bytes(5000)),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_another_file_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    if content == b"{":  # the beginning of a result
        assert held_of(path).end == 0
        return
    with pytest.raises(ConfigError, match=r"results.jsonl exists, and its line [12] is no result of a batch"):
        held_of(path)
    assert path.read_bytes() == content


def test_only_files(path: Path, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        held_of(tmp_path)
    with pytest.raises(FileNotFoundError):
        held_of(tmp_path / "none" / "results.jsonl")
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is no ordinary file"):
        held_of(path)


def test_one_run_at_a_time(path: Path) -> None:
    with open_output(path), pytest.raises(ConfigError, match="another run writes to it"), open_output(path):
        pass


def test_a_run_that_writes_nothing_leaves_no_file(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_output(path):
        raise ZeroDivisionError
    assert not path.exists()
    with open_output(path) as (output, _):
        output.append(result("a"))
        output.unwanted = True
    assert path.read_bytes() == result("a")


class Full(FileIO):
    """File on a disk that becomes full."""

    left = 10

    def write(self, data: Any) -> int:
        if not self.left:
            raise OSError(28, "No space left on device")
        n = min(self.left, len(data))
        self.left -= n
        return super().write(data[:n])


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_gone_ends_the_run(path: Path, replaced: bool) -> None:
    with open_output(path) as (output, _):
        output.append(result("a") + b"\n")
        path.rename(path.with_suffix(".moved"))
        if replaced:
            path.write_bytes(b"")
        with pytest.raises(FileNotFoundError, match="deleted or replaced"):
            output.append(result("b") + b"\n")
    assert path.with_suffix(".moved").read_bytes() == result("a") + b"\n"


def test_a_full_disk_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyvelo.batch.output.FileIO", Full)
    with open_output(path) as (output, _):
        Full.left = len(result("a")) + 10
        output.append(result("a"))
        output._file.left = 10  # type: ignore[attr-defined]
        with pytest.raises(OSError, match=r"No space left on device: .*results\.jsonl"):
            output.append(result("b"))
        output._file.left = 1000  # type: ignore[attr-defined]
        output.append(result("c"))
    assert path.read_bytes() == result("a") + result("c")


def test_a_write_may_take_several_calls(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    monkeypatch.setattr("pyvelo.batch.output.FileIO", Slow)
    with open_output(path) as (output, _):
        output.append(result("a"))
    assert path.read_bytes() == result("a")
