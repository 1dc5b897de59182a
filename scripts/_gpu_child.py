"""Run by gpu_check.py in a process of its own, where a GPU may crash it: engines whose layers are on the GPU.

    _gpu_child.py devices | tokens MODEL | pressure MODEL

It prints JSON, an object on a line. What is expected are the answers of the CPU alone.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import asdict
from typing import Any

from pyvelo import LLM, SamplingParams
from pyvelo.native import Model, devices

ENGINE: dict[str, Any] = {"n_ctx": 512, "max_num_seqs": 8, "max_batch_tokens": 128}
PROMPTS = [(7, 0), (90, 1), (33, 2), (61, 0), (18, 1), (140, 2), (45, 0), (64, 1)]
"""Tokens of a prompt, and its tenant."""
TOKENS = 96


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


def alone(path: str) -> tuple[list[list[int]], int]:
    """Each answer as the CPU gives it to nobody else, and how many layers the model has."""
    with LLM(path, deterministic=True, prefix_cache=False, **ENGINE) as llm:
        texts = prompts(llm.vocab.n_tokens)
        answers = [
            list(llm.generate([text], [param])[0].token_ids)
            for text, param in zip(texts, params(), strict=True)
        ]
        return answers, llm.info.n_layer


def tokens(path: str) -> dict[str, Any]:
    """Which answers differ for no layers on the GPU, half of them and all."""
    expected, n_layers = alone(path)
    found = []
    for n in (0, (n_layers + 1) // 2, -1):
        with LLM(path, n_gpu_layers=n, **ENGINE) as llm:
            outputs = llm.generate(prompts(llm.vocab.n_tokens), params())
            wrong = [i for i, output in enumerate(outputs) if list(output.token_ids) != expected[i]]
            memory = [asdict(part) for part in llm._engine.context.memory]
            found.append({"n_gpu_layers": n, "wrong": wrong, "memory": memory})
    return {"answers": len(expected), "runs": found}


def pressure(path: str) -> dict[str, Any]:
    """The same in a pool that is too small, with what is free full of NaN, swapped and computed again."""
    expected, n_layers = alone(path)
    os.environ["VELO_DEBUG"] = "1"
    with Model(path, deterministic=True) as model:
        layers = model.layers
    token_bytes = sum(4 * layer.n_head_kv * layer.head_dim_k for layer in layers)
    found = []
    for n in ((n_layers + 1) // 2, -1):
        for swap_bytes in (0, 64 << 20):
            with LLM(
                path, n_gpu_layers=n, kv_cache_bytes=512 * token_bytes, swap_bytes=swap_bytes, **ENGINE
            ) as llm:
                outputs = llm.generate(prompts(llm.vocab.n_tokens), params())
                wrong = [i for i, output in enumerate(outputs) if list(output.token_ids) != expected[i]]
                llm._engine.core.manager.audit()
                stats = llm.stats()
                run = {"n_gpu_layers": n, "swap_bytes": swap_bytes, "wrong": wrong}
                found.append(run | {"preemptions": stats.preemptions, "swaps": stats.swaps})
    return {"answers": len(expected), "runs": found}


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
