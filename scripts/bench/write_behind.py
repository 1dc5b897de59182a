"""Measure the steps of running requests while blocks of ended ones are saved, beside steps without that.

    python scripts/bench/write_behind.py
    python scripts/bench/write_behind.py model.gguf --streams 4 --windows 20 --json

An engine first answers prompts whose blocks stay in its pool. Then some streams run, and in every other
window of time the store saves those blocks. So both kinds of windows see the same machine. The default store
is a folder that is removed at the end, and the default model is bench/engine.py's.
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
from array import array
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, KVStore, SamplingParams
from pyvelo.kv.prefix import BlockHashes
from scripts._common import run_main
from scripts.bench._runs import default_model, wait_for_store

NEVER = 1 << 30  # blocks of a sequence from which it is saved by itself


def steps_in(llm: LLM, seconds: float) -> float:
    """Return the steps of a second."""
    before, begin = llm.stats().steps, time.perf_counter()
    time.sleep(seconds)
    after, end = llm.stats().steps, time.perf_counter()
    return (after - before) / (end - begin)


def rates_of(llm: LLM, given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the steps of a second in each window, with and without saving."""
    engine: Any = llm._engine
    saves = engine.persistence._saves
    params = SamplingParams(max_tokens=1, temperature=0.0)
    draw = random.Random(0)
    prompts = [draw.choices(range(10, 250), k=given.prompt) for _ in range(given.prompts)]
    llm.generate(prompts, params)
    long = SamplingParams(max_tokens=given.tokens, temperature=0.0, ignore_eos=True)
    streams = [[10 + number, 5, 7] for number in range(given.streams)]
    running = threading.Thread(target=llm.generate, args=(streams, long), daemon=True)
    running.start()
    steps_in(llm, 1.0)
    found: dict[str, list[float]] = {"without": [], "saving": []}
    n_tokens = given.prompt - 1
    for number in range(2 * given.windows):
        kind = ("without", "saving", "saving", "without")[number % 4]
        if kind == "saving":
            for prompt in prompts:
                hashes = BlockHashes(array("i", prompt[:n_tokens]), engine.core.manager.block_size)
                saves.note(hashes, n_tokens)
            engine.persistence.wake.put(True)
        found[kind].append(steps_in(llm, given.seconds))
        saves.forget(None)
        if not running.is_alive():
            raise RuntimeError("the streams have ended: give more --tokens")
    return found


def main() -> int:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt that is saved")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=3000, help="of each stream")
    parser.add_argument("--windows", type=int, default=20, help="of each kind")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a window")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.model = given.model or default_model()
    with tempfile.TemporaryDirectory() as folder:
        store = KVStore(folder, min_blocks=NEVER)
        with LLM(given.model, kv_store=store, n_threads=given.threads, n_ctx=given.tokens + 64) as llm:
            wait_for_store(llm)
            found = rates_of(llm, given)
            n_saved = llm.stats().saved_blocks
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    # of windows that follow one another: steps become slower as their contexts grow
    pairs = zip(found["saving"], found["without"], strict=True)
    slower = 1 - statistics.median(saving / without for saving, without in pairs)
    result = {**medians, "slower": slower, "saved_blocks": n_saved}
    if given.json:
        print(json.dumps({"windows": found, "medians": result}))
        return 0
    for name, value in result.items():
        print(f"{name:14} {value:8.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
