"""Axes of the matrix of shapes and features, and configurations that cover every pair of their values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from typing import Any

__all__ = ["AXES", "SMALL", "Config", "Pair", "configurations", "covering", "pairs_of", "possible"]

MOST_SEQUENCES = 48
MOST_STEPS = 200
MOST_PRODUCTS = 5.0e8
"""Limits of one configuration. Steps are counted for each thread, which all meet after each operation.

Only the multiplications of attention count, as if nothing were shared.
"""

TOKENS_BEHIND = 30
"""Tokens of a request after the common prefix, about."""

WIDEST = 4096
WIDEST_TIED = 1024
"""Elements of the query heads, and of an embedding if the architecture ties it to them."""

AXES: dict[str, tuple[Any, ...]] = {
    "arch": (
        "llama", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "gpt-oss", "deepseek2", "lfm2", "qwen35",
        "mamba2",
    ),
    "group": (1, 2, 3, 4, 7, 8, 16, 32),
    "kv_heads": (1, 2, 4, 5),
    "head_dim": (32, 64, 80, 96, 128, 192, 256),
    "kv_type": (
        "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl",
        "q8_0/f16", "f16/q4_0", "q4_0/q8_0", "f32/iq4_nl",
    ),
    "weights": ("f32", "q8_0"),
    "block_size": (32, 64, 128, 256),
    "sequences": (1, 2, 5, 17, 24, 40),
    "prefix": (0, 31, 64, 200, 641, 900),
    "tails": ("own", "equal"),
    "n": (1, 2, 6, 24),
    "sessions": ("none", "compute", "fork"),
    "window": (0, 40, 200),
    "pool": ("roomy", "tight", "least"),
    "swap": (False, True),
    "batch_tokens": (8, 33, 64, 512),
    "batch_seqs": (1, 3, 8, 256),
    "deterministic": (True, False),
    "threads": (1, 2, 3, 4),
    "prefix_cache": (True, False),
    "draw": ("greedy", "seeded"),
    "prompt_logprobs": (False, True),
    "cancels": (False, True),
    "adapters": (0, 2),
    "audit": (False, True),
}  # fmt: skip
"""Lengths are in tokens; `tails` follow the common prefix of the prompts; `audit` sets VELO_DEBUG."""

SMALL: dict[str, Any] = {
    "arch": "llama", "group": 2, "kv_heads": 1, "head_dim": 32, "kv_type": "f16", "weights": "f32",
    "sequences": 1, "prefix": 0, "n": 1, "window": 0, "batch_tokens": 512, "batch_seqs": 8,
    "adapters": 0,
}  # fmt: skip
"""The value of each axis that rules out the fewest others."""

Pair = tuple[str, Any, str, Any]
Missing = dict[tuple[str, Any], set[tuple[str, Any]]]
"""Values of other axes that no configuration has together with the key."""


@dataclass(frozen=True)
class Config:
    """A value of each axis, and the seed of weights, tokens and draws."""

    arch: str
    group: int
    kv_heads: int
    head_dim: int
    kv_type: str
    weights: str
    block_size: int
    sequences: int
    prefix: int
    tails: str
    n: int
    sessions: str
    window: int
    pool: str
    swap: bool
    batch_tokens: int
    batch_seqs: int
    deterministic: bool
    threads: int
    prefix_cache: bool
    draw: str
    prompt_logprobs: bool
    cancels: bool
    adapters: int
    audit: bool
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def kv_types(self) -> tuple[str, str]:
        """Types of K and V."""
        first, _, second = self.kv_type.partition("/")
        return first, second or first

    @property
    def key_dim(self) -> int:
        """Elements of a row of K of one KV head, which is the latent in deepseek2."""
        return self.head_dim * 9 // 2 if self.arch == "deepseek2" else self.head_dim


def possible(config: Config) -> bool:
    """Return whether such a model exists and its run is short."""
    quantized = any(kind not in ("f32", "f16", "bf16") for kind in config.kv_types)
    width = config.heads * config.head_dim
    tokens = (config.sequences + (0 if config.sessions == "none" else 2)) * (config.prefix + TOKENS_BEHIND)
    steps = tokens * (1 if config.prefix_cache else config.n) / config.batch_tokens
    steps += 4 * config.sequences * config.n / config.batch_seqs
    steps *= 1 + config.adapters  # they take turns
    return (
        (config.window == 0 or config.arch in ("gemma2", "gemma3", "gemma4", "gpt-oss"))
        and width <= (WIDEST_TIED if config.arch in ("qwen2", "lfm2") else WIDEST)
        and (
            config.arch != "deepseek2" or (config.kv_heads == 1 < config.group and "/" not in config.kv_type)
        )
        and not (quantized and (config.head_dim % 32 or config.key_dim % 32))
        and not (config.weights == "q8_0" and config.head_dim % 32)
        and config.batch_seqs <= max(8, config.batch_tokens)
        and config.sequences * config.n <= MOST_SEQUENCES
        and steps * config.threads <= MOST_STEPS
        and tokens * config.n * config.prefix * config.heads * config.key_dim <= MOST_PRODUCTS
    )


def pairs_of(config: Config) -> Iterator[Pair]:
    """Yield the pairs of values that a configuration covers."""
    values = vars(config)
    for one, other in combinations(AXES, 2):
        yield one, values[one], other, values[other]


def _values(config: Config) -> list[tuple[str, Any]]:
    """Return each axis and its value."""
    return [(name, value) for name, value in vars(config).items() if name in AXES]


def _random(draw: random.Random, fixed: dict[str, Any]) -> Config | None:
    """Draw a configuration with the `fixed` values, made smaller until it is possible.

    Returns: None if these values rule each other out.
    """
    values = {name: draw.choice(axis) for name, axis in AXES.items()} | fixed
    seed = draw.randrange(1 << 31)
    for name in (None, *draw.sample(sorted(SMALL), len(SMALL))):
        if name is not None and name not in fixed:
            values[name] = SMALL[name]
        config = Config(**values, seed=seed)
        if possible(config):
            return config
    return None


def _improved(config: Config, fixed: dict[str, Any], missing: Missing, draw: random.Random) -> Config:
    """Change one value after the other, except the `fixed`, while more `missing` pairs are covered."""
    names = [name for name in AXES if name not in fixed]
    changed = True
    while changed:
        changed = False
        draw.shuffle(names)
        for name in names:
            values = vars(config)
            others = values.items()  # pairs of an axis with itself are not missing
            most = len(missing[name, values[name]] & others)
            for value in AXES[name]:
                n = len(missing[name, value] & others)
                if n > most and possible(other := replace(config, **{name: value})):
                    most, config, changed = n, other, True
    return config


@cache
def covering(seed: int, candidates: int = 5) -> tuple[Config, ...]:
    """Return configurations that cover every possible pair of values.

    Each is the best of some random ones that hold a missing pair and are improved from there.
    """
    draw = random.Random(seed)
    order = [(a, x, b, y) for a, b in combinations(AXES, 2) for x in AXES[a] for y in AXES[b]]
    draw.shuffle(order)
    missing: Missing = {(axis, value): set() for axis, values in AXES.items() for value in values}
    for a, x, b, y in order:
        missing[a, x].add((b, y))
        missing[b, y].add((a, x))
    made: list[Config] = []
    for a, x, b, y in order:
        if (b, y) not in missing[a, x]:
            continue
        drawn = [
            _improved(config, {a: x, b: y}, missing, draw)
            for _ in range(candidates)
            if (config := _random(draw, {a: x, b: y})) is not None
        ]
        if not drawn:
            continue  # the values exclude each other
        best = max(
            drawn, key=lambda config: sum(len(missing[v] & vars(config).items()) for v in _values(config))
        )
        for value in _values(best):
            missing[value] -= vars(best).items()
        made.append(best)
    return tuple(made)


def configurations(count: int, seed: int) -> list[Config]:
    """Return the first `count` configurations of one covering set after another."""
    made: list[Config] = []
    while len(made) < count:
        made += covering(seed)
        seed += 1
    return made[:count]


if {field.name for field in fields(Config)} != {*AXES, "seed"}:
    raise TypeError("Config and AXES do not name the same axes")
