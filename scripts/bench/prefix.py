"""Measure what shared prefixes save: times to first tokens with and without them, and memory of samples.

    python scripts/bench/prefix.py
    python scripts/bench/prefix.py model.gguf --kv-type q8_0 --json

Measures one prompt with a cached prefix; many simultaneous requests with one prefix, beside the same without
sharing; the blocks that the samples of one prompt hold; and the cost of sharing when nothing is shared. The
default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts.bench._runs import default_model, random_prompt

NEW = 16
"""Tokens of a request after the shared prefix."""


@dataclass(frozen=True)
class Result:
    """Figures `with_it` and `without`, in seconds or in blocks."""

    what: str
    with_it: float
    without: float

    @property
    def ratio(self) -> float:
        return self.without / self.with_it


def first_token(llm: Any, prompt: list[int]) -> float:
    """Return the seconds to the first token."""
    from pyvelo import SamplingParams

    start = now()
    next(llm.stream(prompt, SamplingParams(max_tokens=1, temperature=0)))
    return now() - start


def one_prompt(llm: Any, shared: int, rounds: int) -> Result:
    """Time a prompt with a cached prefix, and one without."""
    cold, warm = [], []
    for number in range(rounds):
        draw = random.Random(number)
        beginning = random_prompt(llm, shared, draw)
        cold.append(first_token(llm, [*beginning, *random_prompt(llm, NEW, draw)]))
        warm.append(first_token(llm, [*beginning, *random_prompt(llm, NEW, draw)]))
        llm.reset_prefix_cache()
    return Result(
        f"first token, {shared} + {NEW} tokens of prompt", statistics.median(warm), statistics.median(cold)
    )


def many_prompts(llm: Any, other: Any, shared: int, n: int) -> Result:
    """Time all first tokens of `n` simultaneous requests; `other` does not share."""
    from pyvelo import SamplingParams

    draw = random.Random(99)
    beginning = random_prompt(llm, shared, draw)
    prompts = [[*beginning, *random_prompt(llm, NEW, draw)] for _ in range(n)]
    times = []
    for engine in (llm, other):
        start = now()
        engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0))
        times.append(now() - start)
    return Result(f"{n} first tokens over {shared} + {NEW} tokens", *times)


def samples(llm: Any, n_prompt: int, n: int, n_new: int) -> Result:
    """Count the blocks that `n` samples of a prompt hold at most, beside `n` separate sequences."""
    from pyvelo import SamplingParams

    most = 0
    params = SamplingParams(n=n, max_tokens=n_new, temperature=1.0, seed=0, ignore_eos=True)
    for _ in llm.stream(random_prompt(llm, n_prompt, random.Random(5)), params):
        most = max(most, llm.stats().blocks_used)
    size = llm.geometry.block_size
    alone = n * -(-(n_prompt + n_new - 1) // size)
    return Result(f"blocks of {n} samples of {n_new} tokens behind {n_prompt}", most, alone)


def no_hits(llm: Any, other: Any, n: int, n_prompt: int) -> tuple[Result, float]:
    """Time the steps beyond forward passes for prompts that share nothing.

    Returns the result and the time that sharing adds, as a share of a step.
    """
    from pyvelo import SamplingParams

    draw = random.Random(7)
    prompts = [random_prompt(llm, n_prompt, draw) for _ in range(n)]
    python, whole = [], []
    for engine in (llm, other):
        before = engine.stats()
        engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
        after = engine.stats()
        if after.hit_tokens > before.hit_tokens:
            raise ScriptError("random prompts share a prefix, and must not")
        python.append(
            after.schedule_seconds + after.sample_seconds - before.schedule_seconds - before.sample_seconds
        )
        whole.append(python[-1] + after.run_seconds - before.run_seconds)
    result = Result(f"seconds beyond forward passes, {n} prompts of {n_prompt} tokens, no hits", *python)
    return result, (python[0] - python[1]) / whole[0]


def main() -> int:
    from pyvelo import LLM

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--shared", type=int, default=2048, help="tokens of the shared prefix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    settings: dict[str, Any] = {
        "kv_type": given.kv_type,
        "n_ctx": 2 * given.shared + 256,
        "kv_cache_bytes": 4 << 30,
        "n_threads": given.threads,
        "n_gpu_layers": 0,
    }
    model = given.model or default_model()
    with LLM(model, **settings) as llm, LLM(model, prefix_cache=False, **settings) as other:
        for engine in (llm, other):  # the first step reads and packs the weights
            first_token(engine, [1] * 64)
        found = [
            one_prompt(llm, given.shared, given.rounds),
            many_prompts(llm, other, given.shared // 2, 16),
            samples(llm, 2 * given.shared, 16, 32),
        ]
        unshared, share = no_hits(llm, other, 16, given.shared // 4)
        found.append(unshared)
    if given.json:
        rows = [{**asdict(result), "ratio": result.ratio} for result in found]
        print(json.dumps({"results": rows, "share_of_a_step_at_no_hits": share}, indent=2))
        return 0
    print(f"{model.name}, {given.kv_type}, {given.threads} threads\n")
    print("| | shared | not shared | ratio |")
    print("|---|---:|---:|---:|")
    for r in found:
        print(f"| {r.what} | {r.with_it:.4g} | {r.without:.4g} | {r.ratio:.1f} |")
    print(f"\nWithout a hit, sharing takes {share:.2%} of a step.")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
