"""Measure what HTTP adds to the engine: processor time of a token, time to the first token, throughput.

    python scripts/bench/server.py
    python scripts/bench/server.py model.gguf --streams 16 --tokens 128 --rounds 5 --json

The engine, the server and its event loop run in this process; the clients run in another one and talk to it
over loopback. In each round the same requests run in the event loop without HTTP, and over HTTP, in turns:

- us a token: processor time of the event loop's thread for each streamed token, over HTTP less without it;
  the floor of it, of an application on the same HTTP server that only writes the same bytes after each step,
  while the engine computes answers that are not sent; and our own share, which is the difference.
- first token: time of one request alone with a short prompt, over HTTP less without it: the median of pairs,
  one right after the other.
- step: 99 % of the steps that only decode take less Python than this, outside the C calls, without HTTP,
  over HTTP, and beside the application of the floor. More threads than cores wait for each other, so a busy
  machine shows here.
- throughput: tokens per second of all streams over HTTP, over that without HTTP; and its limit here, which is
  the share of the engine's cores that HTTP and the clients do not take.
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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
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
from pyvelo.memory.cores import find_cores
from pyvelo.sampling import SamplingParams
from pyvelo.server.app import App
from pyvelo.server.run import uvicorn_config
from pyvelo.server.serving import Serving
from pyvelo.server.settings import Settings
from scripts._common import ScriptError, run_main
from scripts.bench._floor import Floor, StepClock, recorded
from scripts.bench._serving import quantile

N_CTX = 2048
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
SINGLES = 30
"""Requests alone, for the time to the first token."""


@dataclass
class Side:
    """One measurement: seconds of all streams, of the event loop's thread, of steps.

    client_seconds: processor time of the clients.
    """

    seconds: float
    loop_seconds: float
    steps: list[float]
    client_seconds: float = 0.0


@dataclass
class Figures:
    """Medians of the rounds."""

    http_us_per_token: float
    floor_us_per_token: float
    own_us_per_token: float
    added_first_ms: float
    step_python_p99_ms: float
    http_step_python_p99_ms: float
    floor_step_python_p99_ms: float
    throughput_ratio: float
    throughput_limit: float
    tokens_per_second: float
    health_p99_ms: float
    refusal_p99_ms: float


# ---- in the process of the engine ----


async def without_http(loop: AsyncEngineLoop, clock: StepClock, streams: int, n_new: int) -> Side:
    """Run the requests in the event loop."""
    clock.taken()
    begin, used = time.perf_counter(), time.thread_time()
    await asyncio.gather(*(_one(loop, n_new) for _ in range(streams)))
    return Side(time.perf_counter() - begin, time.thread_time() - used, clock.taken())


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


class Clients:
    """Process of the clients of a server; `run` is one of its phases."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        if child.stdin is None or child.stdout is None:
            raise ScriptError("the clients have no pipes")
        self._to, self._of = child.stdin, child.stdout

    async def run(self, phase: str) -> Any:
        """Return the result of a phase of `clients`."""
        self._to.write(f"{phase}\n".encode())
        return json.loads(await self._of.readline())


