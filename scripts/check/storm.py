"""Storm `pyvelo serve` with clients that behave badly, and check that nothing is left behind.

    python scripts/check/storm.py
    python scripts/check/storm.py --disconnects 10000 --streams 1000 --seed 7

The server runs the demo model in a process of its own. At once there are:

- disconnects: requests whose client goes at a random moment: in the body, the queue, prefill or decode;
- streams: many streams that are read to their end, more than run at once;
- slow readers, which stop to read; half-open connections, which send a part of a head; bodies that trickle;
- overload: requests beyond the queue, which must be refused with Retry-After;
- probes of /health.

Afterwards no block is used, no request is open, the memory of the server is what it was after the warm-up, up
to --slack MiB, and 99 % of the probes were answered within --health ms. The exit status is 0 if all of this
holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts._served import served
from scripts.bench._serving import quantile

OPTIONS = ("--ctx", "512", "--kv-cache-bytes", "32M", "--max-num-seqs", "16")
PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass
class Storm:
    """Clients of one server, and what they saw."""

    host: str
    port: int
    draw: random.Random
    seen: Counter[str] = field(default_factory=Counter)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection(self.host, self.port)

    def body(self, n_new: int, stream: bool) -> tuple[str, bytes]:
        """Return a path and the body of a request."""
        path, words = self.draw.choice(PATHS), self.draw.randrange(1, 120)
        text = " ".join(str(self.draw.randrange(100)) for _ in range(words))
        fields: dict[str, object] = {"max_tokens": n_new, "stream": stream, "ignore_eos": True}
        fields |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        return path, json.dumps(fields).encode()

    async def ask(self, body: bytes, path: str, part: float = 1.0) -> asyncio.StreamReader:
        """Send a request, or the first part of it; the connection closes when the task ends."""
        reader, writer = await self.connect()
        data = head(path, len(body)) + body
        writer.write(data[: max(1, int(len(data) * part))])
        task = asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda _: writer.transport.abort())
        return reader

    # ---- clients ----

    async def disconnect(self) -> None:
        """Go at a random moment."""
        path, body = self.body(self.draw.randrange(1, 64), self.draw.random() < 0.7)
        whole = self.draw.random() < 0.8
        reader = await self.ask(body, path, 1.0 if whole else self.draw.random())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(self.draw.choice((1, 300, 3000))), self.draw.random() * 0.5)
        self.seen["disconnects"] += 1

    async def stream(self) -> None:
        """Read a stream to its end; ask again when refused."""
        path, body = self.body(8, True)
        while True:
            reader = await self.ask(body, path)
            answer = await reader.read()
            if b" 503 " in answer[:16]:
                found = re.search(rb"retry-after: (\d+)", answer)
                self.seen["refused"] += 1
                if found is None:
                    self.seen["refused without Retry-After"] += 1
                await asyncio.sleep(self.draw.random())
                continue
            self.seen["streams" if answer.rstrip().endswith((b"[DONE]", b"0")) else "broken streams"] += 1
            return

    async def slow_reader(self) -> None:
        """Begin a long answer, and read nothing of it for a while."""
        path, body = self.body(400, True)
        await self.ask(body, path)
        await asyncio.sleep(3.0)
        self.seen["slow readers"] += 1

    async def half_open(self) -> None:
        """Send a part of a head."""
        _, writer = await self.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-")
        await asyncio.sleep(3.0)
        writer.transport.abort()
        self.seen["half-open"] += 1

    async def trickle(self) -> None:
        """Send a body byte by byte, not to its end."""
        _, writer = await self.connect()
        writer.write(head("/v1/completions", 5000))
        for _ in range(30):
            if writer.is_closing():  # the server has refused it
                break
            writer.write(b" ")
            await asyncio.sleep(0.1)
        writer.transport.abort()
        self.seen["trickling bodies"] += 1

    async def rage(self, disconnects: int, streams: int, others: int) -> None:
        """Let all clients run."""
        at_once = asyncio.Semaphore(200)

        async def bounded(client: Callable[[], Awaitable[None]]) -> None:
            async with at_once:
                with suppress(ConnectionError):
                    await client()

        clients: list[Callable[[], Awaitable[None]]] = [self.disconnect] * disconnects
        clients += [self.slow_reader, self.half_open, self.trickle] * others
        self.draw.shuffle(clients)
        await asyncio.gather(
            *(self.stream() for _ in range(streams)),
            *(asyncio.ensure_future(bounded(client)) for client in clients),
        )

    async def metric(self, name: str) -> float:
        """Return the sum of a metric."""
        reader, writer = await self.connect()
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M))


def head(path: str, length: int) -> bytes:
    """Return the head of a request."""
    fields = f"Host: localhost\r\nContent-Length: {length}\r\nConnection: close\r\n"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode()


def probe(host: str, port: int) -> None:
    """Ask for /health until the standard input ends.

    Print the seconds of each answer less its wait for a core, and the seconds of that wait.
    """
    seconds: list[tuple[float, float]] = []
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.wait(0.02):
        begin, idle = time.perf_counter(), seconds_without_core()
        with socket.create_connection((host, port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b""
            while data := connection.recv(4096):
                answer += data
        if b" 200 " not in answer:
            raise ScriptError(f"/health answers {answer[:80]!r}")
        own = seconds_without_core() - idle
        seconds.append((time.perf_counter() - begin - own, own))
    print(json.dumps(seconds))


def seconds_without_core() -> float:
    """Return the time that this thread was ready to run and had no core; 0 where the kernel does not tell."""
    with suppress(OSError):
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1])
    return 0.0


def resident(pid: int) -> float:
    """Return the memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


