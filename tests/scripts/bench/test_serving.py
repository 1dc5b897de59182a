"""The serving benchmark: the same requests on every side, and figures that follow from times of tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.bench import serving
from scripts.bench._serving import (
    Job,
    Load,
    Record,
    Refused,
    play,
    summarise,
    waste_of_blocks,
    waste_of_slots,
    workload,
)
from scripts.bench._stock_server import ServerSettings, ask, command, running
from tests import forks

SERVER = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

given = sys.argv[1:]
assert "--no-kv-unified" in given or "--kv-unified" in given
slot = int(given[given.index("-c") + 1]) // int(given[given.index("-np") + 1])

class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{{}}")

    def chunk(self, data):
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))

    def event(self, value):
        # in two pieces: an event may be cut anywhere
        data = b"data: " + json.dumps(value).encode() + b"\\n\\n"
        self.chunk(data[:5])
        self.chunk(data[5:])

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and not asked["cache_prompt"] and asked["temperature"] == 0
        if len(asked["prompt"]) > slot:
            body = b'{{"error": "too long"}}'
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        n = asked["n_predict"]
        if asked["prompt"][0] == 99:
            self.event({{"timings": {{"predicted_n": 1}}}})
            self.event({{"error": {{"message": "the context is full"}}}})
        else:
            for seen in [*range(2, n, 2), n]:
                self.event({{"content": "x", "timings": {{"predicted_n": seen}}}})
        self.chunk(b"")

port = int(given[given.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Server).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A llama-server that says nothing of its own."""
    path = tmp_path / "llama-server"
    path.write_text(SERVER.format(python=sys.executable))
    path.chmod(0o755)
    return path


def settings(program: Path, *, unified: bool = False) -> ServerSettings:
    return ServerSettings(program, Path("m.gguf"), "f16", 512, 2, unified, threads=1, batch=64, connections=3)


LOAD = Load(requests=200, rate=4.0, prompt_mean=100, answer_mean=50, shortest=32, longest=300, seed=1)


def test_a_workload_is_what_was_asked_for() -> None:
    jobs = workload(LOAD, 50)
    assert jobs == workload(LOAD, 50)
    assert all(32 <= len(job.prompt) <= 300 and 32 <= job.n_new <= 300 for job in jobs)
    assert all(0 <= token < 50 for job in jobs for token in job.prompt)
    assert {32, 300} < {len(job.prompt) for job in jobs}
    arrivals = [job.arrival for job in jobs]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert 0.15 < arrivals[-1] / 200 < 0.35


def test_figures_follow_from_the_times_of_tokens() -> None:
    records = [
        Record(0.0, n_prompt=10, n_new=3, stamps=[1.0, 1.5, 2.0], tries=1),
        Record(0.5, n_prompt=20, n_new=2, stamps=[1.0, 4.0], tries=2),
        Record(1.0, n_prompt=30, n_new=2, stamps=[3.0], tries=1, error="gone"),
    ]
    found = summarise(records, ttft_limit=1.0, tbt_limit=0.5, capacity=100, waste=0.25)
    assert (found.seconds, found.tokens_per_s, found.good, found.good_per_s) == (4.0, 5 / 4, 1, 0.25)
    assert (found.failed, found.broken_off, found.peak, found.waste) == (1, 2, 2, 0.25)
    assert (found.ttft_p50, found.ttft_p99, found.tbt_p50, found.tbt_p99) == (1.0, 1.0, 0.5, 3.0)
    # two requests until 2.0, then one until 4.0: every quarter of a second
    tokens = [(11 + 21) / 100] * 2 + [(12 + 21) / 100] * 2 + [21 / 100] * 8
    assert found.fill == pytest.approx(sum(tokens) / 12)
    slots = [1 - 32 / 128] * 2 + [1 - 33 / 128] * 2 + [1 - 21 / 64] * 8
    assert waste_of_slots(records, 64) == pytest.approx(sum(slots) / 12)