@asynccontextmanager
async def served_to_clients(app: Any, streams: int, n_new: int) -> AsyncIterator[Clients]:
    """Serve an application to clients in a process of their own within a block."""
    config = uvicorn_config(app)
    config.host, config.port = "127.0.0.1", 0
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    command = [sys.executable, __file__, "--clients", str(port), str(streams), str(n_new)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield Clients(child)
    finally:
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()
        server.should_exit = True
        await running


async def over_http(clients: Clients, clock: StepClock) -> tuple[Side, dict[str, float]]:
    """Let the clients run the requests; return also the slowest answers of probes."""
    clock.taken()
    used = time.thread_time()
    seconds, taken = await clients.run("streams")
    side = Side(seconds, time.thread_time() - used, clock.taken(), taken)
    return side, await clients.run("probes")


async def added_first(loop: AsyncEngineLoop, clients: Clients) -> float:
    """Return the seconds that HTTP adds to the first token of a request alone."""
    added: list[float] = []
    for _ in range(SINGLES):
        plain = await _one(loop, 1)
        added.append(await clients.run("first") - plain)
    return statistics.median(added)


async def floor(
    loop: AsyncEngineLoop, clock: StepClock, messages: list[dict[str, Any]], streams: int
) -> tuple[float, list[float]]:
    """Return the processor time of the event loop's thread when it only writes the messages, and the steps.

    Each step of the engine writes one message of each stream. The engine computes as many other sequences
    meanwhile, so that its weights pass through the caches, but their tokens are not read.
    """
    app = Floor(messages)
    async with served_to_clients(app, streams, len(messages)) as clients:
        clock.after_step = app.beat
        others = asyncio.create_task(_unread(loop, streams))
        clock.taken()
        used = time.thread_time()
        await clients.run("streams")
        used, steps = time.thread_time() - used, clock.taken()
        clock.after_step = None
        others.cancel()
        await asyncio.wait([others])
        return used, steps


async def _unread(loop: AsyncEngineLoop, streams: int) -> None:
    """Run requests without pieces, until cancelled."""
    processor = loop.engine.processor
    params = SamplingParams(max_tokens=N_CTX - len(PROMPT), temperature=0.0, ignore_eos=True)
    while True:
        await loop.run(processor.prepare_all([PROMPT] * streams, processor.ask_all(streams, params, None)))


async def measure(given: argparse.Namespace) -> list[Figures]:
    """Return the figures of each round."""
    seqs, n_new = given.streams, given.tokens
    config = EngineConfig(model=given.model, n_ctx=N_CTX, max_num_seqs=seqs, n_threads=given.threads)
    loop = await open_engine_loop(config, Event())
    serving = Serving(loop, config, Settings(max_queue=0))
    await serving.start()
    app, clock = App(serving, Settings(max_queue=0)), StepClock(loop.engine)
    rounds, n_cores = [], given.threads or find_cores().threads
    await without_http(loop, clock, seqs, 8)  # warms up
    messages = await recorded(app, "/v1/completions", fields_of(n_new))
    for _ in range(given.rounds):
        plain = await without_http(loop, clock, seqs, n_new)
        async with served_to_clients(app, seqs, n_new) as clients:
            first = await added_first(loop, clients)
            http, probes = await over_http(clients, clock)
        least = await floor(loop, clock, messages, seqs)
        rounds.append(figures(plain, http, least, seqs * n_new, {**probes, "first": first}, n_cores))
    await app.drain(0)
    loop.close()
    return rounds


def figures(
    plain: Side,
    http: Side,
    least: tuple[float, list[float]],
    n_tokens: int,
    latencies: dict[str, float],
    n_cores: int,
) -> Figures:
    """Return the figures of a round of `n_tokens` tokens; n_cores: of the engine."""
    added = http.loop_seconds - plain.loop_seconds
    return Figures(
        http_us_per_token=1e6 * added / n_tokens,
        floor_us_per_token=1e6 * least[0] / n_tokens,
        own_us_per_token=1e6 * (added - least[0]) / n_tokens,
        added_first_ms=1e3 * latencies["first"],
        step_python_p99_ms=1e3 * quantile(plain.steps, 0.99),
        http_step_python_p99_ms=1e3 * quantile(http.steps, 0.99),
        floor_step_python_p99_ms=1e3 * quantile(least[1], 0.99),
        throughput_ratio=plain.seconds / http.seconds,
        throughput_limit=1 - (added + http.client_seconds) / (n_cores * http.seconds),
        tokens_per_second=n_tokens / http.seconds,
        health_p99_ms=1e3 * latencies["health"],
        refusal_p99_ms=1e3 * latencies["refusal"],
    )


# ---- the clients ----


async def clients(port: int, streams: int, n_new: int) -> None:
    """Run the phases that the standard input names; print a line of JSON after each."""

    async def first() -> float:
        return await _stream(port, 1)

    async def all_streams() -> tuple[float, float]:
        begin, used = time.perf_counter(), time.process_time()
        await asyncio.gather(*(_stream(port, n_new) for _ in range(streams)))
        return time.perf_counter() - begin, time.process_time() - used

    async def probes() -> dict[str, float]:
        busy = [asyncio.ensure_future(_stream(port, n_new)) for _ in range(streams)]
        await asyncio.sleep(0.05)
        health, refusal = [], []
        while not any(task.done() for task in busy):
            health.append(await _probe(port, "GET", "/health", b"", b"200"))
            refusal.append(await _probe(port, "POST", "/v1/completions", b'{"prompt":"x"}', b"503"))
        await asyncio.gather(*busy)
        refused = [each for each in refusal if each]
        return {"health": quantile(health, 0.99), "refusal": quantile(refused, 0.99)}

    phases: dict[str, Callable[[], Awaitable[Any]]] = {
        "first": first,
        "streams": all_streams,
        "probes": probes,
    }
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        print(json.dumps(await phases[line]()), flush=True)


def fields_of(n_new: int) -> dict[str, Any]:
    """Return the body of a request."""
    return {"prompt": PROMPT, "max_tokens": n_new, "temperature": 0, "ignore_eos": True, "stream": True}


async def _stream(port: int, n_new: int) -> float:
    """Read one stream to its end; return the seconds to its first token."""
    begin, first, tail = time.perf_counter(), 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request("POST", "/v1/completions", json.dumps(fields_of(n_new)).encode()))
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
