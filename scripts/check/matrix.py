"""Cross shapes and features: small models of every shape run requests and sessions in every kind of engine.

    python scripts/check/matrix.py --count 2000
    python scripts/check/matrix.py --replay '{"arch": "llama", ...}'

The configurations cover every pair of values of the axes in _matrix_axes.py, again and again. In each,
requests and sessions run at once. Checked: the process survives, no block is held in the end, and answers
equal the answers of each request alone (deterministic mode), or logprobs are about as close to the truth as
the contiguous path's. A finding is printed with the JSON of its configuration for --replay, and the exit
status is 1. The package must be installed with -C cmake.define.PYVELO_BUILD_TESTS=ON.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter as now

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, run_main
from scripts.check._matrix_axes import Config, configurations

WORKER = ROOT / "scripts/check/_matrix_run.py"
LIMIT = 300.0
"""Seconds after which a configuration counts as hanging."""

COMMAND = (sys.executable, str(WORKER))


class Worker:
    """A process that runs configurations, replaced when it dies or hangs."""

    def __init__(
        self, limit: float = LIMIT, command: tuple[str, ...] = (sys.executable, str(WORKER))
    ) -> None:
        self._limit = limit
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(self, config: Config) -> list[str]:
        """Return the findings of one configuration; a process that died is one."""
        process = self._process or self._start()
        try:
            process.stdin.write(json.dumps(asdict(config)) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            line = self._lines.get(timeout=self._limit)
        except queue.Empty:
            self.close()
            return [f"no answer after {self._limit:.0f} s"]
        except OSError:
            line = ""
        if line:
            found: list[str] = json.loads(line)
            return found
        status = process.wait()
        self.close()
        return [f"ended by signal {-status}" if status < 0 else f"ended with status {status}"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._reader.join()
            with self._process:  # closes the pipes
                self._process = None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            for line in process.stdout or ():
                lines.put(line)
            lines.put("")

        self._process, self._lines = process, lines
        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        return process


def run(configs: Iterable[Config], worker: Worker) -> Iterator[tuple[Config, list[str]]]:
    """Yield every configuration with its findings."""
    try:
        for config in configs:
            yield config, worker.ask(config)
    finally:
        worker.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="configurations to skip at the start")
    parser.add_argument("--replay", help="the JSON of one configuration")
    given = parser.parse_args()
    configs = (
        [Config(**json.loads(given.replay))] if given.replay else configurations(given.count, given.seed)
    )
    start, wrong = now(), 0
    for number, (config, found) in enumerate(run(configs[given.skip :], Worker()), given.skip + 1):
        if found:
            wrong += 1
            print(f"{number}: {json.dumps(asdict(config))}", *found[:5], sep="\n    ", flush=True)
        if number % 50 == 0:
            print(f"{number} configurations, {wrong} with findings, {now() - start:.0f} s", flush=True)
    print(f"{len(configs) - given.skip} configurations, {wrong} with findings, {now() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(run_main(main))
