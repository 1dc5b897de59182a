"""Placement of layers on GPUs: the bytes of each layer, and how many layers fit.

The last `n_gpu_layers` of a model's layers are offloaded. The output counts as one more layer after them: 1
is the output alone, the number of layers plus one is everything. Several GPUs get neighbouring layers each,
in their order. The token embeddings stay on the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pyvelo.errors import OutOfMemory

__all__ = [
    "Gpu",
    "GpuBytes",
    "LayerBytes",
    "ModelBytes",
    "bytes_by_gpu",
    "host_weights",
    "most_layers",
    "split",
    "split_all",
    "sum_tensors",
]

MAX_TOKENS = 1 << 31  # slots are int32
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a layer: its weights, and K and V of a token (0: it has no cache)."""

    weights: int
    token: int

    def bytes_for(self, n_tokens: int) -> int:
        """Return the bytes with a pool of `n_tokens` tokens."""
        return self.weights + n_tokens * self.token


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of the parts of a model.

    `output` is the size of the output on a GPU, `host_output` on the host (less, if it shares the weights of
    the input). `scratch` is the compute memory of a GPU, `states` the memory of recurrent states.
    """

    layers: tuple[LayerBytes, ...]
    input: int
    output: int
    host_output: int
    scratch: int
    states: int = 0

    @property
    def n_parts(self) -> int:
        """Number of layers that can be offloaded, the output included."""
        return len(self.layers) + 1

    @property
    def parts(self) -> tuple[LayerBytes, ...]:
        """Layers and output, with their bytes on a GPU."""
        return (*self.layers, LayerBytes(self.output, 0))

    @property
    def fixed(self) -> int:
        """Bytes that each GPU needs beside its layers."""
        return self.scratch + self.states


@dataclass(frozen=True)
class Gpu:
    """GPU with its free memory in bytes and its number among all devices."""

    name: str
    free_bytes: int
    device: int = 0


@dataclass(frozen=True)
class GpuBytes:
    """Bytes on one GPU: weights, compute memory and states, and K and V of a token."""

    gpu: Gpu
    n_layers: int
    weights: int
    other: int
    token: int

    def bytes_for(self, n_tokens: int) -> int:
        """Return the bytes with a pool of `n_tokens` tokens."""
        return self.weights + self.other + n_tokens * self.token


def sum_tensors(
    tensors: Iterable[tuple[str, int]],
    n_layers: int,
    tokens: Mapping[int, int],
    scratch: int,
    states: int = 0,
) -> ModelBytes:
    """Return the bytes of a model.

    Args:
        tensors: name and bytes of each tensor of the file.
        n_layers: layers of the model.
        tokens: bytes of K and V of a token, by layer.
        scratch: compute memory of a GPU.
        states: memory of recurrent states.
    """
    layers, rest = [0] * n_layers, dict[str, int]()
    for name, n_bytes in tensors:
        layer = _LAYER.match(name)
        if layer and int(layer[1]) < n_layers:
            layers[int(layer[1])] += n_bytes
        else:
            rest[name] = n_bytes
    output = sum(n_bytes for name, n_bytes in rest.items() if name.startswith(("output", "cls")))
    shared = 0 if "output.weight" in rest else rest.get("token_embd.weight", 0)  # a GPU gets a copy
    return ModelBytes(
        tuple(LayerBytes(weights, tokens.get(number, 0)) for number, weights in enumerate(layers)),
        input=sum(rest.values()) - output,
        output=output + shared,
        host_output=output,
        scratch=scratch,
        states=states,
    )


def bytes_by_gpu(sizes: ModelBytes, counts: Sequence[int], gpus: Sequence[Gpu]) -> tuple[GpuBytes, ...]:
    """Return the bytes on each GPU that has layers, for these numbers of layers."""
    parts, start, found = sizes.parts, sizes.n_parts - sum(counts), []
    for count, gpu in zip(counts, gpus, strict=True):
        mine = parts[start : start + count]
        start += count
        if not count:
            continue
        n_layers = count - (start == sizes.n_parts)  # the output is no layer
        weights, token = sum(part.weights for part in mine), sum(part.token for part in mine)
        found.append(GpuBytes(gpu, n_layers, weights, sizes.fixed, token))
    return tuple(found)


def host_weights(sizes: ModelBytes, n_gpu_layers: int) -> int:
    """Return the bytes of weights that stay in host memory."""
    if not n_gpu_layers:
        return sizes.input + sum(layer.weights for layer in sizes.layers) + sizes.host_output
    return sizes.input + sum(part.weights for part in sizes.parts[: sizes.n_parts - n_gpu_layers])


def split(
    sizes: ModelBytes, n_gpu_layers: int, gpus: Sequence[Gpu], n_tokens: int, share: float
) -> tuple[int, ...] | None:
    """Return the layers of each GPU that leave room for the largest pool; None if they do not fit.

    Each GPU gets neighbouring layers, in the order of the GPUs. One without room for a layer gets none.

    Args:
        n_gpu_layers: layers in all, the output among them.
        n_tokens: the least tokens of the pool.
        share: of the free memory that may be used.
    """
    best = _fill(sizes, n_gpu_layers, gpus, n_tokens, share)
    low, high = n_tokens, MAX_TOKENS
    while best is not None and low < high:
        middle = (low + high + 1) // 2
        found = _fill(sizes, n_gpu_layers, gpus, middle, share)
        if found is None:
            high = middle - 1
        else:
            best, low = found, middle
    return best


def _fill(
    sizes: ModelBytes, n_gpu_layers: int, gpus: Sequence[Gpu], n_tokens: int, share: float
) -> tuple[int, ...] | None:
    """Give each GPU as many layers as fit, one GPU after the other; None if layers are left over."""
    parts = sizes.parts[sizes.n_parts - n_gpu_layers :]
    counts, next_part = [], 0
    for gpu in gpus:
        left, first = int(share * gpu.free_bytes) - sizes.fixed, next_part
        while next_part < len(parts) and parts[next_part].bytes_for(n_tokens) <= left:
            left -= parts[next_part].bytes_for(n_tokens)
            next_part += 1
        counts.append(next_part - first)
    return tuple(counts) if next_part == len(parts) else None


def most_layers(sizes: ModelBytes, gpus: Sequence[Gpu], n_tokens: int, share: float) -> int:
    """Return the largest `n_gpu_layers` that fits with a pool of `n_tokens` in `share` of the free memory."""
    return next(n for n in range(sizes.n_parts, -1, -1) if _fill(sizes, n, gpus, n_tokens, share) is not None)


def split_all(
    sizes: ModelBytes, n_gpu_layers: int, gpus: Sequence[Gpu], n_tokens: int, share: float
) -> tuple[int, ...]:
    """Return `split`, or raise OutOfMemory with the numbers."""
    counts = split(sizes, n_gpu_layers, gpus, n_tokens, share)
    if counts is not None:
        return counts
    parts = sizes.parts[sizes.n_parts - n_gpu_layers :]
    weights, cache = sum(part.weights for part in parts), n_tokens * sum(part.token for part in parts)
    room = ", ".join(f"{int(share * gpu.free_bytes)} of {gpu.free_bytes} on {gpu.name}" for gpu in gpus)
    most = most_layers(sizes, gpus, n_tokens, share)
    raise OutOfMemory(
        f"n_gpu_layers={n_gpu_layers} takes {weights + cache} bytes on GPUs, {weights} for weights and "
        f"{cache} for a KV cache of {n_tokens} tokens, and {sizes.fixed} to compute on each GPU; {share:g} "
        f'of the free bytes are {room}: n_gpu_layers={most} would fit, and "auto" finds it'
    )
