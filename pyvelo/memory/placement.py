"""Which layers go to the GPUs: what each takes, where llama.cpp would put it, how many fit.

The last `n_gpu_layers` of a model's layers are offloaded, and the output counts as one more behind them: 1 is
the output alone, one more than the model has layers is everything. Several GPUs share the layers by their
free memory, in order. What embeds tokens stays on the host.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pyvelo.errors import OutOfMemory

__all__ = [
    "Burden",
    "Gpu",
    "LayerBytes",
    "Load",
    "burdens",
    "check_fits",
    "host_weights",
    "most_layers",
    "places",
    "weigh",
]

_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class LayerBytes:
    """What a layer takes: its weights, and K and V of a token (0: it has no cache)."""

    weights: int
    token: int


@dataclass(frozen=True)
class Load:
    """What is to be placed, in bytes.

    `output` is what the output takes on a GPU; `host_output` what it takes on the host (less, where it shares
    the weights of the input). `scratch` is for what a GPU computes, `states` for recurrent states.
    """

    layers: tuple[LayerBytes, ...]
    input: int
    output: int
    host_output: int
    scratch: int
    states: int = 0

    @property
    def n_parts(self) -> int:
        """Layers and output: as many as can be offloaded."""
        return len(self.layers) + 1


@dataclass(frozen=True)
class Gpu:
    """A GPU and its free memory in bytes."""

    name: str
    free_bytes: int


@dataclass(frozen=True)
class Burden:
    """What a GPU would hold: bytes of weights, of what is needed to compute, and of a token's K and V."""

    gpu: Gpu
    n_layers: int
    weights: int
    other: int
    token: int

    def bytes_for(self, n_tokens: int) -> int:
        """With a pool of so many tokens."""
        return self.weights + self.other + n_tokens * self.token


def weigh(
    tensors: Iterable[tuple[str, int]],
    n_layers: int,
    tokens: Mapping[int, int],
    scratch: int,
    states: int = 0,
) -> Load:
    """The load of a file's tensors (name, bytes); `tokens` are the bytes of K and V of a token, by layer."""
    layers, rest = [0] * n_layers, dict[str, int]()
    for name, n_bytes in tensors:
        layer = _LAYER.match(name)
        if layer and int(layer[1]) < n_layers:
            layers[int(layer[1])] += n_bytes
        else:
            rest[name] = n_bytes
    output = sum(n_bytes for name, n_bytes in rest.items() if name.startswith(("output", "cls")))
    shared = 0 if "output.weight" in rest else rest.get("token_embd.weight", 0)  # a GPU gets a copy
    return Load(
        tuple(LayerBytes(weights, tokens.get(number, 0)) for number, weights in enumerate(layers)),
        input=sum(rest.values()) - output,
        output=output + shared,
        host_output=output,
        scratch=scratch,
        states=states,
    )


def places(n_layers: int, n_gpu_layers: int, free_bytes: Sequence[int]) -> list[int | None]:
    """The number of the GPU of each layer and, behind them, of the output; None: the host.

    In single precision, as llama.cpp draws the borders.
    """
    offloaded = n_layers + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layers + 1)
    if not free_bytes or not offloaded:
        return [None] * (n_layers + 1)
    sums = list(accumulate(np.float32(free) for free in free_bytes))
    borders = [float(np.float32(part / sums[-1])) if sums[-1] else 1.0 for part in sums]
    on_gpu: list[int | None] = [
        min(bisect_right(borders, float(np.float32(part) / np.float32(offloaded))), len(borders) - 1)
        for part in range(offloaded)
    ]
    return [None] * (n_layers + 1 - offloaded) + on_gpu


def burdens(load: Load, n_gpu_layers: int, gpus: Sequence[Gpu]) -> tuple[Burden, ...]:
    """What each GPU would hold, in their order; one that gets nothing is left out."""
    where = places(len(load.layers), n_gpu_layers, [gpu.free_bytes for gpu in gpus])
    found = []
    for number, gpu in enumerate(gpus):
        mine = [layer for layer, place in zip(load.layers, where[:-1], strict=True) if place == number]
        has_output = where[-1] == number
        if not mine and not has_output:
            continue
        weights = sum(layer.weights for layer in mine) + has_output * load.output
        token = sum(layer.token for layer in mine)
        found.append(Burden(gpu, len(mine), weights, load.scratch + load.states, token))
    return tuple(found)


def host_weights(load: Load, n_gpu_layers: int, gpus: Sequence[Gpu]) -> int:
    """Bytes of weights that stay in host memory."""
    where = places(len(load.layers), n_gpu_layers, [gpu.free_bytes for gpu in gpus])
    stay = sum(layer.weights for layer, place in zip(load.layers, where[:-1], strict=True) if place is None)
    return load.input + stay + (load.host_output if where[-1] is None else 0)


def most_layers(load: Load, gpus: Sequence[Gpu], n_tokens: int, share: float) -> int:
    """The largest `n_gpu_layers` that fit, with a pool of `n_tokens` tokens, in `share` of what is free."""
    for n in range(load.n_parts, 0, -1):
        if gpus and all(_fits(burden, n_tokens, share) for burden in burdens(load, n, gpus)):
            return n
    return 0


def check_fits(load: Load, n_gpu_layers: int, gpus: Sequence[Gpu], n_tokens: int, share: float) -> None:
    """OutOfMemory, with the numbers, where that many layers and a pool of `n_tokens` tokens do not fit."""
    for burden in burdens(load, n_gpu_layers, gpus):
        if _fits(burden, n_tokens, share):
            continue
        free, most = burden.gpu.free_bytes, most_layers(load, gpus, n_tokens, share)
        raise OutOfMemory(
            f"n_gpu_layers={n_gpu_layers} takes {burden.bytes_for(n_tokens)} bytes of {burden.gpu.name}: "
            f"{burden.weights} for weights, {burden.other} to compute, {n_tokens * burden.token} for a KV "
            f"cache of {n_tokens} tokens; {share:g} of the {free} free bytes are {int(share * free)}: "
            f'n_gpu_layers={most} would fit, and "auto" finds it'
        )


def _fits(burden: Burden, n_tokens: int, share: float) -> bool:
    return burden.bytes_for(n_tokens) <= int(share * burden.gpu.free_bytes)
