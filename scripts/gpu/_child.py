"""Run by gpu/check.py in a process of its own, where a GPU may crash it: engines whose layers are on the GPU.

    gpu/_child.py devices | tokens MODEL | pressure MODEL

It prints JSON, an object on a line. What is expected are the answers of the CPU alone, but for ties.
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
TIES = {"f32": 0.03}
TIE = 0.25
"""Nats, by the type of most weights, and of others."""


def prompts(n_vocab: int) -> list[list[int]]:
    """Those of a tenant begin alike, so that blocks are shared and copied."""
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
    """An answer as the CPU gives it to nobody else, and what else was likely at each of its tokens."""

    token_ids: tuple[int, ...]
    likely: tuple[dict[int, float], ...]
    """Logarithms of the likeliest tokens' probabilities."""


def alone(path: str) -> tuple[list[Expected], int]:
    """All answers, and how many layers the model has."""
    with LLM(path, deterministic=True, prefix_cache=False, **ENGINE) as llm:
        answers = []
        for text, param in zip(prompts(llm.vocab.n_tokens), params(), strict=True):
            output = llm.generate([text], [replace(param, logprobs=20)])[0].outputs[0]
            likely = tuple(dict(token.top) for token in output.logprobs or ())
            answers.append(Expected(tuple(output.token_ids), likely))
        return answers, llm.info.n_layer


def compare(expected: Sequence[Expected], found: Sequence[Sequence[int]], tie: float) -> dict[str, Any]:
    """Which answers are `wrong`, and which only `parted`: where two tokens are as likely but for rounding.

    Answers are equal up to there; behind it they go on from other texts, and are not compared. `margin` is by
    how much the CPU's token is likelier than the other: None, where that is not among the likely ones.
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
    """How near two tokens must be: floats are multiplied alike everywhere, quantized numbers are not."""
    return TIES.get(next(iter(scan_model(path).quantization), ""), TIE)


def answers_of(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts(llm.vocab.n_tokens), params())]


def half(n_layers: int) -> int:
    """`n_gpu_layers` of half of the layers: the output goes first."""
    return n_layers // 2 + 1


def tokens(path: str) -> dict[str, Any]:
    """Which answers differ for no layers on the GPU, half of them and all."""
    (expected, n_layers), tie = alone(path), tie_of(path)
    found = []
    for n in (0, half(n_layers), -1):
        with LLM(path, n_gpu_layers=n, **ENGINE) as llm:
            verdict = compare(expected, answers_of(llm), tie)
            memory = [asdict(part) for part in llm._engine.context.memory]
            found.append({"n_gpu_layers": n, **verdict, "memory": memory})
    return {"answers": len(expected), "tie": tie, "runs": found}


def pressure(path: str) -> dict[str, Any]:
    """The same in a pool that is too small, with what is free full of NaN, swapped and computed again."""
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
