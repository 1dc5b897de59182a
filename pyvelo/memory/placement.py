"""Which layers go to which GPU: what each takes, how many fit.

The last `n_gpu_layers` of a model's layers are offloaded, and the output counts as one more behind them: 1 is
the output alone, one more than the model has layers is everything. Several GPUs get neighbouring layers each,
in their order. What embeds tokens stays on the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pyvelo.errors import OutOfMemory

__all__ = [
    "Burden",
    "Gpu",
    "LayerBytes",
    "Load",
    "burdens",
    "host_weights",
    "most_layers",
    "split",
    "split_all",
    "weigh",
]

MOST_TOKENS = 1 << 31  # slots are int32
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class LayerBytes:
    """What a layer takes: its weights, and K and V of a token (0: it has no cache)."""

    weights: int
    token: int

    def bytes_for(self, n_tokens: int) -> int:
        """With a pool of so many tokens."""
        return self.weights + n_tokens * self.token


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

    @property
    def parts(self) -> tuple[LayerBytes, ...]:
        """Layers and output, as a GPU holds them."""
        return (*self.layers, LayerBytes(self.output, 0))

    @property
    def fixed(self) -> int:
        """Bytes that a GPU needs beside its layers."""
        return self.scratch + self.states


@dataclass(frozen=True)
class Gpu:
    """A GPU: its free memory in bytes, its number among all devices."""

    name: str
    free_bytes: int
    device: int = 0


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


def burdens(load: Load, counts: Sequence[int], gpus: Sequence[Gpu]) -> tuple[Burden, ...]:
    """Return what each GPU would hold with so many layers; a GPU without layers is left out."""
    parts, start, found = load.parts, load.n_parts - sum(counts), []
    for count, gpu in zip(counts, gpus, strict=True):
        mine = parts[start : start + count]
        start += count
        if not count:
            continue
        n_layers = count - (start == load.n_parts)  # the output is no layer
        weights, token = sum(part.weights for part in mine), sum(part.token for part in mine)
        found.append(Burden(gpu, n_layers, weights, load.fixed, token))
    return tuple(found)


def host_weights(load: Load, n_gpu_layers: int) -> int:
    """Return the bytes of weights that stay in host memory."""
    if not n_gpu_layers:
        return load.input + sum(layer.weights for layer in load.layers) + load.host_output
    return load.input + sum(part.weights for part in load.parts[: load.n_parts - n_gpu_layers])


def split(
    load: Load, n_gpu_layers: int, gpus: Sequence[Gpu], n_tokens: int, share: float
) -> tuple[int, ...] | None:
    """Return the layers of each GPU that leave room for the largest pool; None if they do not fit.

    Each GPU gets neighbouring layers, in the order of the GPUs. One without room for a layer gets none.

    Args:
        n_gpu_layers: layers in all, the output among them.
        n_tokens: the least tokens of the pool.
        share: of the free memory that may be used.
    """
    best = _fill(load, n_gpu_layers, gpus, n_tokens, share)
    low, high = n_tokens, MOST_TOKENS
    while best is not None and low < high:
        middle = (low + high + 1) // 2
        found = _fill(load, n_gpu_layers, gpus, middle, share)
        if found is None:
            high = middle - 1
        else:
            best, low = found, middle
    return best


def _fill(
    load: Load, n_gpu_layers: int, gpus: Sequence[Gpu], n_tokens: int, share: float
) -> tuple[int, ...] | None:
    """Give each GPU as many layers as fit, one GPU after the other; None if layers are left over."""
    parts = load.parts[load.n_parts - n_gpu_layers :]
    counts, next_part = [], 0
    for gpu in gpus:
        left, first = int(share * gpu.free_bytes) - load.fixed, next_part
        while next_part < len(parts) and parts[next_part].bytes_for(n_tokens) <= left:
            left -= parts[next_part].bytes_for(n_tokens)
            next_part += 1
        counts.append(next_part - first)
    return tuple(counts) if next_part == len(parts) else None


def most_layers(load: Load, gpus: Sequence[Gpu], n_tokens: int, share: float) -> int:
    """Return the largest `n_gpu_layers` that fits beside a pool of `n_tokens`, in `share` of what is free."""
    return next(n for n in range(load.n_parts, -1, -1) if _fill(load, n, gpus, n_tokens, share) is not None)


def split_all(
    load: Load, n_gpu_layers: int, gpus: Sequence[Gpu], n_tokens: int, share: float
) -> tuple[int, ...]:
    """Return `split`, or raise OutOfMemory with the numbers."""
    counts = split(load, n_gpu_layers, gpus, n_tokens, share)
    if counts is not None:
        return counts
    parts = load.parts[load.n_parts - n_gpu_layers :]
    weights, cache = sum(part.weights for part in parts), n_tokens * sum(part.token for part in parts)
    room = ", ".join(f"{int(share * gpu.free_bytes)} of {gpu.free_bytes} on {gpu.name}" for gpu in gpus)
    most = most_layers(load, gpus, n_tokens, share)
    raise OutOfMemory(
        f"n_gpu_layers={n_gpu_layers} takes {weights + cache} bytes on GPUs, {weights} for weights and "
        f"{cache} for a KV cache of {n_tokens} tokens, and {load.fixed} to compute on each GPU; {share:g} of "
        f'the free bytes are {room}: n_gpu_layers={most} would fit, and "auto" finds it'
    )
