"""Engines that are dropped after an error are freed without a garbage collection."""

from __future__ import annotations

import gc
import math
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.errors import ComputeError, RequestError


def banned(llm: LLM) -> SamplingParams:
    return SamplingParams(logit_bias=dict.fromkeys(range(llm.vocab.n_tokens), -math.inf))


def _interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm._engine.core
    step = core.step

    def interrupted() -> bool:
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(core, "step", interrupted)
    try:
        llm.generate([3, 4, 5])
    except KeyboardInterrupt:
        monkeypatch.undo()


def _bad_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(RequestError):
        llm.generate([3, 4, 5], SamplingParams(regex="("))


def _no_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(ComputeError):
        llm.generate([3, 4, 5], banned(llm))


def _no_token_in_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(ComputeError):
        list(llm.stream([3, 4, 5], banned(llm)))


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("fail", [_interrupted, _bad_grammar, _no_token, _no_token_in_a_stream])
def test_an_engine_dropped_after_an_error_is_freed_at_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[LLM, pytest.MonkeyPatch], None]
) -> None:
    gc.collect()
    gc.disable()
    try:
        llm = LLM(tiny_model, n_ctx=256, n_threads=1)
        dropped = weakref.ref(llm)
        fail(llm, monkeypatch)
        del llm
        until = time.monotonic() + 10
        while dropped() is not None and time.monotonic() < until:  # the thread that compiles may still end
            time.sleep(0.01)
        assert dropped() is None
    finally:
        gc.enable()
