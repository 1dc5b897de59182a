"""The benchmark of the server: its floor, its clock of steps, and the whole script."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from scripts._common import ScriptError
from scripts.bench import server
from scripts.bench._floor import Floor, recorded
from scripts.bench.server import Side, figures
from tests import forks

PARTS = [b"", b"a", b"b"]


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer with the fields of the request, one in each message."""
    fields = json.loads((await receive())["body"])
    await send({"type": "http.response.start", "status": 200, "path": scope["path"]})
    for name in fields:
        await send({"type": "http.response.body", "body": name.encode()})


def test_the_floor_repeats_what_was_recorded_beat_by_beat() -> None:
    async def run() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        messages = await recorded(application, "/p", {"a": 1, "b": 2})
        floor, sent = Floor(messages), []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        answers = asyncio.gather(*(floor({}, receive, send) for _ in range(2)))
        for n_beats in range(3):
            await asyncio.sleep(0.01)
            assert len(sent) == 2 * n_beats
            floor.beat()
        await answers
        return messages, sent

    messages, sent = asyncio.run(run())
    assert [message.get("body", b"") for message in messages] == PARTS
    assert messages[0]["path"] == "/p"
    assert sent == [message for message in messages for _ in range(2)]  # a beat is one of each stream


def test_an_answer_that_is_refused_is_no_floor() -> None:
    async def refuse(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 403})
        await send({"type": "http.response.body", "body": b"no"})

    with pytest.raises(ScriptError, match="/p gave b'no'"):
        asyncio.run(recorded(refuse, "/p", {}))


def test_figures_are_differences() -> None:
    plain = Side(seconds=1.0, loop_seconds=0.1, steps=[0.001] * 10)
    http = Side(seconds=2.0, loop_seconds=0.5, steps=[0.002] * 10, client_seconds=0.6)
    latencies = {"first": 0.02, "health": 0.001, "refusal": 0.002}
    found = figures(plain, http, (0.3, [0.003] * 10), 100_000, latencies, 2)
    expected = {
        "http_us_per_token": 4.0,
        "floor_us_per_token": 3.0,
        "own_us_per_token": 1.0,
        "added_first_ms": 20.0,
        "step_python_p99_ms": 1.0,
        "http_step_python_p99_ms": 2.0,
        "floor_step_python_p99_ms": 3.0,
        "throughput_ratio": 0.5,
        "throughput_limit": 0.75,
        "tokens_per_second": 50_000.0,
    }
    assert {name: round(getattr(found, name), 6) for name in expected} == expected


def test_the_whole_script() -> None:
    command = [forks.PYTHON, server.__file__, "--streams", "4", "--tokens", "40", "--rounds", "1", "--json"]
    (found,) = json.loads(forks.run(command, check=True).stdout)["rounds"]
    assert found["floor_us_per_token"] > 0
    assert found["http_step_python_p99_ms"] > 0
    assert found["tokens_per_second"] > 0
