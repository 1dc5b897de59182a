"""Damage small models in many ways, then load and run them.

    python scripts/fuzz/model_files.py --count 5000
    python scripts/fuzz/model_files.py --seed 7 --jobs 2 --save findings
    python scripts/fuzz/model_files.py --seed 7 --replay 1234        one mutant, in this process
    python scripts/fuzz/model_files.py --bytes 1234 --seed 7 > bad.gguf

Each mutant must either be refused with one of PyVelo's errors, or run for a token or embed a text. Workers
are forked from one process that has loaded the libraries, and are used until they die. A finding is a worker
that dies by a signal, takes longer than --limit seconds, needs more than --memory MiB, or raises another
exception. It is printed with the seed and the number of its mutant; --save keeps its file. --first resumes a
run that was stopped.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, SamplingParams
from pyvelo.errors import InternalError, OutOfMemory, VeloError
from scripts.fuzz._damage import mutant
from scripts.models import _shapes
from scripts.models.make import write_model

SMALL = _shapes.Shape(embd=64, ffn=64, heads=2, kv_heads=1, head_dim=32, ctx=256)
OTHERWISE: dict[str, dict[str, Any]] = {
    **{arch: {"experts": 4} for arch in _shapes.NEED_EXPERTS},
    "t5encoder": {"kv_heads": 2},
}
PROMPT = "Once upon a time, 1234 f\u00fcchse\n\n  \u4f60\u597d <|x|> it's \U0001f98a"
BAD = ("died", "hung", "memory", "escaped", "internal")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a mutant: "ran", "refused", or one of BAD."""

    index: int
    what: str
    kind: str
    message: str


def make_bases(folder: Path, names: list[str]) -> list[Path]:
    """Write a small model of each architecture in q8_0; llama in f32 too, wide enough for the K types."""
    shapes = [
        (name, replace(SMALL, arch=name, **OTHERWISE.get(name, {})), type_name)
        for name in names
        for type_name in (("q8_0", "f32") if name == "llama" else ("q8_0",))
    ]
    shapes.append(("wide", replace(SMALL, embd=256, ffn=256, layers=1), "q8_0"))
    bases = []
    for name, shape, type_name in shapes:
        path = folder / f"{name}-{type_name}.gguf"
        write_model(shape, path, type_name=type_name)
        bases.append(path)
    return bases


def attempt(path: Path, index: int) -> tuple[str, str]:
    """Load the file and generate a token, or embed a text; return a kind and a message."""
    # with our sizes, or with the sizes that the file suggests
    sizes = {"n_ctx": 128, "kv_cache_bytes": 4 << 20, "max_num_seqs": 1} if index % 8 else {}
    options: dict[str, Any] = {"deterministic": index % 2 == 0, "n_threads": 1 + index % 4 // 3, **sizes}
    try:
        with LLM(path, max_batch_tokens=32, **options) as llm:
            if not llm.info.is_encoder:
                llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0))
            if llm.info.is_encoder or index % 3 == 0:
                llm.embed(PROMPT, pooling="mean")
        return "ran", ""
    except OutOfMemory as error:
        return "memory", str(error)
    except InternalError as error:
        return "internal", str(error)
    except VeloError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "escaped", f"{type(error).__name__}: {error}"


