"""Results on their way to the output."""

from __future__ import annotations

import asyncio
import errno
from typing import cast

import pytest

from pyvelo.batch.flow import Room, Writer
from pyvelo.batch.output import Output


class FullOnce:
    """Output of which one write fails, as on a disk on which a short line still has room."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.is_full = False

    def append(self, lines: bytes) -> None:
        if self.is_full:
            self.is_full = False
            raise OSError(errno.ENOSPC, "no space")
        self.taken.append(lines)


@pytest.mark.parametrize("ordered", [True, False])
def test_nothing_follows_what_was_not_written(ordered: bool) -> None:
    async def main() -> list[bytes]:
        output, failures = FullOnce(), list[BaseException]()
        writer = Writer(cast(Output, output), Room(9), ordered, failures.append)
        writer.put(0, b"one")
        writer.flush()
        writer.put(1, b"two")
        output.is_full = True
        with pytest.raises(OSError, match="no space"):
            writer.flush()
        writer.put(2, b"three")
        writer.flush()
        return output.taken

    assert asyncio.run(main()) == [b"one"]
