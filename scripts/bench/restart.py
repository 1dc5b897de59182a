"""Measure the first token of a long prompt after a restart, with its KV in a store, beside computing it.

    python scripts/bench/restart.py
    python scripts/bench/restart.py model.gguf --prompt 2048 --store valkey://localhost:6379 --rounds 3 --json

In each round an engine without a store answers the prompt, another one with an empty store answers it and
saves its blocks, and a third one finds them there. All are opened anew; the load of the model is not timed.
The default store is a folder that is removed at the end, and the default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, SamplingParams
from scripts._common import run_main
from scripts.bench._runs import default_model, wait_for_store

PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def first_token(given: argparse.Namespace, prompt: list[int], store: str | None) -> float:
    """Return the seconds to the first token in an engine of its own, whose store is ready."""
    settings = {"kv_type": given.kv_type, "n_threads": given.threads, "n_ctx": given.prompt + 64}
    with LLM(given.model, kv_store=store, **settings) as llm:
        wait_for_store(llm)
        llm.generate([1, 2, 3], PARAMS)  # packs the weights
        begin = time.perf_counter()
        stream = llm.stream(prompt, PARAMS)
        next(stream)
        seconds = time.perf_counter() - begin
        for _ in stream:
            pass
        return seconds


def main() -> int:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--store", help="folder or address of an empty store; default: a new folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.model = given.model or default_model()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            prompt = random.Random(number).choices(range(10, 250), k=given.prompt)
            store = given.store or folder
            cold, saving, warm = (first_token(given, prompt, each) for each in (None, store, store))
            rounds.append({"cold_s": cold, "saving_s": saving, "restart_s": warm, "share": warm / cold})
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    if given.json:
        print(json.dumps({"rounds": rounds, "medians": found}))
        return 0
    for name, value in found.items():
        print(f"{name:12} {value:8.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
