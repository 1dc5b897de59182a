"""Settings of an engine, checked before anything is loaded."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, get_args

from pyvelo.errors import ArgumentError, ConfigError, check_path, shown
from pyvelo.kv.geometry import BLOCK_SIZES, parse_kv_type
from pyvelo.kv.types import KVType
from pyvelo.kv_events import KVEvents
from pyvelo.kv_store import KVStore

__all__ = [
    "MAX_LORA_SCALE",
    "MAX_THREADS",
    "EngineConfig",
    "GpuLayers",
    "KVTypes",
    "LoraGiven",
    "LoraSetting",
    "Precision",
    "lora_setting",
]

KVTypes = KVType | Sequence[KVType]
"""Type of K and V, or a pair of types for K and V."""
GpuLayers = int | Literal["auto"]
"""Number of layers on GPUs; -1: all; "auto": as many as fit."""
Precision = Literal["exact", "fast"]
"""Precision of the attention of prompts: "fast" may round to bfloat16."""
PRECISIONS = get_args(Precision)
"""Form of the events in a batch of KV events."""

_INT32_MAX = (1 << 31) - 1
_MAX_BATCH = 1 << 20

MAX_THREADS = 512
"""Most threads of a team: GGML_MAX_N_THREADS."""
MAX_LORA_SCALE = 1e6


LoraGiven = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]
"""Path of an adapter, alone or with its scale."""


class LoraSetting(NamedTuple):
    """LoRA adapter to load: its name in requests, its file, and the factor of its product."""

    name: str
    path: str
    scale: float


def lora_setting(name: Any, path: Any, scale: Any = 1.0) -> LoraSetting:
    """Return the checked setting of an adapter; raise ConfigError or ArgumentError."""
    if not isinstance(name, str) or not 1 <= len(name) <= 256:
        raise ConfigError(f"the name of an adapter is {shown(name)}: give 1 to 256 characters")
    number = math.nan
    if isinstance(scale, Real) and not isinstance(scale, bool):
        with suppress(OverflowError):  # of a whole number or a fraction
            number = float(scale)
    if not abs(number) <= MAX_LORA_SCALE:
        raise ConfigError(
            f"the scale of the adapter {shown(name)} is {shown(scale)}: give a number up to 1e6"
        )
    return LoraSetting(name, os.fsdecode(check_path(path)), number)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of `LLM` with their defaults; ConfigError names a wrong setting, its value and valid ones."""

    model: str | os.PathLike[str]
    kv_type: str | Sequence[str] = "f16"
    block_size: int = 32
    kv_cache_bytes: int | None = None
    memory_utilization: float = 0.9
    n_ctx: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 512
    n_threads: int | None = None
    n_gpu_layers: int | str = "auto"
    prefix_cache: bool = True
    swap_bytes: int = 0
    kv_store: str | os.PathLike[str] | KVStore | None = None
    kv_events: str | KVEvents | None = None
    deterministic: bool = False
    attention_precision: str = "exact"
    seed: int | None = None
    progress: Callable[[float], object] | None = None
    lora: LoraGiven | Mapping[str, LoraGiven] | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        self._take("n_ctx", "max_model_len", None)
        self._take("max_batch_tokens", "max_num_batched_tokens", 512)
        if not isinstance(self.model, (str, os.PathLike)) or not _is_path(self.model):
            raise ConfigError(f"model={shown(self.model)}: give the path of a GGUF file")
        parse_kv_type(self.kv_type)
        block_size = self._integer("block_size")
        if block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ConfigError(f"block_size={shown(self.block_size)}: choose from {sizes} tokens")
        object.__setattr__(self, "block_size", block_size)
        for name in ("max_num_seqs", "max_batch_tokens"):
            self._check_integer(name, 1, _MAX_BATCH)
        self._check_gpu_layers()
        self._check_integer("swap_bytes", 0, (1 << 63) - 1)
        self._check_integer("n_ctx", 1, _INT32_MAX, optional=True)
        self._check_integer("n_threads", 1, MAX_THREADS, optional=True)
        self._check_integer("kv_cache_bytes", 1, (1 << 63) - 1, optional=True)
        self._check_integer("seed", 0, (1 << 64) - 1, optional=True)
        share = self.memory_utilization
        if isinstance(share, bool) or not isinstance(share, Real) or not 0.0 < share <= 1.0:
            raise ConfigError(f"memory_utilization={shown(share)}: give a number above 0 and up to 1")
        for name in ("deterministic", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={shown(getattr(self, name))}: give True or False")
        if not isinstance(self.attention_precision, str) or self.attention_precision not in PRECISIONS:
            choices = " or ".join(map(repr, PRECISIONS))
            raise ConfigError(f"attention_precision={shown(self.attention_precision)}: give {choices}")
        self.loras()
        if self.kv_store is not None:
            if not isinstance(self.kv_store, KVStore):
                object.__setattr__(self, "kv_store", KVStore(self.kv_store))
            if not self.prefix_cache:
                raise ConfigError("kv_store needs the prefix cache: leave out prefix_cache=False")
        if self.kv_events is not None:
            if not isinstance(self.kv_events, KVEvents):
                object.__setattr__(self, "kv_events", KVEvents(self.kv_events))
            if not self.prefix_cache:
                raise ConfigError("kv_events needs the prefix cache: leave out prefix_cache=False")
        if self.progress is not None and not callable(self.progress):
            raise ConfigError(f"progress={shown(self.progress)}: give a function of one number, or None")

    def loras(self) -> tuple[list[LoraSetting], str | None]:
        """Return the adapters to load, and the name of the default one: a path alone is the default."""
        if self.lora is None:
            return [], None
        if isinstance(self.lora, Mapping):
            return [_lora(name, given) for name, given in self.lora.items()], None
        only = _lora(None, self.lora)
        return [only], only.name

    def _take(self, name: str, other: str, default: int | None) -> None:
        """Set `name` to the value of its other name."""
        if getattr(self, other) is None:
            return
        most = _INT32_MAX if name == "n_ctx" else _MAX_BATCH
        self._check_integer(name, 1, most, optional=name == "n_ctx")
        self._check_integer(other, 1, most)
        mine, theirs = getattr(self, name), getattr(self, other)
        if mine not in (default, theirs):
            raise ConfigError(
                f"{name}={shown(mine)} and {other}={shown(theirs)} are one setting: give one of them"
            )
        object.__setattr__(self, name, theirs)

    def _check_gpu_layers(self) -> None:
        layers = self.n_gpu_layers
        if isinstance(layers, str) and layers == "auto":
            return
        if self._integer("n_gpu_layers") is None:
            raise ConfigError(f'n_gpu_layers={shown(layers)}: give an integer, -1 for all, or "auto"')
        self._check_integer("n_gpu_layers", -1, _INT32_MAX)
        if self.n_gpu_layers and self.deterministic is True:
            raise ConfigError(
                f"n_gpu_layers={layers}: with deterministic=True the CPU computes alone, give 0"
            )

    def _integer(self, name: str) -> int | None:
        """Return a setting as an integer; None if it is none."""
        value: Any = getattr(self, name)
        try:
            return None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            return None

    def _check_integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if optional and value is None:
            return
        number = self._integer(name)
        if number is None or not low <= number <= high:
            choice = " or None" if optional else ""
            raise ConfigError(f"{name}={shown(value)}: give an integer from {low} to {high}{choice}")
        object.__setattr__(self, name, number)


def _lora(name: Any, given: Any) -> LoraSetting:
    """Return the setting of an adapter; name None: the stem of its file."""
    pair = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, 1.0)
    try:
        path = os.fsdecode(check_path(pair[0]))
        return lora_setting(PurePath(path).stem if name is None else name, path, pair[1])
    except ArgumentError:
        raise ConfigError(
            f"lora={shown(given)}: give a path, a path and a scale, or a dictionary of them by name"
        ) from None


def _is_path(model: str | os.PathLike[str]) -> bool:
    """Return whether a file can have this name."""
    try:
        check_path(model)
    except ConfigError:
        return False
    return True
