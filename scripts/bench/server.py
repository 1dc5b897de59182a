"""Measure what HTTP adds to the engine: processor time of a token, time to the first token, throughput.

    python scripts/bench/server.py
    python scripts/bench/server.py model.gguf --streams 16 --tokens 128 --rounds 5 --json

The engine, the server and its event loop run in this process; the clients run in another one and talk to it
over loopback. In each round the same requests run in the event loop without HTTP, and over HTTP, in turns:

- us a token: processor time of the event loop's thread for each streamed token, over HTTP less without it.
- first token: median time of one request alone with a short prompt, over HTTP less without it.
- throughput: tokens per second of all streams over HTTP, over that without HTTP.
- /health: the slowest of 99 % of its answers while all streams run.
- refusals: the slowest of 99 % of the 503 answers beyond a full queue, while all streams run.

The default model is the demo model, whose steps are short, so that HTTP is a large part; give a larger one
for the throughput that users see.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

import uvicorn

from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.engine.async_loop import AsyncEngineLoop, open_engine_loop
from pyvelo.sampling import SamplingParams
from pyvelo.server.app import App
from pyvelo.server.run import uvicorn_config
from pyvelo.server.serving import Serving
from pyvelo.server.settings import Settings
from scripts._common import ScriptError, run_main
from scripts.bench._serving import quantile

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
SINGLES = 30
"""Requests alone, for the time to the first token."""


@dataclass
class Side:
    """One measurement: seconds of all streams and of the event loop's thread, and times to first tokens."""

    seconds: float
    loop_seconds: float
    first: list[float]


@dataclass
class Figures:
    """Medians of the rounds."""

    http_us_per_token: float
    added_first_ms: float
    throughput_ratio: float
    tokens_per_second: float
    health_p99_ms: float
    refusal_p99_ms: float


# ---- in the process of the engine ----


async def without_http(loop: AsyncEngineLoop, streams: int, n_new: int) -> Side:
    """Run the requests in the event loop."""
    first = [await _one(loop, 1) for _ in range(SINGLES)]
    begin, used = time.perf_counter(), time.thread_time()
    await asyncio.gather(*(_one(loop, n_new) for _ in range(streams)))
    return Side(time.perf_counter() - begin, time.thread_time() - used, first)


async def _one(loop: AsyncEngineLoop, n_new: int) -> float:
    """Run one request; return the seconds to its first token."""
    begin, first = time.perf_counter(), 0.0
    params = SamplingParams(max_tokens=n_new, temperature=0.0, ignore_eos=True)
    processor = loop.engine.processor
    prepare = partial(processor.prepare, PROMPT, params, asked=processor.ask(params))
    async with aclosing(loop.pieces(lambda put: prepare(on_piece=put), params)) as pieces:
        async for _ in pieces:
            first = first or time.perf_counter() - begin
    return first


async def over_http(port: int, streams: int, n_new: int) -> tuple[Side, dict[str, float]]:
    """Let the clients run the requests, in a process of their own."""
    command = [sys.executable, __file__, "--clients", str(port), str(streams), str(n_new)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    if child.stdin is None or child.stdout is None:
        raise ScriptError("the clients have no pipes")
    first = json.loads(await child.stdout.readline())
    used = time.thread_time()
    child.stdin.write(b"go\n")
    found = json.loads(await child.stdout.readline())
    side = Side(found["seconds"], time.thread_time() - used, first)
    child.stdin.write(b"go\n")
    probes = json.loads(await child.stdout.readline())
    await child.wait()
    return side, probes


async def measure(given: argparse.Namespace) -> list[Figures]:
    """Return the figures of each round."""
    seqs = given.streams
    config = EngineConfig(model=given.model, n_ctx=2048, max_num_seqs=seqs, n_threads=given.threads)
    loop = await open_engine_loop(config, Event())
    serving = Serving(loop, config, Settings(max_queue=0))
    await serving.start()
    server = uvicorn.Server(_on_a_free_port(uvicorn_config(App(serving, Settings(max_queue=0)))))
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    rounds = []
    await without_http(loop, seqs, 8)  # warms up
    for _ in range(given.rounds):
        plain = await without_http(loop, seqs, given.tokens)
        http, probes = await over_http(port, seqs, given.tokens)
        n_tokens = seqs * given.tokens
        rounds.append(
            Figures(
                http_us_per_token=1e6 * (http.loop_seconds - plain.loop_seconds) / n_tokens,
                added_first_ms=1e3 * (statistics.median(http.first) - statistics.median(plain.first)),
                throughput_ratio=plain.seconds / http.seconds,
                tokens_per_second=n_tokens / http.seconds,
                health_p99_ms=1e3 * probes["health"],
                refusal_p99_ms=1e3 * probes["refusal"],
            )
        )
    server.should_exit = True
    await running
    loop.close()
    return rounds


def _on_a_free_port(config: uvicorn.Config) -> uvicorn.Config:
    config.host, config.port = "127.0.0.1", 0
    return config


# ---- the clients ----


async def clients(port: int, streams: int, n_new: int) -> None:
    """Run single requests, then all streams, then streams with probes; print a line of JSON after each."""
    first = [await _stream(port, 1) for _ in range(SINGLES)]
    print(json.dumps(first), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    begin = time.perf_counter()
    await asyncio.gather(*(_stream(port, n_new) for _ in range(streams)))
    print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    busy = [asyncio.ensure_future(_stream(port, n_new)) for _ in range(streams)]
    await asyncio.sleep(0.05)
    health, refusal = [], []
    while not any(task.done() for task in busy):
        health.append(await _probe(port, "GET", "/health", b"", b"200"))
        refusal.append(await _probe(port, "POST", "/v1/completions", b'{"prompt":"x"}', b"503"))
    await asyncio.gather(*busy)
    found = {"health": quantile(health, 0.99), "refusal": quantile([each for each in refusal if each], 0.99)}
    print(json.dumps(found), flush=True)


async def _stream(port: int, n_new: int) -> float:
    """Read one stream to its end; return the seconds to its first token."""
    fields = {"prompt": PROMPT, "max_tokens": n_new, "temperature": 0, "ignore_eos": True, "stream": True}
    begin, first, tail = time.perf_counter(), 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request("POST", "/v1/completions", json.dumps(fields).encode()))
    while data := await reader.read(1 << 16):
        tail = (tail + data)[-64:]
        if not first and b"data: " in data:
            first = time.perf_counter() - begin
        if b"[DONE]" in tail:
            break
    writer.close()
    return first


async def _probe(port: int, method: str, path: str, body: bytes, status: bytes) -> float:
    """Return the seconds to an answer; 0 if it has another status."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(method, path, body))
    line = await reader.readline()
    seconds = time.perf_counter() - begin
    writer.close()
    return seconds if status in line else 0.0


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def main() -> int:
    """Measure and print."""
    if sys.argv[1:2] == ["--clients"]:
        asyncio.run(clients(*map(int, sys.argv[2:5])))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if min(given.streams, given.tokens, given.rounds) < 1:
        raise ScriptError("--streams, --tokens and --rounds must be at least 1")
    run: Any = asyncio.run
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        print("uvloop is missing, so asyncio's own loop is measured", file=sys.stderr)
    rounds = [asdict(each) for each in run(measure(given))]
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    if given.json:
        print(json.dumps({"medians": medians, "rounds": rounds}))
    else:
        for name, value in medians.items():
            print(f"{name:20} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
