"""Settings are checked before anything is loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pyvelo.config import EngineConfig
from pyvelo.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 5),
        ("model", None),
        ("model", "a\0b.gguf"),
        ("model", "\ud800.gguf"),
        ("kv_type", 5),
        ("kv_type", ([], {})),
        ("block_size", 32.0),
        ("block_size", [32]),
        pytest.param("n_ctx", 10**5000, id="n_ctx-huge"),
        pytest.param("memory_utilization", 10**5000, id="memory_utilization-huge"),
        ("attention_precision", []),
        ("kv_type", "q9_9"),
        ("kv_type", ("f16", "f16", "f16")),
        ("block_size", 16),
        ("block_size", "32"),
        ("kv_cache_bytes", 0),
        ("kv_cache_bytes", 1.5),
        ("memory_utilization", 0.0),
        ("memory_utilization", 1.1),
        ("memory_utilization", math.nan),
        ("memory_utilization", "all"),
        ("n_ctx", 0),
        ("n_ctx", 1 << 31),
        ("n_ctx", True),
        ("max_num_seqs", 0),
        ("max_num_seqs", None),
        ("max_batch_tokens", 0),
        ("max_batch_tokens", (1 << 20) + 1),
        ("n_threads", 0),
        ("n_threads", 513),
        ("block_size", True),
        ("n_gpu_layers", -2),
        ("n_gpu_layers", "some"),
        ("n_gpu_layers", None),
        ("deterministic", 1),
        ("attention_precision", "rough"),
        ("attention_precision", None),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name: str, value: Any) -> None:
    settings: dict[str, Any] = {"model": "m.gguf", name: value}
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**settings)


def test_integers_of_numpy() -> None:
    config = EngineConfig(
        model="m.gguf", block_size=cast(Any, np.int64(64)), n_threads=cast(Any, np.uint8(3))
    )
    assert (config.block_size, type(config.block_size), config.n_threads) == (64, int, 3)


def test_the_bounds_of_threads() -> None:
    assert EngineConfig(model="m.gguf", n_threads=512).n_threads == 512
    for n in (0, 10_000):
        with pytest.raises(ConfigError, match=f"n_threads={n}: give an integer from 1 to 512 or None"):
            EngineConfig(model="m.gguf", n_threads=n)


def test_gpus_are_not_deterministic() -> None:
    with pytest.raises(ConfigError, match="n_gpu_layers=-1: with deterministic=True the CPU computes alone"):
        EngineConfig(model="m.gguf", n_gpu_layers=-1, deterministic=True)


def test_what_is_allowed() -> None:
    EngineConfig(model="m.gguf")
    EngineConfig(model="m.gguf", n_gpu_layers=-1)
    EngineConfig(
        model=Path("m.gguf"),
        kv_type=("q8_0", "q4_0"),
        block_size=256,
        kv_cache_bytes=1 << 40,
        memory_utilization=1,
        n_ctx=1,
        max_num_seqs=1,
        max_batch_tokens=1,
        n_threads=1,
        n_gpu_layers="auto",
        deterministic=True,
        attention_precision="fast",
        seed=0,
    )
