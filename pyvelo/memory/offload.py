"""Choice of the layers on GPUs from settings, devices and model, before any weight is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyvelo.config import EngineConfig
from pyvelo.errors import ModelError
from pyvelo.kv.geometry import CPU_LINE, GPU_LINE, Geometry, make_geometry
from pyvelo.memory.budget import (
    DeviceRoom,
    Limits,
    PoolRequest,
    PoolSize,
    least_slots,
    size_pool,
    wanted_slots,
)
from pyvelo.memory.gpu import Step, workspace_bytes
from pyvelo.memory.placement import (
    Gpu,
    ModelBytes,
    bytes_by_gpu,
    host_weights,
    most_layers,
    split_all,
    sum_tensors,
)
from pyvelo.models.gguf_scan import GgufSummary
from pyvelo.native import Device, Model, devices, system_info

__all__ = [
    "NOTHING",
    "NO_GPU",
    "Offload",
    "built_for_gpus",
    "cache_geometry",
    "find_gpus",
    "measure_model",
    "plan_offload",
    "planned_pool",
    "running_sequences",
]

_log = logging.getLogger("pyvelo")

NO_GPU = "CUDA finds no GPU here (is there one, with a driver?)"
STATE_BYTES = 1 << 30  # limit for the recurrent states of all running sequences
MOST_STATES = 256  # upstream's limit for sequences (LLAMA_MAX_SEQ)


@dataclass(frozen=True)
class Offload:
    """Layers and memory on GPUs.

    rooms: GPUs that hold anything.
    host_weights: bytes of weights in host memory; None: all.
    gpu_layers: number of each GPU with layers among all devices, and how many it has.
    """

    n_gpu_layers: int
    rooms: tuple[DeviceRoom, ...] = ()
    host_weights: int | None = None
    gpu_layers: tuple[tuple[int, int], ...] = ()

    def with_others(self, n_bytes: int) -> Offload:
        """Return the offload with more bytes beside the pool, which each GPU may have to hold."""
        rooms = tuple(replace(room, other_bytes=room.other_bytes + n_bytes) for room in self.rooms)
        return replace(self, rooms=rooms)


NOTHING = Offload(0)


def built_for_gpus() -> bool:
    """Return whether this build has a backend for GPUs, with or without a GPU."""
    return "CUDA : " in system_info()


def find_gpus(found: Sequence[Device]) -> tuple[Gpu, ...]:
    """Return the GPUs that llama.cpp uses: all with their own memory, or else the first with the host's."""
    gpus = [
        (Gpu(device.name, device.memory_free, number), device.kind) for number, device in enumerate(found)
    ]
    own = [gpu for gpu, kind in gpus if kind == "gpu"]
    return tuple(own or [gpu for gpu, kind in gpus if kind == "igpu"][:1])


def plan_offload(config: EngineConfig, path: str, summary: GgufSummary) -> Offload:
    """Choose the layers of each GPU.

    Raises:
        OutOfMemory: `n_gpu_layers` layers do not fit; the message has the numbers.
    """
    if config.n_gpu_layers == 0 or (config.n_gpu_layers == "auto" and config.deterministic):
        return NOTHING
    gpus = find_gpus(devices())
    if not gpus and config.n_gpu_layers == "auto" and built_for_gpus():
        _log.warning("%s: the CPU computes everything", NO_GPU)
    if not gpus:  # C rejects a number with its own message
        return NOTHING if config.n_gpu_layers == "auto" else Offload(int(config.n_gpu_layers))
    with Model(path, deterministic=True) as model:  # only mapped: no weight is read
        if model.refusal is not None and not model.info.is_encoder:
            return NOTHING  # loading it raises the refusal
        geometry = None
        if model.refusal is None:
            geometry = cache_geometry(config, path, model, on_gpu=True)
        sizes = measure_model(config, summary, model, geometry)
        request = _request(config, model)
    counts = _decide(config, sizes, gpus, geometry, request)
    n, held = sum(counts), bytes_by_gpu(sizes, counts, gpus)
    rooms = tuple(
        DeviceRoom(
            b.gpu.name,
            b.gpu.free_bytes,
            b.weights + b.other,
            b.slot,
            b.layers,
            b.weights,
            b.gpu.device,
        )
        for b in held
    )
    layers = tuple((gpu.device, count) for gpu, count in zip(gpus, counts, strict=True) if count)
    return Offload(n, rooms, host_weights(sizes, n), layers)


def cache_geometry(
    config: EngineConfig, path: str, model: Model, *, on_gpu: bool, rooms: Sequence[DeviceRoom] = ()
) -> Geometry:
    """Return the geometry of a model's cache. `on_gpu`: some layers are on GPUs; `rooms`: planned ones."""
    places = {number: room.device for room in rooms for number in room.layers}
    return make_geometry(
        os.path.basename(path),
        [replace(layer, device=places.get(layer.layer, layer.device)) for layer in model.layers],
        config.kv_type,
        config.block_size,
        line_bytes=GPU_LINE if on_gpu else CPU_LINE,
        state_bytes=model.info.state_bytes,
    )


