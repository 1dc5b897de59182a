"""Ctrl+C at every line of a call: the next call works, and nothing is left behind."""

from __future__ import annotations

import collections
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import pytest

import pyvelo
from pyvelo import LLM, BeamSearchParams, SamplingParams
from pyvelo.native import Model

from .conftest import MakeModel

WAIT = 60.0  # seconds after which a call is taken to hang
FOLDER = os.path.dirname(pyvelo.__file__) + os.sep
PROMPT = [3, 4, 5]
GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("sigint")


Place = tuple[object, ...]
"""A line of PyVelo and the line that called it: code, line number, code, line number."""


def place_of(frame: FrameType | None) -> Place:
    stack: list[object] = []
    while frame is not None and frame.f_code.co_filename.startswith(FOLDER) and len(stack) < 4:
        stack += (frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return tuple(stack)


EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))
INTERRUPTED: dict[int, set[Place]] = collections.defaultdict(set)
"""Places that earlier tests of this process interrupted. Other calls are interrupted there by chance."""


def places_of(call: Callable[[], object], *files: str) -> list[Place]:
    """Return the places of PyVelo that the call runs, or its places in these files."""
    places: dict[Place, None] = {}

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(FOLDER) else None

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            places.setdefault(place_of(frame))
        return line

    run_traced(call, entered)
    return [place for place in places if cast(CodeType, place[0]).co_filename.endswith(files or "")]


