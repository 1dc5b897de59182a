"""Run engines whose layers are on the GPU; gpu/check.py runs it in a process that the GPU may crash.

    gpu/_child.py devices | tokens MODEL | pressure MODEL

Prints JSON, an object on a line. The CPU's answers are expected, except for ties.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, SamplingParams
from pyvelo.models.gguf_parts import scan_model
from pyvelo.native import Model, devices

ENGINE: dict[str, Any] = {"n_ctx": 512, "max_num_seqs": 8, "max_batch_tokens": 128}
PROMPTS = [(7, 0), (90, 1), (33, 2), (61, 0), (18, 1), (140, 2), (45, 0), (64, 1)]
"""Tokens of a prompt, and its tenant."""
TOKENS = 96
TIES = {"f32": 0.07}
TIE = 0.25
"""Nats, by the type of most weights, and of others. Upstream rounds floats to TF32 for 4 to 16 rows."""


def prompts(n_vocab: int) -> list[list[int]]:
    """Draw the prompts; the prompts of a tenant share a prefix, so that blocks are shared and copied."""
    draw = random.Random(7)
    starts = [[draw.randrange(n_vocab) for _ in range(200)] for _ in range(3)]
    return [
        starts[tenant][: n // 2] + [draw.randrange(n_vocab) for _ in range(n - n // 2)]
        for n, tenant in PROMPTS
    ]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, cache_salt=str(tenant))
        for _, tenant in PROMPTS
    ]


@dataclass(frozen=True)
class Expected:
    """Answer of the CPU to the request alone, and the likely tokens at each position."""

    token_ids: tuple[int, ...]
    likely: tuple[dict[int, float], ...]
    """Logprobs of the likeliest tokens."""


def alone(path: str) -> tuple[list[Expected], int]:
    """Return the CPU's answers, and the number of layers of the model."""
    with LLM(path, deterministic=True, prefix_cache=False, **ENGINE) as llm:
        answers = []
        for text, param in zip(prompts(llm.vocab.n_tokens), params(), strict=True):
            output = llm.generate([text], [replace(param, logprobs=20)])[0].outputs[0]
            likely = tuple(dict(token.top) for token in output.logprobs or ())
            answers.append(Expected(tuple(output.token_ids), likely))
        return answers, llm.info.n_layer


def compare(expected: Sequence[Expected], found: Sequence[Sequence[int]], tie: float) -> dict[str, Any]:
    """Return the answers that are `wrong`, and the answers that `parted` at a tie.

    A tie is two tokens whose probabilities differ by no more than rounding. The answers are equal up to
    there; after it they continue different texts and are not compared. `margin` is the difference of the
    logprobs, None if the other token is not among the likely ones.
    """
    wrong, parted = [], []
    for number, (answer, tokens) in enumerate(zip(expected, found, strict=True)):
        pairs = enumerate(zip(answer.token_ids, tokens, strict=False))
        place = next((i for i, (mine, theirs) in pairs if mine != theirs), None)
        if place is None:
            if len(answer.token_ids) != len(tokens):
                wrong.append(number)
            continue
        likely = answer.likely[place]
        other = likely.get(tokens[place])
        margin = None if other is None else likely[answer.token_ids[place]] - other
        parted.append({"answer": number, "token": place, "margin": margin})
        if margin is None or margin > tie:
            wrong.append(number)
    return {"wrong": wrong, "parted": parted}


def tie_of(path: str) -> float:
    """Return how close two tokens' logprobs must be.

    Floats are multiplied nearly alike on all devices, quantized numbers are not.
    """
    return TIES.get(next(iter(scan_model(path).quantization), ""), TIE)


def answers_of(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts(llm.vocab.n_tokens), params())]


def half(n_layers: int) -> int:
    """Return `n_gpu_layers` of half of the layers; the output layer comes first."""
    return n_layers // 2 + 1


def tokens(path: str) -> dict[str, Any]:
    """Return the differing answers for no layers on the GPU, half of them and all."""
    (expected, n_layers), tie = alone(path), tie_of(path)
    found = []
    for n in (0, half(n_layers), -1):
        with LLM(path, n_gpu_layers=n, **ENGINE) as llm:
            verdict = compare(expected, answers_of(llm), tie)
            memory = [asdict(part) for part in llm._engine.context.memory]
            found.append({"n_gpu_layers": n, **verdict, "memory": memory})
    return {"answers": len(expected), "tie": tie, "runs": found}


def pressure(path: str) -> dict[str, Any]:
    """Compare the answers in a pool that is too small, with NaN in free blocks, swap and recomputation."""
    (expected, n_layers), tie = alone(path), tie_of(path)
    os.environ["VELO_DEBUG"] = "1"
    with Model(path, deterministic=True) as model:
        layers = model.layers
    token_bytes = sum(4 * layer.n_head_kv * layer.head_dim_k for layer in layers)
    found = []
    for n in (half(n_layers), -1):
        for swap_bytes in (0, 64 << 20):
            with LLM(
                path, n_gpu_layers=n, kv_cache_bytes=512 * token_bytes, swap_bytes=swap_bytes, **ENGINE
            ) as llm:
                verdict = compare(expected, answers_of(llm), tie)
                llm._engine.core.manager.audit()
                stats = llm.stats()
                run = {"n_gpu_layers": n, "swap_bytes": swap_bytes, **verdict}
                found.append(run | {"preemptions": stats.preemptions, "swaps": stats.swaps})
    return {"answers": len(expected), "tie": tie, "runs": found}


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "devices":
        for device in devices():
            print(json.dumps(asdict(device)))
        return 0
    commands = {"tokens": tokens, "pressure": pressure}
    print(json.dumps(commands[what](rest[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
