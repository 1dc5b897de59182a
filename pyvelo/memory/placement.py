"""Placement of layers on GPUs: the bytes of each layer, and how many layers fit.

The last `n_gpu_layers` of a model's layers are offloaded. The output counts as one more layer after them: 1
is the output alone, the number of layers plus one is everything. Several GPUs get neighbouring layers each,
in their order. The token embeddings stay on the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyvelo.errors import OutOfMemory
from pyvelo.kv.geometry import Geometry

__all__ = [
    "Gpu",
    "GpuBytes",
    "ModelBytes",
    "bytes_by_gpu",
    "host_weights",
    "most_layers",
    "split",
    "split_all",
    "sum_tensors",
]

MAX_SLOTS = 1 << 31  # slots are int32
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of the parts of a model.

    `layers` are the weights of each layer. `output` is the size of the output on a GPU, `host_output` on the
    host (less, if it shares the weights of the input). `scratch` is the compute memory of a GPU, `states` the
    memory of recurrent states. `geometry` is of the cache as if one device had all layers; None: no cache.
    """

    layers: tuple[int, ...]
    input: int
    output: int
    host_output: int
    scratch: int
    states: int = 0
    geometry: Geometry | None = None

    @property
    def n_parts(self) -> int:
        """Number of layers that can be offloaded, the output included."""
        return len(self.layers) + 1

    @property
    def parts(self) -> tuple[int, ...]:
        """Weights of the layers and of the output on a GPU."""
        return (*self.layers, self.output)

    @property
    def fixed(self) -> int:
        """Bytes that each GPU needs beside its layers."""
        return self.scratch + self.states

    def weights(self, parts: range) -> int:
        """Return the weights of these layers on GPUs."""
        return sum(self.parts[parts.start : parts.stop])

    def slot_bytes(self, parts: range) -> int:
        """Return the bytes of a slot of the pool on a device with these layers."""
        return self.geometry.slot_bytes_with(parts) if self.geometry else 0


@dataclass(frozen=True)
class Gpu:
    """GPU with its free memory in bytes and its number among all devices."""

    name: str
    free_bytes: int
    device: int = 0


@dataclass(frozen=True)
class GpuBytes:
    """Bytes on one GPU: weights, compute memory and states, and a slot of the pool."""

    gpu: Gpu
    layers: range
    weights: int
    other: int
    slot: int

    def bytes_for(self, n_slots: int) -> int:
        """Return the bytes with a pool of `n_slots` slots."""
        return self.weights + self.other + n_slots * self.slot


def sum_tensors(
    tensors: Iterable[tuple[str, int]],
    n_layers: int,
    geometry: Geometry | None,
    scratch: int,
    states: int = 0,
) -> ModelBytes:
    """Return the bytes of a model.

    Args:
        tensors: name and bytes of each tensor of the file.
        n_layers: layers of the model.
        geometry: of the cache as if one device had all layers; None: no cache.
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
        tuple(layers),
        input=sum(rest.values()) - output,
        output=output + shared,
        host_output=output,
        scratch=scratch,
        states=states,
        geometry=geometry,
    )


def bytes_by_gpu(sizes: ModelBytes, counts: Sequence[int], gpus: Sequence[Gpu]) -> tuple[GpuBytes, ...]:
    """Return the bytes on each GPU that has layers, for these numbers of layers."""
    start, found = sizes.n_parts - sum(counts), []
    for count, gpu in zip(counts, gpus, strict=True):
        mine = range(start, start + count)
        start += count
        if count:
            layers = range(mine.start, min(mine.stop, len(sizes.layers)))  # the output is no layer
            slot = sizes.slot_bytes(layers)
            found.append(GpuBytes(gpu, layers, sizes.weights(mine), sizes.fixed, slot))
    return tuple(found)


def host_weights(sizes: ModelBytes, n_gpu_layers: int) -> int:
    """Return the bytes of weights that stay in host memory."""
    if not n_gpu_layers:
        return sizes.input + sum(sizes.layers) + sizes.host_output
    return sizes.input + sizes.weights(range(sizes.n_parts - n_gpu_layers))


def split(
    sizes: ModelBytes, n_gpu_layers: int, gpus: Sequence[Gpu], n_slots: int, share: float
) -> tuple[int, ...] | None:
    """Return the layers of each GPU that leave room for the largest pool; None if they do not fit.

    Each GPU gets neighbouring layers, in the order of the GPUs. One without room for a layer gets none.

    Args:
        n_gpu_layers: layers in all, the output among them.
        n_slots: the least slots of the pool.
        share: of the free memory that may be used.
    """
    best = _fill(sizes, n_gpu_layers, gpus, n_slots, share)
    low, high = n_slots, MAX_SLOTS
    while best is not None and low < high:
        middle = (low + high + 1) // 2
        found = _fill(sizes, n_gpu_layers, gpus, middle, share)
        if found is None:
            high = middle - 1
        else:
            best, low = found, middle
    return best


def _fill(
    sizes: ModelBytes, n_gpu_layers: int, gpus: Sequence[Gpu], n_slots: int, share: float
) -> tuple[int, ...] | None:
    """Give each GPU as many layers as fit, one GPU after the other; None if layers are left over."""
    counts, first = [], sizes.n_parts - n_gpu_layers
    for gpu in gpus:
        room, end = int(share * gpu.free_bytes) - sizes.fixed, first
        while end < sizes.n_parts and _bytes_for(sizes, range(first, end + 1), n_slots) <= room:
            end += 1
        counts.append(end - first)
        first = end
    return tuple(counts) if first == sizes.n_parts else None


def _bytes_for(sizes: ModelBytes, parts: range, n_slots: int) -> int:
    return sizes.weights(parts) + n_slots * sizes.slot_bytes(parts)


def most_layers(sizes: ModelBytes, gpus: Sequence[Gpu], n_slots: int, share: float) -> int:
    """Return the largest `n_gpu_layers` that fits with a pool of `n_slots` in `share` of the free memory."""
    return next(n for n in range(sizes.n_parts, -1, -1) if _fill(sizes, n, gpus, n_slots, share) is not None)


def split_all(
    sizes: ModelBytes, n_gpu_layers: int, gpus: Sequence[Gpu], n_slots: int, share: float
) -> tuple[int, ...]:
    """Return `split`, or raise OutOfMemory with the numbers."""
    counts = split(sizes, n_gpu_layers, gpus, n_slots, share)
    if counts is not None:
        return counts
    first = sizes.n_parts - n_gpu_layers
    parts = range(first, sizes.n_parts)
    weights, cache = sizes.weights(parts), n_slots * sizes.slot_bytes(parts)
    room = ", ".join(f"{int(share * gpu.free_bytes)} of {gpu.free_bytes} on {gpu.name}" for gpu in gpus)
    most = most_layers(sizes, gpus, n_slots, share)
    raise OutOfMemory(
        f"n_gpu_layers={n_gpu_layers} takes {weights + cache} bytes on GPUs, {weights} for weights and "
        f"{cache} for the KV cache, and {sizes.fixed} to compute on each GPU; {share:g} "
        f'of the free bytes are {room}: n_gpu_layers={most} would fit, and "auto" finds it'
    )
