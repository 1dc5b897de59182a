"""Start the stock llama-server and query it over loopback."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts._common import ScriptError
from scripts.bench._http import HOST, events, free_port
from scripts.bench._serving import Job, Refused

__all__ = ["ServerSettings", "ask", "running"]

PATIENCE = 300.0
"""Seconds to wait until a model is loaded."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server of `slots` sequences; `context` is in tokens over all slots, `batch` of a step."""

    program: Path
    model: Path
    kv_type: str
    context: int
    slots: int
    unified: bool
    threads: int
    batch: int
    connections: int
    gpu: bool = False
    checkpoints: bool = False
    """Keep the prompts of a slot, and checkpoints of their states, as by default."""


def command(settings: ServerSettings, port: int) -> list[str]:
    """Return the command line: continuous batching; without checkpoints no prompt cache either."""
    threads, batch = str(settings.threads), str(settings.batch)
    arguments = ["-m", str(settings.model), "--host", HOST, "--port", str(port)]
    arguments += ["-c", str(settings.context), "-np", str(settings.slots), "-cb"]
    arguments += ["--kv-unified" if settings.unified else "--no-kv-unified"]
    arguments += ["-t", threads, "-tb", threads, "-b", batch, "-ub", batch, "-fa", "on"]
    arguments += ["-ngl", "all" if settings.gpu else "0"]
    arguments += ["-ctk", settings.kv_type, "-ctv", settings.kv_type]
    if not settings.checkpoints:
        arguments += ["--cache-ram", "0", "-sps", "0"]
    arguments += ["--fit", "off", "--no-ui", "--no-jinja"]
    # a connection that waits for a slot holds a thread
    return [str(settings.program), *arguments, "--threads-http", str(settings.connections + 8)]


@contextmanager
def running(settings: ServerSettings) -> Iterator[int]:
    """Start a server and yield its port once it is ready; stop it at the end of the block.

    Raises: ScriptError with the last line of its log if it does not start.
    """
    if not settings.program.is_file():
        raise ScriptError(f"there is no {settings.program}: scripts/build/stock.py --server builds one")
    port = free_port()
    with tempfile.TemporaryFile() as log:
        # its libraries lie beside it
        folders = [str(settings.program.parent), os.environ.get("LD_LIBRARY_PATH")]
        beside = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}
        server = subprocess.Popen(command(settings, port), stdout=log, stderr=subprocess.STDOUT, env=beside)
        try:
            end = time.monotonic() + PATIENCE
            while not _is_ready(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    lines = [
                        line for line in log.read().decode(errors="replace").splitlines() if line.strip()
                    ]
                    raise ScriptError(f"llama-server did not start: {lines[-1] if lines else 'no output'}")
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


async def ask(
    port: int, job: Job, came: Callable[[int], None], *, cached: bool = False, tokens: list[int] | None = None
) -> None:
    """Stream the answer to a job, greedy and of full length; raise Refused if the server ends it early.

    Args:
        cached: the server may go on where an earlier prompt or a checkpoint of it ended.
        tokens: gets the tokens of the answer.
    """
    body = {
        "prompt": job.prompt,
        "n_predict": job.n_new,
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": cached,
        "return_tokens": tokens is not None,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "timings_per_token": True,  # counts tokens: an incomplete character is sent with the next one
    }
    n_seen = 0
    async for event in events(port, "/completion", body):
        if "error" in event:
            raise Refused(str(event["error"].get("message", event["error"])))
        if tokens is not None:
            tokens += event["tokens"]
        n_now = int(event["timings"]["predicted_n"])
        came(n_now - n_seen)
        n_seen = n_now
    if n_seen != job.n_new:
        raise Refused(f"{n_seen} tokens of {job.n_new} came")


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
