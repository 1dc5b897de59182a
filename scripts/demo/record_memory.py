"""Record a small run in a pool that is too small for it, for `pyvelo report` to draw.

    python scripts/models/make.py tiny tiny.gguf
    python scripts/demo/record_memory.py tiny.gguf run.trace
    pyvelo report run.trace --steps -o docs/memory.svg

Requests start one after the other: most have the same instruction as prefix, some ask for four samples, and
the pool is too small for all of them, so that some are preempted. Their starts are counted in tokens, not by
a clock, so that the picture over steps is nearly the same on every machine.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Generator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, SamplingParams, StreamPiece

N_REQUESTS = 40
EVERY = 14  # steps between two requests
POOL_TOKENS = 2048
INSTRUCTION = 200  # tokens
TOKENS = range(3, 200)  # of the vocabulary, none of them special

Stream = Generator[StreamPiece, None, None]


def start(llm: LLM, number: int, draw: random.Random, instruction: list[int]) -> Stream:
    """Start one more request: of four, three have the instruction, and one has four samples."""
    own = draw.choices(TOKENS, k=draw.randint(10, 150))
    params = SamplingParams(
        max_tokens=draw.randint(40, 220), n=4 if number % 4 == 2 else 1, ignore_eos=True, seed=number
    )
    return llm.stream(own if number % 4 == 3 else instruction + own, params)


def run(llm: LLM) -> int:
    """Start and finish all requests; return the number of their pieces."""
    draw = random.Random(0)
    instruction = draw.choices(TOKENS, k=INSTRUCTION)
    streams: list[Stream] = []
    n_started = n_pulled = n_pieces = 0
    while streams or n_started < N_REQUESTS:
        if n_started < N_REQUESTS and (not streams or n_pulled >= EVERY * n_started):
            streams.append(start(llm, n_started, draw, instruction))
            n_started += 1
            n_pieces += next(streams[-1], None) is not None  # starts it
        # waiting for the first one's next piece steps all of them
        if next(streams[0], None) is None:
            streams.pop(0)
        else:
            n_pieces += 1
        n_pulled += 1
    return n_pieces


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("trace", type=Path, help="write the recording there")
    given = parser.parse_args()
    with LLM(given.model, n_ctx=64) as llm:
        token_bytes = llm.geometry.token_bytes
    pool_bytes = POOL_TOKENS * token_bytes
    with (
        LLM(
            given.model, n_ctx=1024, n_threads=1, kv_cache_bytes=pool_bytes, swap_bytes=pool_bytes // 4
        ) as llm,
        llm.trace(given.trace),
    ):
        print(run(llm), "tokens")


if __name__ == "__main__":
    main()