def work(pipe: Connection, bases: list[Path], seed: int, memory: int, stderr: str) -> None:
    """Answer the numbers that come through the pipe until it is closed; runs in a worker."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory << 20, memory << 20))
    path = Path(stderr).with_suffix(".gguf")
    while True:
        try:
            index = pipe.recv()
        except EOFError:
            return
        what, data = mutant(bases, seed, index)
        path.write_bytes(data)
        os.ftruncate(2, 0)
        pipe.send((what, None))
        kind, message = attempt(path, index)
        pipe.send((kind, message.replace(str(path), "FILE")))


@dataclass
class Worker:
    """Forked process and the mutant that it runs."""

    process: BaseProcess
    pipe: Connection
    stderr: Path
    index: int = -1
    what: str = ""
    since: float = 0.0


class Pool:
    """Workers that are replaced when they die."""

    def __init__(self, args: argparse.Namespace, folder: Path, bases: list[Path]) -> None:
        self.args = args
        self.folder = folder
        self.bases = bases
        self.context = multiprocessing.get_context("fork")
        self.made = 0

    def start(self) -> Worker:
        ours, theirs = self.context.Pipe()
        self.made += 1
        stderr = self.folder / f"worker-{self.made}.log"
        arguments = (theirs, self.bases, self.args.seed, self.args.memory, str(stderr))
        process = self.context.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, stderr)

    def end(self, worker: Worker) -> int:
        """Return the exit code of a worker, negative for a signal."""
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        return worker.process.exitcode or 0


def outcomes(args: argparse.Namespace, folder: Path, bases: list[Path]) -> Iterator[Outcome]:
    """Run mutants `first` to `first + count` and yield their outcomes."""
    pool = Pool(args, folder, bases)
    todo = iter(range(args.first, args.first + args.count))
    workers = [worker for _ in range(args.jobs) if _give(worker := pool.start(), todo)]
    while workers:
        ready = wait([worker.pipe for worker in workers], timeout=0.5)
        for worker in list(workers):
            done = _look(pool, worker, worker.pipe in ready, args.limit)
            if done is None:
                continue
            yield done
            if done.kind in ("died", "hung"):
                workers.remove(worker)
                worker = pool.start()
                workers.append(worker)
            if not _give(worker, todo):
                workers.remove(worker)
                pool.end(worker)


def _give(worker: Worker, todo: Iterator[int]) -> bool:
    index = next(todo, None)
    if index is None:
        return False
    worker.index, worker.what, worker.since = index, "", time.monotonic()
    worker.pipe.send(index)
    return True


def _look(pool: Pool, worker: Worker, ready: bool, limit: float) -> Outcome | None:
    """Return the outcome of a worker's mutant, None while it is not known."""
    if not ready:
        if time.monotonic() - worker.since < limit:
            return None
        if worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGABRT)  # faulthandler prints its stack
        worker.process.join(5)
        pool.end(worker)
        return Outcome(worker.index, worker.what, "hung", _last_words(worker))
    try:
        kind, message = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        code = pool.end(worker)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Outcome(worker.index, worker.what, "died", f"{name}: {_last_words(worker)}")
    if message is None:
        worker.what = kind
        return None
    return Outcome(worker.index, worker.what, kind, message)


def _last_words(worker: Worker) -> str:
    text = worker.stderr.read_text(errors="replace")
    return " | ".join(line.strip() for line in text.splitlines()[:12])


def report(args: argparse.Namespace, folder: Path, bases: list[Path]) -> int:
    """Run, print findings as they come and the counts at the end; return the number of findings."""
    counts: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    for outcome in outcomes(args, folder, bases):
        counts[outcome.kind] += 1
        if args.verbose or outcome.kind in BAD:
            print(f"{outcome.index}: {outcome.kind} [{outcome.what}] {outcome.message}", flush=True)
        if outcome.kind in BAD and args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            name = f"{outcome.kind}-{args.seed}-{outcome.index}.gguf"
            (args.save / name).write_bytes(mutant(bases, args.seed, outcome.index)[1])
    found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(
        f"{sum(counts.values())} mutants of seed {args.seed} in {time.monotonic() - started:.0f} s: {found}"
    )
    return sum(counts[kind] for kind in BAD)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one mutant")
    parser.add_argument(
        "--memory", type=int, default=8192, help="MiB of address space for a worker; 0: no limit"
    )
    parser.add_argument("--arch", action="append", choices=_shapes.ARCHS, help="default: all of them")
    parser.add_argument("--models", type=Path, help="a folder of GGUFs to damage instead of our own")
    parser.add_argument("--save", type=Path, help="a folder for the files of findings")
    parser.add_argument("--replay", type=int, metavar="INDEX", help="run one mutant in this process")
    parser.add_argument("--bytes", type=int, metavar="INDEX", help="write one mutant to standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every outcome")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.models:
            bases = sorted(args.models.glob("*.gguf"))
        else:
            bases = make_bases(folder, args.arch or list(_shapes.ARCHS))
        index = args.bytes if args.bytes is not None else args.replay
        if index is None:
            return 1 if report(args, folder, bases) else 0
        what, data = mutant(bases, args.seed, index)
        if args.bytes is not None:
            sys.stdout.buffer.write(data)
            return 0
        path = folder / "mutant.gguf"
        path.write_bytes(data)
        print(what, flush=True)
        print(*attempt(path, index), sep=": ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
