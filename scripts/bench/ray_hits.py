"""Measure the share of prompt tokens that two replicas on Ray find in their pools, beside one engine.

    pip install '.[ray,serve]'
    python scripts/bench/ray_hits.py
    python scripts/bench/ray_hits.py --prefixes 8 --held 0.6 --requests 600 --json

Requests with one of some beginnings of 512 tokens and an end of their own come in random order, four at a
time, to the demo model. Two replicas by affinity and by round robin have a pool each that holds a share of
the beginnings (--held), beside the requests that run; one server has the blocks of both. The shares are of
`cached_tokens` in the answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM
from pyvelo.demo import DEMO_MODEL
from scripts._common import ScriptError, run_main
from scripts._served import served
from scripts.bench.ray_serve import cluster

AT_ONCE = 4
N_SHARED = 512
"""Tokens of a beginning."""
N_OWN = 32
"""Tokens of the end of a prompt."""
N_CTX = 1024
PATIENCE = 120.0


def prompts(n_prefixes: int, n_requests: int) -> list[list[int]]:
    """Return the prompts as token ids, the same ones every time."""
    draw = random.Random(1)
    beginnings = [draw.choices(range(1, 200), k=N_SHARED) for _ in range(n_prefixes)]
    return [[*draw.choice(beginnings), *draw.choices(range(1, 200), k=N_OWN)] for _ in range(n_requests)]


def hit_rate(port: int, asked: list[list[int]]) -> float:
    """Return the share of the prompt tokens that were cached."""

    def ask(prompt: list[int]) -> int:
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
        with urlopen(request, timeout=PATIENCE) as answer:
            usage = json.load(answer)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(ask, asked)) / sum(map(len, asked))


def pool_bytes(n_prefixes: int, held: float) -> int:
    """Return the bytes of a replica's pool."""
    with LLM(DEMO_MODEL, n_ctx=N_CTX) as llm:
        stats = llm.stats()
    n_tokens = held * n_prefixes * N_SHARED + AT_ONCE * 2 * N_OWN
    return -(-int(n_tokens) // stats.block_size) * stats.block_bytes


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefixes", type=int, default=24)
    parser.add_argument("--held", type=float, default=0.75, help="share of the prefixes that a pool holds")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if min(given.prefixes, given.requests) < 1 or not 0 < given.held <= 1:
        raise ScriptError("--prefixes and --requests must be at least 1, --held above 0 and at most 1")
    asked, size = prompts(given.prefixes, given.requests), pool_bytes(given.prefixes, given.held)
    options = ["--threads", "1", "--ctx", str(N_CTX), "--kv-cache-bytes"]
    rates = {}
    with served(str(DEMO_MODEL), *options, str(2 * size)) as server:
        rates["one engine"] = hit_rate(server.port, asked)
    for policy in ("affinity", "round-robin"):
        with cluster(str(DEMO_MODEL), *options, str(size), "--policy", policy) as replicas:
            rates[policy] = hit_rate(replicas.ports[0], asked)
    if given.json:
        print(json.dumps(rates))
        return 0
    for name, rate in rates.items():
        print(f"{name:12} {100 * rate:5.1f} %  {rate / rates['one engine']:5.2f} of one engine")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