def test_blocks_waste_what_their_last_ones_hold_free() -> None:
    records = [Record(0, 40, 2, [0.0, 0.3]), Record(0, 31, 2, [0.0, 0.1])]
    # at 0 s 41 tokens in 2 blocks and 32 in one, at 0.25 s 41 tokens in 2
    assert waste_of_blocks(records) == pytest.approx((1 - 73 / 96 + 1 - 41 / 64) / 2)


def test_no_request_finished() -> None:
    found = summarise([Record(0.0, 1, 1)], ttft_limit=1, tbt_limit=1, capacity=1, waste=0)
    assert (found.tokens_per_s, found.good, found.failed) == (0, 0, 1)


def test_what_is_refused_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([True, True, False])

    async def answer(job: Job, came: Callable[[int], None]) -> None:
        came(1)
        if next(times):
            raise Refused("full")
        came(1)

    async def no_pause(seconds: float) -> None:
        pass

    monkeypatch.setattr("scripts.bench._serving.asyncio.sleep", no_pause)
    (record,) = asyncio.run(play([Job(0.0, [1], 2)], answer, tries=3))
    assert (record.finished, record.tries, record.thrown_away, len(record.stamps)) == (True, 3, 2, 2)
    times = iter([True])
    (record,) = asyncio.run(play([Job(0.0, [1], 2)], answer))
    assert (record.finished, record.error) == (False, "full")


def test_the_server_is_asked_and_its_tokens_counted(program: Path) -> None:
    with running(settings(program)) as port:

        def answer(job: Job) -> list[int]:
            counts: list[int] = []
            asyncio.run(ask(port, job, counts.append))
            return counts

        assert answer(Job(0.0, [1, 2], 5)) == [2, 2, 1]
        with pytest.raises(Refused, match="the context is full"):
            answer(Job(0.0, [99], 5))
        with pytest.raises(Refused, match=r"status 400: .*too long"):
            answer(Job(0.0, [1] * 300, 5))
    with pytest.raises(Refused, match="no connection"):
        answer(Job(0.0, [1], 1))


def test_a_server_that_does_not_start_is_one_sentence(program: Path, tmp_path: Path) -> None:
    program.write_text("#!/bin/sh\necho no such model\nexit 1\n")
    with pytest.raises(ScriptError, match="no such model"), running(settings(program)):
        pass
    with pytest.raises(ScriptError, match=r"build/stock\.py"), running(settings(tmp_path / "none")):
        pass


def test_both_modes_have_the_bytes_that_there_are(program: Path) -> None:
    streams, safe, more = serving.stock_modes(8200, 1500, [])
    assert (streams.slots, streams.context, streams.unified) == (5, 5 * 1536, False)
    assert (safe.slots, safe.context, safe.unified) == (5, 8192, True)
    assert (more.slots, more.context) == (10, 8192)
    assert [mode.slots for mode in serving.stock_modes(8200, 1500, [7])] == [5, 7]
    with pytest.raises(ScriptError, match="give more --kv-bytes"):
        serving.stock_modes(1000, 1000, [])
    assert "--kv-unified" in command(settings(program, unified=True), 1)


@pytest.mark.slow
def test_the_whole_script(program: Path, tiny_model: Path) -> None:
    sizes = ["--requests", "4", "--rate", "50", "--prompt-mean", "50", "--longest", "100", "--threads", "1"]
    done = forks.run(
        [
            forks.PYTHON,
            serving.__file__,
            str(tiny_model),
            *["--stock-bin", str(program.parent), "--kv-bytes", "4000000", "--rounds", "2", "--json", *sizes],
            "--http",
        ],
        check=True,
    )
    found = json.loads(done.stdout)
    assert len(found["rounds"]) == len(found["ratios"]["tokens_per_s"]) == 2
    for summaries in found["rounds"]:
        ours, over_http, streams, *unified = summaries.values()
        assert [side["failed"] for side in (ours, over_http, streams, *unified)] == [0] * 5
        assert 0 <= ours["waste"] < 1
        assert 0 <= over_http["waste"] < 1