async def main_storm(given: argparse.Namespace) -> list[str]:
    """Run the storm; return what is wrong."""
    with served(*OPTIONS) as (host, port, pid):
        warm = Storm(host, port, random.Random(given.seed + 1))
        await warm.rage(given.disconnects // 5, given.streams, 5)  # as many at once
        before = resident(pid)
        storm = Storm(host, port, random.Random(given.seed))
        command = [sys.executable, __file__, "--probe", f"{host}:{port}"]
        prober = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        await storm.rage(given.disconnects, given.streams, given.others)
        probes = json.loads((await asyncio.to_thread(prober.communicate))[0])
        until = time.monotonic() + 30
        while await storm.metric("pyvelo:http_requests_open") and time.monotonic() < until:
            await asyncio.sleep(0.1)
        left = {
            "used blocks": await storm.metric('pyvelo:kv_blocks{model_name="demo",state="used"}'),
            "open requests": await storm.metric("pyvelo:http_requests_open"),
            "running requests": await storm.metric("pyvelo:num_requests_running"),
            "waiting requests": await storm.metric("pyvelo:num_requests_waiting"),
        }
        grown = resident(pid) - before
        slowest, own = (1e3 * quantile(each, 0.99) for each in zip(*probes, strict=True))
    print(", ".join(f"{n} {name}" for name, n in sorted(storm.seen.items())))
    print(
        f"{len(probes)} probes, {slowest:.1f} ms at the 99th percentile, and {own:.1f} ms without a core; "
        f"memory {before:.0f} MiB, {grown:+.1f} MiB afterwards"
    )
    wrong = [f"{n:g} {name} are left" for name, n in left.items() if n]
    wrong += [
        f"{storm.seen[name]} {name}"
        for name in storm.seen
        if name.startswith(("broken", "wrong", "refused w"))
    ]
    if storm.seen["streams"] != given.streams:
        wrong.append(f"{storm.seen['streams']} of {given.streams} streams ended")
    if grown > given.slack:
        wrong.append(f"the memory grew by {grown:.1f} MiB")
    if slowest > given.health:
        wrong.append(f"/health took {slowest:.1f} ms")
    return wrong


def main() -> int:
    """Run the storm and print what is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--disconnects", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument(
        "--others", type=int, default=50, help="slow readers, half-open ones, trickling bodies"
    )
    parser.add_argument("--slack", type=float, default=16.0, help="MiB")
    parser.add_argument("--health", type=float, default=20.0, help="ms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        host, _, port = given.probe.rpartition(":")
        probe(host, int(port))
        return 0
    begin = time.monotonic()
    wrong = asyncio.run(main_storm(given))
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{'wrong' if wrong else 'all right'} after {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
