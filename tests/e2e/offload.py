"""Run by test_offload.py in a process of its own: an engine with layers on devices of the laboratory."""

from __future__ import annotations

import os
import random
import sys

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.errors import OutOfMemory
from pyvelo.memory.offload import find_gpus, plan_offload, weigh_model
from pyvelo.memory.placement import burdens
from pyvelo.models.gguf_parts import scan_model
from pyvelo.native import devices
from tests import lab_device

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(3, 900) for _ in range(n)] for n in (3, 30, 33, 20, 60, 40)]
PARAMS = SamplingParams(max_tokens=110, temperature=0, ignore_eos=True)
SMALL = {"n_ctx": 256, "max_num_seqs": 6, "max_batch_tokens": 128, "n_threads": 1}


def answers(path: str, **settings: object) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(path, **{**SMALL, **settings})  # type: ignore[arg-type]
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)], llm


def check_tokens(path: str, expected: list[tuple[int, ...]]) -> None:
    """Whatever lies where, the tokens are the CPU's, also in a pool where sequences give way."""
    for n, swap_bytes in ((1, 0), (2, 0), (2, 1 << 20), (-1, 1 << 20)):
        found, llm = answers(path, n_gpu_layers=n, kv_cache_bytes=512 << 10, swap_bytes=swap_bytes)
        assert found == expected, (n, swap_bytes)
        assert llm.stats().preemptions > 0
        assert (llm.stats().swaps > 0) == (swap_bytes > 0)
        assert llm.stats().blocks_used == 0
        llm._engine.core.manager.audit()
        llm.close()


def check_alone(path: str) -> None:
    """Deterministic engines leave the devices alone; others give them products of large batches."""
    for settings, idle in (({"deterministic": True}, True), ({"n_gpu_layers": 0}, False)):
        before = lab_device.counts().graphs
        with LLM(path, **settings, **SMALL) as llm:  # type: ignore[arg-type]
            llm.generate([PROMPTS[4] * 3], SamplingParams(max_tokens=2))
        assert (lab_device.counts().graphs == before) == idle


def check_memory(path: str) -> None:
    """What was planned is what is there."""
    for n in (1, 2, -1):
        plan = plan_offload(config_of(path, n), path, scan_model(path))
        llm = LLM(path, n_gpu_layers=n, **SMALL)  # type: ignore[arg-type]
        llm.generate([PROMPTS[1]], SamplingParams(max_tokens=2))
        engine = llm._engine
        gpus = {i: device.name for i, device in enumerate(devices()) if device.kind == "gpu"}
        there = {gpus[m.device]: m for m in engine.context.memory if m.device in gpus and m.weight_bytes}
        assert set(there) == {room.name for room in plan.rooms}
        for room in plan.rooms:
            memory = there[room.name]
            assert memory.pool_bytes == room.token_bytes * llm.stats().tokens_total
            assert memory.weight_bytes + memory.compute_bytes <= room.other_bytes
        llm.close()


def config_of(path: str, n: int | str, **settings: object):  # type: ignore[no-untyped-def]
    from pyvelo.config import EngineConfig

    return EngineConfig(model=path, n_gpu_layers=n, **{**SMALL, **settings})  # type: ignore[arg-type]


def check_auto(path: str, expected: list[tuple[int, ...]]) -> None:
    """As many as fit, and one more is refused with that number."""
    gpu = find_gpus(devices())[-1]
    n = plan_offload(config_of(path, "auto"), path, scan_model(path)).n_gpu_layers
    found, llm = answers(path)
    layers = llm._engine.model.layers
    assert 0 < n < 3
    assert sum(devices()[layer.device].kind == "gpu" for layer in layers) == n - 1
    assert found == expected
    llm.close()
    with pytest.raises(OutOfMemory, match=f"of {gpu.name}.*n_gpu_layers={n} would fit"):
        LLM(path, n_gpu_layers=-1, **SMALL)  # type: ignore[arg-type]


def small_device(path: str) -> int:
    """Bytes of a device on which the output and one layer of two fit."""
    from pyvelo.kv.geometry import make_geometry
    from pyvelo.native import Model

    config = config_of(path, 0)
    with Model(path, deterministic=True) as model:
        geometry = make_geometry(path, model.layers, config.kv_type, config.block_size)
        load = weigh_model(config, scan_model(path), model, geometry)
    tokens = 6 * 256
    (two,) = burdens(load, 2, [lab_gpu(1 << 40)])
    (three,) = burdens(load, 3, [lab_gpu(1 << 40)])
    least, enough = two.bytes_for(tokens), three.bytes_for(256)
    assert least < enough
    return int((least + enough) / 2 / 0.9)


def lab_gpu(n_bytes: int):  # type: ignore[no-untyped-def]
    from pyvelo.memory.placement import Gpu

    return Gpu("LAB", n_bytes)


def main(path: str, what: str) -> None:
    expected, llm = answers(path, n_gpu_layers=0)
    llm.close()
    if what == "auto":
        lab_device.add_device(small_device(path))
        check_auto(path, expected)
        return
    for _ in range(int(what)):
        lab_device.add_device(1 << 30)
    check_alone(path)
    check_memory(path)
    check_tokens(path, expected)
    assert lab_device.counts().graphs > 0


if __name__ == "__main__":
    os.environ["VELO_DEBUG"] = "1"  # audits, and NaN in what is free
    main(sys.argv[1], sys.argv[2])
