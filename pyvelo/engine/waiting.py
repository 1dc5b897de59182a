"""How a thread waits for answers: it steps the engine, for everybody, until its own are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TypeVar

from pyvelo.engine.compute import rest
from pyvelo.engine.driver import Driver
from pyvelo.engine.intake import Submission
from pyvelo.outputs import StreamPiece, raise_first_error

__all__ = ["pieces_of", "run_all", "run_steps"]

T = TypeVar("T")


def run_all(driver: Driver, submissions: Sequence[Submission]) -> None:
    """Returns when all have ended; where that is cut short, by Ctrl+C, they are cancelled."""
    requests = [request for submission in submissions for request in submission.requests]
    pending = requests[::-1]

    def ready() -> bool:
        while pending and pending[-1].finished:
            pending.pop()
        return not pending

    try:
        driver.submit(requests)
        driver.drive(ready)
    finally:
        if pending:
            driver.cancel(requests)
        rest()


def run_steps(driver: Driver, steps: Generator[Sequence[Submission], None, T]) -> T:
    """Runs what `steps` asks for, one after the other, and returns what it returns."""
    with closing(steps):
        while True:
            try:
                submissions = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            run_all(driver, submissions)


def pieces_of(
    driver: Driver, submission: Submission, pieces: deque[StreamPiece]
) -> Generator[StreamPiece, None, None]:
    """Submits when the first is asked for, yields what requests append to `pieces`, cancels when closed."""
    try:
        driver.submit(submission.requests)
        while True:
            driver.drive(lambda: pieces or submission.finished)
            while pieces:
                yield pieces.popleft()
            if submission.finished and not pieces:
                break
    finally:
        driver.cancel(submission.requests)
        rest()
    raise_first_error([submission.output()])
