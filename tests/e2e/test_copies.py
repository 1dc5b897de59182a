"""Engines, sessions and streams refuse to be copied or pickled, and work on; plain data can be."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, ArgumentError, AsyncLLM, SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    *(partial(pickle.dumps, protocol=protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
    lambda thing: copy.deepcopy({"inside": [thing]}),
]


def check_refused(thing: Any, instead: str) -> None:
    for make in COPIES:
        with pytest.raises(
            ArgumentError, match=f"{type(thing).__name__} cannot be copied or pickled: .*{instead}"
        ):
            make(thing)


def test_blocking(tiny_model: Path) -> None:
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm:
        check_refused(llm, "another process opens its own")
        session = llm.session("Once")
        check_refused(session, "fork it")
        for stream in (llm.stream("Once", GREEDY), session.stream(GREEDY)):
            check_refused(stream, "ask for another stream")
            next(stream)
            check_refused(stream, "ask for another stream")
            assert len(list(stream)) == 5
        check_refused(session, "fork it")
        assert len(session.fork().token_ids) == len(session.token_ids)
        outputs = llm.generate("Once", GREEDY)
        for plain in (outputs, GREEDY, outputs[0].outputs[0], llm.stats()):
            assert copy.deepcopy(plain) == pickle.loads(pickle.dumps(plain)) == plain
        session.close()
        check_refused(session, "fork it")
    check_refused(llm, "threads may share it")


def test_asyncio(tiny_model: Path) -> None:
    async def body() -> None:
        llm = AsyncLLM(tiny_model, n_ctx=256, n_threads=1)
        check_refused(llm, "tasks may share it")
        async with llm:
            check_refused(llm, "tasks may share it")
            async with await llm.session("Once") as session:
                check_refused(session, "fork it")
            with pytest.raises(TypeError, match="async_generator"):
                copy.copy(llm.stream("Once", GREEDY))

    asyncio.run(asyncio.wait_for(body(), 60))
