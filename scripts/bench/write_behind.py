"""Measure requests while blocks of ended ones are saved, beside the same requests without a store.

    python scripts/bench/write_behind.py
    python scripts/bench/write_behind.py model.gguf --store valkey://localhost:6379 --rounds 5 --json

In each round, threads answer prompts that have no common prefix, one after the other, in an engine without a
store and in one with an empty store. The default store is a folder that is removed at the end, and the
default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, SamplingParams
from scripts._common import run_main
from scripts.bench._runs import default_model


def seconds_of(given: argparse.Namespace, store: str | None, seed: int) -> tuple[float, int]:
    """Return the seconds in which all prompts are answered, and the blocks that were saved meanwhile."""
    params = SamplingParams(max_tokens=given.new_tokens, temperature=0.0, ignore_eos=True)
    settings = {"n_threads": given.threads, "n_ctx": given.prompt + given.new_tokens + 8}
    with LLM(given.model, kv_store=store, kv_cache_bytes=given.pool << 20, **settings) as llm:
        persistence = llm._engine.persistence
        while persistence is not None and not persistence.ready:
            time.sleep(0.01)
        llm.generate([1, 2, 3], params)  # packs the weights

        def answer(number: int) -> None:
            draw = random.Random(1000 * seed + number)
            for _ in range(given.requests):
                llm.generate(draw.choices(range(10, 250), k=given.prompt), params)

        threads = [threading.Thread(target=answer, args=(number,)) for number in range(given.streams)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin, llm.stats().saved_blocks


def main() -> int:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=4, help="threads")
    parser.add_argument("--requests", type=int, default=4, help="of each thread")
    parser.add_argument("--pool", type=int, default=1024, help="MiB")
    parser.add_argument("--store", help="folder or address of an empty store; default: a new folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.model = given.model or default_model()
    rounds = []
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            without, _ = seconds_of(given, None, number)
            saving, n_saved = seconds_of(given, given.store or folder, number)
        rounds.append({"without_s": without, "saving_s": saving, "ratio": saving / without, "saved": n_saved})
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    if given.json:
        print(json.dumps({"rounds": rounds, "medians": found}))
        return 0
    for name, value in found.items():
        print(f"{name:12} {value:8.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
