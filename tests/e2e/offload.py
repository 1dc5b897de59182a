"""Run by test_offload.py in a process of its own: an engine with layers on devices of the laboratory."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace

import pytest

from pyvelo import LLM, RequestOutput, SamplingParams
from pyvelo.errors import ConfigError, OutOfMemory
from pyvelo.memory.offload import cache_geometry, find_gpus, measure_model, plan_offload
from pyvelo.memory.placement import bytes_by_gpu
from pyvelo.models.gguf_parts import scan_model
from pyvelo.native import Model, devices
from tests import lab_device

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(3, 900) for _ in range(n)] for n in (3, 30, 33, 20, 60, 40)]
PARAMS = SamplingParams(max_tokens=110, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SMALL = {"n_ctx": 256, "max_num_seqs": 6, "max_batch_tokens": 128, "n_threads": 1, "kv_type": "f32"}
TIE = 0.005
"""Two tokens whose logprobs are closer than this may change places: a batch of another size rounds otherwise,
and GELU's table of f16 turns that into up to 2e-3."""


def answers(
    path: str,
    params: SamplingParams = PARAMS,
    prompts: list[list[int]] = PROMPTS,
    **settings: object,
) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(path, **{**SMALL, **settings})  # type: ignore[arg-type]
    return [output.token_ids for output in llm.generate(prompts, params)], llm


def expected_answers(
    path: str,
    params: SamplingParams = PARAMS,
    prompts: list[list[int]] = PROMPTS,
    **settings: object,
) -> tuple[list[tuple[int, ...]], LLM]:
    """Return the answers of the CPU alone, each up to its first tie, and the engine."""
    llm = LLM(path, n_gpu_layers=0, **{**SMALL, **settings})  # type: ignore[arg-type]
    outputs = llm.generate(prompts, replace(params, logprobs=2))
    expected = [output.token_ids[: first_tie(output)] for output in outputs]
    assert sum(map(len, expected)) > params.max_tokens * len(prompts) / 2
    return expected, llm


def first_tie(output: RequestOutput) -> int:
    """Return the index of the first token that rounding could exchange, or the number of tokens."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    for i, (best, second) in enumerate(each.top for each in logprobs):
        if best[1] - second[1] < TIE:
            return i
    return len(logprobs)


def agree(found: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> bool:
    """Return whether each answer begins as expected."""
    return all(mine[: len(theirs)] == theirs for mine, theirs in zip(found, expected, strict=True))


def check_tokens(path: str, expected: list[tuple[int, ...]]) -> None:
    """With any placement of layers the tokens equal the CPU's, also if sequences are preempted."""
    for n, swap_bytes in ((1, 0), (2, 0), (2, 1 << 20), (-1, 1 << 20)):
        found, llm = answers(path, n_gpu_layers=n, kv_cache_bytes=512 << 10, swap_bytes=swap_bytes)
        assert agree(found, expected), (n, swap_bytes)
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
    """The planned placement is the real one."""
    for n in (1, 2, -1):
        plan = plan_offload(config_of(path, n), path, scan_model(path))
        llm = LLM(path, n_gpu_layers=n, **SMALL)  # type: ignore[arg-type]
        llm.generate([PROMPTS[1]], SamplingParams(max_tokens=2))
        engine = llm._engine
        gpus = {i: device.name for i, device in enumerate(devices()) if device.kind == "gpu"}
        there = {gpus[m.device]: m for m in engine.context.memory if m.device in gpus and m.weight_bytes}
        assert set(there) == {room.name for room in plan.rooms}
        n_slots = llm.stats().blocks_total * llm.stats().block_size
        for room in plan.rooms:
            memory = there[room.name]
            assert memory.pool_bytes == room.slot_bytes * n_slots
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
    assert agree(found, expected)
    llm.close()
    with pytest.raises(OutOfMemory, match=f"on {gpu.name}: n_gpu_layers={n} would fit"):
        LLM(path, n_gpu_layers=-1, **SMALL)  # type: ignore[arg-type]


def small_device(path: str) -> int:
    """Bytes of a device on which the output and one layer of two fit."""
    from pyvelo.kv.geometry import make_geometry

    config = config_of(path, 0)
    with Model(path, deterministic=True) as model:
        geometry = make_geometry(path, model.layers, config.kv_type, config.block_size)
        sizes = measure_model(config, scan_model(path), model, geometry)
    tokens = 6 * 256
    (two,) = bytes_by_gpu(sizes, (2,), [lab_gpu(1 << 40)])
    (three,) = bytes_by_gpu(sizes, (3,), [lab_gpu(1 << 40)])
    least, enough = two.bytes_for(tokens), three.bytes_for(256)
    assert least < enough
    return int((least + enough) / 2 / 0.9)


def lab_gpu(n_bytes: int):  # type: ignore[no-untyped-def]
    from pyvelo.memory.placement import Gpu

    return Gpu("LAB", n_bytes)


def devices_of(llm: LLM) -> list[str]:
    """Names of the devices of the layers."""
    return [devices()[layer.device].name for layer in llm._engine.model.layers]