def planned_pool(
    config: EngineConfig, summary: GgufSummary, model: Model, offload: Offload, free_bytes: int | None
) -> tuple[PoolSize, Geometry, int]:
    """Return the pool of an engine, its geometry, and a slot's bytes on the host."""
    on_gpu = bool(offload.n_gpu_layers)
    geometry = cache_geometry(config, summary.path, model, on_gpu=on_gpu, rooms=offload.rooms)
    want = replace(
        _request(config, model),
        free_bytes=free_bytes,
        other_bytes=(offload.host_weights or 0) + running_sequences(config, model)[1],
        devices=offload.rooms,
    )
    layout = geometry.layout(config.max_batch_tokens)
    return size_pool(geometry, layout, want), geometry, want.host_slot_bytes(geometry)


def running_sequences(config: EngineConfig, model: Model) -> tuple[int, int]:
    """Return how many sequences may run at once, and the bytes of their recurrent states.

    All running sequences must fit into one step as decodes. States take at most 1 GiB.

    Raises:
        ModelError: the model should have states, but no layer of the file keeps one.
    """
    max_seqs = min(config.max_num_seqs, config.max_batch_tokens)
    if not model.info.has_recurrent:
        return max_seqs, 0
    state_bytes = model.info.state_bytes
    if not state_bytes:
        raise ModelError(f"{model.info.arch} has recurrent states, but no layer of this file keeps one")
    max_seqs = max(1, min(max_seqs, STATE_BYTES // state_bytes, MOST_STATES))
    return max_seqs, max_seqs * state_bytes


def measure_model(
    config: EngineConfig, summary: GgufSummary, model: Model, geometry: Geometry | None
) -> ModelBytes:
    """Return the bytes of a model's parts. `geometry` is None if it has no cache.

    A GPU counts with the states of all layers: only the model knows the bytes of each.
    """
    tensors = [(tensor.name, tensor.n_bytes) for tensor in summary.tensors]
    blocks = summary.of_architecture("block_count")
    n_layers = blocks if isinstance(blocks, int) else model.info.n_layer
    _, states = running_sequences(config, model) if geometry else (0, 0)
    scratch = _scratch(config, summary, model, paged=geometry is not None)
    return sum_tensors(tensors, n_layers, geometry, scratch, states)


def _scratch(config: EngineConfig, summary: GgufSummary, model: Model, paged: bool) -> int:
    """Return the compute memory of a GPU: activations of a step, logits, and the backend's workspace."""
    inner = summary.of_architecture("feed_forward_length")
    experts = summary.of_architecture("expert_used_count")
    width = 8 * model.info.n_embd + 3 * (inner if isinstance(inner, int) else 4 * model.info.n_embd)
    limits = Limits(min(config.max_num_seqs, config.max_batch_tokens), config.max_batch_tokens)
    step = Step(
        n_tokens=config.max_batch_tokens,
        n_rows=min(config.max_num_seqs, config.max_batch_tokens),
        n_outputs=limits.max_outputs,
        longest=config.n_ctx or model.info.n_ctx_train,
        n_experts=experts if isinstance(experts, int) and experts > 0 else 1,
    )
    numbers = step.n_tokens * width + step.n_outputs * model.info.n_vocab
    return workspace_bytes(model.layers if paged else (), summary.tensors, step) + 4 * numbers


def _request(config: EngineConfig, model: Model) -> PoolRequest:
    return PoolRequest(
        max_num_seqs=running_sequences(config, model)[0],
        n_ctx=config.n_ctx,
        n_ctx_train=max(1, model.info.n_ctx_train),
        kv_cache_bytes=config.kv_cache_bytes,
        memory_utilization=config.memory_utilization,
        free_bytes=None,
        other_bytes=0,
    )


def _decide(
    config: EngineConfig,
    sizes: ModelBytes,
    gpus: Sequence[Gpu],
    geometry: Geometry | None,
    request: PoolRequest,
) -> tuple[int, ...]:
    """Return the layers of each GPU."""
    has_bytes = config.kv_cache_bytes is not None
    layout = geometry.layout(config.max_batch_tokens) if geometry else None
    wanted = wanted_slots(geometry, layout, request) if geometry and layout else 0
    if config.n_gpu_layers == "auto":
        share = config.memory_utilization
        return split_all(sizes, most_layers(sizes, gpus, wanted, share), gpus, wanted, share)
    n = int(config.n_gpu_layers)
    n = sizes.n_parts if n < 0 else min(n, sizes.n_parts)
    share = 1.0 if has_bytes else config.memory_utilization
    least = wanted if has_bytes or not layout else least_slots(layout, config.n_ctx)
    return split_all(sizes, n, gpus, least, share)
