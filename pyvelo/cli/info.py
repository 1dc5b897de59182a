"""`pyvelo info`: facts about a model, and the cost of its KV cache on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvelo.errors import UnsupportedError, VeloError
from pyvelo.kv.geometry import Geometry, LayerGroup, contiguous_bytes, make_geometry
from pyvelo.kv.types import KV_TYPES
from pyvelo.memory.budget import longest_sequence
from pyvelo.memory.cores import find_cores
from pyvelo.memory.host import free_memory
from pyvelo.models.gguf_parts import scan_model
from pyvelo.models.gguf_scan import GgufSummary

if TYPE_CHECKING:
    from pyvelo.config import EngineConfig
    from pyvelo.native import Model

__all__ = ["MEMORY_SHARE", "describe", "machine_facts"]

# the default of LLM(memory_utilization=...)
MEMORY_SHARE = 0.9
GIB = 1 << 30
DEFAULT_BATCH = 512
"""Tokens of a step by default, of PyVelo and of llama.cpp."""
CONVERSATIONS = (4096, 32768)  # tokens; a third one fills the context


def describe(path: Path, block_size: int, n_gpu_layers: int | str = "auto") -> dict[str, Any]:
    """Return the facts about the model at `path` as plain data; sizes in bytes.

    Raises:
        ModelError: the file is no model.
        ConfigError: a setting is not valid.
    """
    from pyvelo import native
    from pyvelo.config import EngineConfig

    summary = scan_model(path)
    config = EngineConfig(model=path, block_size=block_size, n_gpu_layers=n_gpu_layers)
    # deterministic: weights stay mapped, so they are not read
    with native.Model(str(path), deterministic=True) as model:
        free = free_memory()
        return {
            "model": _model(summary, model),
            "quantization": {name: asdict(share) for name, share in summary.quantization.items()},
            "paged": {"possible": model.info.can_page, "refusal": model.refusal or None},
            "layers": [asdict(layer) for layer in model.layers],
            "kv_types": _kv_types(summary, model, block_size, free),
            "placement": _placement(config, summary, model, free),
            "machine": machine_facts(free),
        }


def _model(summary: GgufSummary, model: Model) -> dict[str, Any]:
    info = model.info
    return {
        "path": summary.path,
        "name": summary.metadata.get("general.name"),
        "architecture": summary.architecture,
        "description": info.description,
        "parameters": summary.n_params,
        "weight_bytes": summary.tensor_bytes,
        "file_bytes": summary.file_bytes,
        "layers": info.n_layer,
        "embedding": info.n_embd,
        "heads": info.n_head,
        "kv_heads": info.n_head_kv,
        "vocabulary": info.n_vocab,
        "tokenizer": summary.metadata.get("tokenizer.ggml.model"),
        "context": info.n_ctx_train,
        "recurrent_layers": bool(info.has_recurrent),
        "state_bytes": info.state_bytes,
    }


def _kv_types(summary: GgufSummary, model: Model, block_size: int, free: int | None) -> dict[str, Any]:
    """Return the cost of each KV type, or why the model cannot use it; empty without a cache."""
    if not model.info.can_page or not model.layers:
        return {}
    lengths = _lengths(model.info.n_ctx_train)
    costs: dict[str, Any] = {}
    for name in KV_TYPES:
        try:
            geometry = make_geometry(
                summary.architecture, model.layers, name, block_size, state_bytes=model.info.state_bytes
            )
        except UnsupportedError as error:
            costs[name] = {"refusal": str(error)}
            continue
        fitting = None if free is None else _fitting(free, summary.tensor_bytes)
        costs[name] = {
            "token_bytes": geometry.token_bytes,
            "block_size": geometry.block_size,
            "block_bytes": geometry.block_bytes,
            "groups": [_group(geometry, group) for group in geometry.groups],
            "tokens_in_a_gib": _tokens_in(geometry, GIB),
            "conversations": [
                {
                    "tokens": n,
                    "bytes": geometry.sequence_bytes(n),
                    "llama_cpp_bytes": contiguous_bytes(geometry, model.layers, n, DEFAULT_BATCH),
                }
                for n in lengths
            ],
            "tokens_that_fit": None if fitting is None else _tokens_in(geometry, fitting),
            "sequences_that_fit": None if fitting is None else _sequences_in(geometry, fitting, lengths),
        }
    return costs


def _group(geometry: Geometry, group: LayerGroup) -> dict[str, Any]:
    """Return the layers, the window and the bytes of a token of a group."""
    window = group.window
    return {
        "layers": list(group.layers),
        "window": window.size or None,
        "chunked": window.chunked,
        "token_bytes": geometry.slot_bytes,
    }


def _fitting(free: int, weights: int) -> int:
    """Return the bytes of the largest pool beside the weights, in the share of free memory that LLM uses."""
    return max(0, int(free * MEMORY_SHARE) - weights)


def _blocks_in(geometry: Geometry, n_bytes: int) -> int:
    """Return the blocks of the largest pool of `n_bytes`."""
    return n_bytes // (geometry.grain_blocks * geometry.block_bytes) * geometry.grain_blocks


def _tokens_in(geometry: Geometry, n_bytes: int) -> int:
    """Return the tokens of the longest sequence in a pool of `n_bytes`."""
    return longest_sequence(geometry.layout(DEFAULT_BATCH), _blocks_in(geometry, n_bytes))


def _sequences_in(geometry: Geometry, n_bytes: int, lengths: Sequence[int]) -> int:
    """Return the sequences of the full context in a pool of `n_bytes`."""
    longest = max(lengths, default=1)
    return _blocks_in(geometry, n_bytes) // geometry.layout(DEFAULT_BATCH).peak_blocks(longest)


def _lengths(longest: int) -> list[int]:
    """Return the lengths of conversations in the report, in tokens."""
    return [n for n in CONVERSATIONS if n < longest] + [longest] * (longest > 0)


def _placement(
    config: EngineConfig, summary: GgufSummary, model: Model, free: int | None
) -> dict[str, Any] | None:
    """Return where LLM would place layers and cache by default, or why not; None without a paged cache."""
    from pyvelo.memory.offload import NO_GPU, NOTHING, built_for_gpus, plan_offload, planned_pool

    if not model.info.can_page:
        return None
    try:
        plan = plan_offload(config, summary.path, summary)
        if plan.n_gpu_layers and not plan.rooms:
            none = "there is no GPU: give 0, or build with PYVELO_CUDA"
            raise UnsupportedError(f"{NO_GPU}: give 0" if built_for_gpus() else none)
        if plan == NOTHING:
            plan = replace(plan, host_weights=model.info.size_bytes)
        pool, geometry, on_host = planned_pool(config, summary, model, plan, free)
    except VeloError as error:
        return {"n_gpu_layers": config.n_gpu_layers, "refusal": str(error)}
    parts = [("CPU", model.info.n_layer - sum(len(r.layers) for r in plan.rooms), plan.host_weights, on_host)]
    parts += [(room.name, len(room.layers), room.weight_bytes, room.slot_bytes) for room in plan.rooms]
    names = ("name", "layers", "weight_bytes", "pool_bytes")
    n_slots = pool.n_blocks * geometry.block_size
    return {
        "n_gpu_layers": plan.n_gpu_layers,
        "tokens": pool.n_tokens if model.layers else None,
        "devices": [dict(zip(names, (*part[:3], part[3] * n_slots), strict=True)) for part in parts],
    }


def machine_facts(free: int | None) -> dict[str, Any]:
    """Return the processor, the memory and the devices, and what the library is built for."""
    from pyvelo import native

    devices: Sequence[Any] = native.devices()
    cores = find_cores()
    return {
        "cpus": cores.logical,
        "cores": cores.physical,
        "performance_cores": cores.performance,
        "cpu_quota": cores.quota,
        "threads": cores.threads,
        "free_memory": free,
        "devices": [asdict(device) for device in devices],
        "system": native.system_info(),
    }