def check_uneven(path: str, expected: list[tuple[int, ...]]) -> None:
    """A device without room for a layer gets none, and hinders no other device."""
    for n_bytes in (64 << 20, 1 << 30, 64 << 20):
        lab_device.add_device(n_bytes)
    for n, where in (("auto", ["LAB1", "LAB1"]), (-1, ["LAB1", "LAB1"]), (2, ["CPU", "LAB1"])):
        found, llm = answers(path, n_gpu_layers=n)
        assert (agree(found, expected), devices_of(llm)) == (True, where)
        assert {devices()[m.device].name for m in llm._engine.context.memory} <= {"CPU", "LAB1"}
        llm.close()
    with pytest.raises(ConfigError, match="the GPUs get 2 layers, but n_gpu_layers is 3"):
        Model(path, n_gpu_layers=3, gpu_layers=[(gpu_numbers()[0], 2)])
    with pytest.raises(ConfigError, match="is no GPU"):
        Model(path, n_gpu_layers=1, gpu_layers=[(number_of("CPU"), 1)])
    with pytest.raises(ConfigError, match="gpus"):
        Model(path, n_gpu_layers=1, gpu_layers=[(99, 1)])


def check_several(path: str, expected: list[tuple[int, ...]]) -> None:
    """Two devices hold what one of them cannot."""
    size = small_device(path)
    for _ in range(2):
        lab_device.add_device(size)
    found, llm = answers(path)
    assert (agree(found, expected), devices_of(llm)) == (True, ["LAB0", "LAB1"])
    llm.close()


def check_types(path: str) -> None:
    """Every type of the cache, with one layer or all of them on a device, gives the CPU's tokens."""
    lab_device.add_device(1 << 30)
    for kv_type in ("f32", "f16", "bf16", "q8_0", "q4_0", "iq4_nl", ("q8_0", "q4_0")):
        expected, llm = expected_answers(path, SHORT, kv_type=kv_type)
        llm.close()
        for n, where in (("auto", ["LAB0", "LAB0"]), (2, ["CPU", "LAB0"])):
            found, llm = answers(path, SHORT, kv_type=kv_type, n_gpu_layers=n)
            assert (agree(found, expected), devices_of(llm)) == (True, where), kv_type
            llm.close()


def check_kernels(path: str) -> None:
    """The kernels for GPUs get the tables, flags and strides that they need; with a common prefix too."""
    lab_device.add_device(1 << 30)
    lab_device.emulate_kernels()
    start = PROMPTS[4] * 2
    prefixed = [[*start, *prompt] for prompt in PROMPTS]
    params = replace(SHORT, max_tokens=24)
    for kv_type in ("f32", "f16"):
        for prompts in (PROMPTS, prefixed):
            expected, llm = expected_answers(path, params, prompts, kv_type=kv_type)
            llm.close()
            before = lab_device.counts().shared
            found, llm = answers(path, params, prompts, kv_type=kv_type, n_gpu_layers=-1)
            assert agree(found, expected), (kv_type, prompts is prefixed)
            assert (lab_device.counts().shared > before) == (prompts is prefixed)
            llm.close()


def check_exhausted(path: str) -> None:
    """A card that has no memory for a step fails the requests of that step, and no others."""
    lab_device.add_device(1 << 30)
    found, llm = answers(path, n_gpu_layers=-1)
    for where in (1, 2):
        lab_device.exhaust(where)
        with pytest.raises(OutOfMemory, match="out of memory"):
            llm.generate(PROMPTS, PARAMS)
        lab_device.exhaust(0)
        assert llm.stats().blocks_used == 0
        llm._engine.core.manager.audit()
        assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == found
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    lab_device.exhaust(2)
    with pytest.raises(OutOfMemory):
        list(stream)
    llm.close()  # of a card that never works again
    lab_device.exhaust(0)


def check_windows(path: str) -> None:
    """Layers with and without a window share blocks on each device; blocks that windows free are used."""
    expected, llm = expected_answers(path, n_ctx=512)
    n_groups = llm.stats().n_groups
    assert n_groups > 1
    llm.close()
    for _ in range(2):
        lab_device.add_device(1 << 30)
    check_memory(path)
    for n in (1, 2, 4, 5, -1):
        with LLM(path, n_gpu_layers=n, **SMALL) as llm:  # type: ignore[arg-type]
            size = 8 * (n_groups + 1) * llm.geometry.block_bytes
        found, llm = answers(path, n_gpu_layers=n, n_ctx=512, kv_cache_bytes=size)
        assert (agree(found, expected), llm.stats().n_groups) == (True, n_groups), n
        assert llm.stats().blocks_used == 0
        assert llm.stats().preemptions > 0
        llm._engine.core.manager.audit()
        llm.close()


def check_recurrent(path: str) -> None:
    """A device counts with the states of the sequences that run at once, and computes with them."""
    config = config_of(path, "auto")
    with Model(path, deterministic=True) as model:
        geometry = cache_geometry(config, path, model, on_gpu=True)
        sizes = measure_model(config, scan_model(path), model, geometry)
        assert sizes.states == SMALL["max_num_seqs"] * model.info.state_bytes > 0
    expected, llm = expected_answers(path, n_ctx=512)
    llm.close()
    lab_device.add_device(1 << 30)
    found, llm = answers(path, n_ctx=512)
    assert (agree(found, expected), "LAB0" in devices_of(llm)) == (True, True)
    llm.close()


def gpu_numbers() -> list[int]:
    return [number for number, device in enumerate(devices()) if device.kind == "gpu"]


def number_of(name: str) -> int:
    return [device.name for device in devices()].index(name)


ON_DEVICES = {"uneven": check_uneven, "several": check_several}
OTHERS = {
    "exhausted": check_exhausted,
    "types": check_types,
    "kernels": check_kernels,
    "recurrent": check_recurrent,
    "windows": check_windows,
}


def main(path: str, what: str) -> None:
    if what in OTHERS:
        OTHERS[what](path)
        return
    expected, llm = expected_answers(path)
    llm.close()
    if what == "auto":
        lab_device.add_device(small_device(path))
        check_auto(path, expected)
        return
    if what in ON_DEVICES:
        ON_DEVICES[what](path, expected)
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
