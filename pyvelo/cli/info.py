"""`pyvelo info`: what a model is, and what its KV cache would cost here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvelo.errors import UnsupportedError, VeloError
from pyvelo.kv.geometry import POOL_GRAIN, Geometry, make_geometry
from pyvelo.kv.types import KV_TYPES
from pyvelo.memory.cores import find_cores
from pyvelo.memory.host import free_memory
from pyvelo.models.gguf_parts import scan_model
from pyvelo.models.gguf_scan import GgufSummary

if TYPE_CHECKING:
    from pyvelo.config import EngineConfig
    from pyvelo.native import Model

__all__ = ["describe"]

# the default of LLM(memory_utilization=...)
MEMORY_SHARE = 0.9
GIB = 1 << 30
CONVERSATIONS = (4096, 32768)  # tokens; and one that fills the context


def describe(path: Path, block_size: int, n_gpu_layers: int | str = "auto") -> dict[str, Any]:
    """Everything about the model at `path` as plain data; sizes in bytes.

    Raises ModelError when the file is no model, ConfigError for a setting that does not exist.
    """
    from pyvelo import native
    from pyvelo.config import EngineConfig

    summary = scan_model(path)
    config = EngineConfig(model=path, block_size=block_size, n_gpu_layers=n_gpu_layers)
    # weights stay where they are mapped: nothing is read that need not be
    with native.Model(str(path), deterministic=True) as model:
        free = free_memory()
        return {
            "model": _model(summary, model),
            "quantization": {name: asdict(share) for name, share in summary.quantization.items()},
            "paged": {"possible": model.info.can_page, "refusal": model.refusal or None},
            "layers": [asdict(layer) for layer in model.layers],
            "kv_types": _kv_types(summary, model, block_size, free),
            "placement": _placement(config, summary, model, free),
            "machine": _machine(free),
        }


def _model(summary: GgufSummary, model: Model) -> dict[str, Any]:
    info = model.info
    return {
        "path": summary.path,
        "name": summary.metadata.get("general.name"),
        "architecture": summary.architecture,
        "description": info.description.replace(" ?B", ""),  # upstream's name of an unknown size
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
    }


def _kv_types(summary: GgufSummary, model: Model, block_size: int, free: int | None) -> dict[str, Any]:
    """For each KV type its cost, or why it cannot be had."""
    if not model.info.can_page:
        return {}
    lengths = _lengths(model.info.n_ctx_train)
    costs: dict[str, Any] = {}
    for name in KV_TYPES:
        try:
            geometry = make_geometry(summary.architecture, model.layers, name, block_size)
        except UnsupportedError as error:
            costs[name] = {"refusal": str(error)}
            continue
        fitting = None if free is None else _fitting(geometry, free, summary.tensor_bytes)
        costs[name] = {
            "token_bytes": geometry.token_bytes,
            "block_size": geometry.block_size,
            "block_bytes": geometry.block_bytes,
            "tokens_in_a_gib": _tokens_in(geometry, GIB),
            "conversations": [
                {"tokens": n, "bytes": geometry.blocks_for(n) * geometry.block_bytes} for n in lengths
            ],
            "tokens_that_fit": fitting,
            "sequences_that_fit": None if fitting is None else fitting // max(1, model.info.n_ctx_train),
        }
    return costs


def _fitting(geometry: Geometry, free: int, weights: int) -> int:
    """Tokens of the largest pool beside the weights, in the share of the free memory that LLM takes."""
    return _tokens_in(geometry, max(0, int(free * MEMORY_SHARE) - weights))


def _tokens_in(geometry: Geometry, n_bytes: int) -> int:
    """Tokens of the largest pool in so many bytes."""
    return n_bytes // (POOL_GRAIN * geometry.token_bytes) * POOL_GRAIN


def _lengths(longest: int) -> list[int]:
    """Of the conversations whose bytes are told."""
    return [n for n in CONVERSATIONS if n < longest] + [longest] * (longest > 0)


def _placement(
    config: EngineConfig, summary: GgufSummary, model: Model, free: int | None
) -> dict[str, Any] | None:
    """What LLM would put where with its defaults, or why it could not; None where there is nothing to put."""
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
        pool, on_host = planned_pool(config, summary, model, plan, free)
    except VeloError as error:
        return {"n_gpu_layers": config.n_gpu_layers, "refusal": str(error)}
    parts = [("CPU", model.info.n_layer - sum(r.n_layers for r in plan.rooms), plan.host_weights, on_host)]
    parts += [(room.name, room.n_layers, room.weight_bytes, room.token_bytes) for room in plan.rooms]
    names = ("name", "layers", "weight_bytes", "pool_bytes")
    return {
        "n_gpu_layers": plan.n_gpu_layers,
        "tokens": pool.n_tokens,
        "devices": [dict(zip(names, (*part[:3], part[3] * pool.n_tokens), strict=True)) for part in parts],
    }


def _machine(free: int | None) -> dict[str, Any]:
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