class Interruption:
    """Ctrl+C before the first line at a place, and perhaps once more, some lines later."""

    def __init__(self, place: Place, again: int = 0) -> None:
        self._place = place
        self._code = place[0]
        self._n_left = again

    def run(self, call: Callable[[], object]) -> None:
        run_traced(call, self._entered)

    def _entered(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code is self._code else None  # other lines run untraced

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line" or frame.f_lineno != self._place[1] or place_of(frame) != self._place:
            return self._line
        sys.settrace(self._entered_after if self._n_left else None)
        caller: FrameType | None = frame
        while caller is not None and self._n_left:
            caller.f_trace = self._line_after
            caller = caller.f_back
        signal.raise_signal(signal.SIGINT)
        return self._line_after

    def _entered_after(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line_after

    def _line_after(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self._n_left and frame.f_code.co_filename.startswith(FOLDER):
            self._n_left -= 1
            if not self._n_left:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._line_after


def run_traced(call: Callable[[], object], trace: Callable[[FrameType, str, Any], Any]) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.fixture(scope="module")
def llm(make_model: MakeModel) -> Iterator[LLM]:
    path = make_model("--layers", "1", "--embd", "64", "--ffn", "64", "--head-dim", "16", "--type", "f32")
    with LLM(path, n_ctx=256, n_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> tuple[int, ...]:
    return llm.generate([PROMPT], GREEDY)[0].token_ids


def generate(llm: LLM) -> None:
    llm.generate([PROMPT, [6]], GREEDY)


def stream(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, GREEDY):
        pass


def stream_and_stop(llm: LLM) -> None:
    pieces = llm.stream(PROMPT, GREEDY)
    next(pieces)
    pieces.close()


def session(llm: LLM) -> None:
    with llm.session(PROMPT) as root:
        root.compute()
        with root.fork() as twin:
            twin.append([7])
            twin.generate(GREEDY)


def session_stream(llm: LLM) -> None:
    with llm.session(PROMPT) as root:
        for _ in root.stream(GREEDY):
            break
        root.generate(GREEDY)


def beam_search(llm: LLM) -> None:
    llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=2))


def look(llm: LLM) -> None:
    llm.stats()
    llm.reset_prefix_cache()


@pytest.mark.parametrize(
    ("call", "again"),
    [
        (generate, 0),
        (generate, 3),
        (stream, 0),
        pytest.param(stream_and_stop, 3, marks=pytest.mark.slow),
        (session, 0),
        (session_stream, 0),
        (beam_search, 0),
        (look, 0),
    ],
)
def test_ctrl_c_at_every_line(
    llm: LLM, expected: tuple[int, ...], call: Callable[[LLM], None], again: int
) -> None:
    call(llm)
    places = places_of(lambda: call(llm))
    assert len(places) > 50
    seen = INTERRUPTED[again]
    draw = random.Random(call.__name__)
    places = [place for place in places if place not in seen or draw.random() < EFFORT / 8]
    seen.update(places)
    n_raised = 0
    for place in places:
        try:
            Interruption(place, again).run(lambda: call(llm))
        except KeyboardInterrupt:
            n_raised += 1
        check_idle(llm, expected, f"Ctrl+C at {place}")
    assert n_raised > len(places) / 2


def test_ctrl_c_at_every_line_of_a_load(tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[LLM] = []  # to drop them when no signal comes

    def load() -> None:
        loaded[:] = [LLM(tiny_model_f32, n_ctx=64, kv_cache_bytes=1 << 20, n_threads=1)]
        loaded[0].close()

    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    load()
    loaded.clear()
    places = places_of(load, "watcher.py", "engine.py", "model.py")
    assert len(places) > 100
    loaded.clear()
    gc.collect()
    n_models = sum(isinstance(each, Model) for each in gc.get_objects())
    for place in places:
        loaded.clear()
        with pytest.raises(KeyboardInterrupt) as raised:
            Interruption(place).run(load)
        assert raised.value.__cause__ is None, f"Ctrl+C at {place}"
        assert not unraisable, f"Ctrl+C at {place}"
    loaded.clear()
    del raised  # its frames hold the model
    gc.collect()
    assert sum(isinstance(each, Model) for each in gc.get_objects()) == n_models


def test_trace_is_ended_by_ctrl_c_at_any_line(llm: LLM, expected: tuple[int, ...], tmp_path: Path) -> None:
    def call() -> None:
        with llm.trace(tmp_path / "run.trace"):
            llm.generate([PROMPT], GREEDY)

    for place in places_of(call, "recorder.py", "loop.py", "interrupts.py"):
        with suppress(KeyboardInterrupt):
            Interruption(place).run(call)
        check_idle(llm, expected, f"Ctrl+C at {place}")
        with llm.trace(tmp_path / "next.trace"):  # no other recording goes on
            pass


def test_pairs_of_signals_at_any_time(llm: LLM, expected: tuple[int, ...]) -> None:
    """Real signals, two within 2 ms, while the main thread generates."""
    n_left, n_raised, ended = 0, 0, False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal n_left, n_raised
        if n_left:
            n_left -= 1
            n_raised += 1
            raise KeyboardInterrupt

    def send() -> None:
        pause = 0
        while not ended:
            pause = (pause + 1) % 20
            time.sleep(0.004)
            for seconds in (0.0, pause / 10000):
                time.sleep(seconds)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for number in range(200):
        try:
            try:
                n_left = 2
                (generate, session)[number % 2](llm)
            except KeyboardInterrupt:
                pass
            n_left = 0
        except KeyboardInterrupt:  # the second of them
            pass
        n_left = 0
        check_idle(llm, expected, f"round {number}")
    ended = True
    sender.join(WAIT)
    assert n_raised > 10


def check_idle(llm: LLM, expected: tuple[int, ...], when: str) -> None:
    """The engine answers another thread, holds nothing and is sound."""
    found: list[object] = []

    def work() -> None:
        gc.collect(0)
        stats = llm.stats()
        found.append((stats.running, stats.waiting, stats.idle, stats.blocks_used, stats.blocks_reserved))
        found.append(llm.generate([PROMPT], GREEDY)[0].token_ids)
        llm._engine.core.manager.audit()
        found.append(llm._engine.core.n_running)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive(), f"{when}: the engine hangs"
    assert found == [(0, 0, 0, 0, 0), expected, 0], when
