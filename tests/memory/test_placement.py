"""Which layers go to GPUs: against a count of every possibility, and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.config import EngineConfig
from pyvelo.errors import OutOfMemory
from pyvelo.kv.geometry import POOL_GRAIN, make_geometry
from pyvelo.memory import offload
from pyvelo.memory.budget import DeviceRoom, PoolRequest, size_pool, wanted_tokens
from pyvelo.memory.offload import NOTHING, find_gpus, plan_offload
from pyvelo.memory.placement import (
    Gpu,
    LayerBytes,
    Load,
    burdens,
    check_fits,
    host_weights,
    most_layers,
    places,
    weigh,
)
from pyvelo.models.gguf_parts import scan_model
from pyvelo.native import Device

sizes = st.integers(0, 1000)
loads = st.builds(
    Load,
    layers=st.lists(st.builds(LayerBytes, weights=sizes, token=st.integers(0, 9)), max_size=9).map(tuple),
    input=sizes,
    output=sizes,
    host_output=sizes,
    scratch=st.integers(0, 300),
    states=st.integers(0, 50),
)
gpu_lists = st.lists(st.integers(1, 9000), max_size=3).map(
    lambda free: [Gpu(f"GPU{i}", n) for i, n in enumerate(free)]
)


def held(load: Load, n: int, gpus: list[Gpu], tokens: int) -> list[int]:
    """Bytes on each GPU, added up part by part."""
    n_layers, total = len(load.layers), [0] * len(gpus)
    for part, place in enumerate(places(n_layers, n, [gpu.free_bytes for gpu in gpus])):
        if place is not None:
            layer = load.layers[part] if part < n_layers else LayerBytes(load.output, 0)
            total[place] += layer.weights + tokens * layer.token
    used = set(places(n_layers, n, [gpu.free_bytes for gpu in gpus]))
    return [size + (number in used) * (load.scratch + load.states) for number, size in enumerate(total)]


@given(loads, gpu_lists, st.integers(0, 100), st.sampled_from([0.5, 0.9, 1.0]))
def test_the_most_layers_that_fit(load: Load, gpus: list[Gpu], tokens: int, share: float) -> None:
    def fits(n: int) -> bool:
        return all(
            size <= int(share * gpu.free_bytes)
            for size, gpu in zip(held(load, n, gpus, tokens), gpus, strict=True)
        )

    possible = [n for n in range(len(load.layers) + 2) if n == 0 or (gpus and fits(n))]
    assert most_layers(load, gpus, tokens, share) == max(possible)
    for n in range(len(load.layers) + 2):
        if not gpus or fits(n):
            check_fits(load, n, gpus, tokens, share)
        else:
            with pytest.raises(OutOfMemory, match=f"n_gpu_layers={max(possible)} would fit"):
                check_fits(load, n, gpus, tokens, share)


@given(loads, gpu_lists, st.integers(-1, 12))
def test_nothing_is_lost_between_the_sides(load: Load, gpus: list[Gpu], n: int) -> None:
    found = burdens(load, n, gpus)
    offloaded = min(load.n_parts if n < 0 else n, load.n_parts) if gpus else 0
    there = sum(burden.weights for burden in found) - load.output * (offloaded > 0)
    here = host_weights(load, n, gpus) - load.input - load.host_output * (offloaded == 0)
    assert there + here == sum(layer.weights for layer in load.layers)
    assert sum(burden.n_layers for burden in found) == max(0, offloaded - 1)
    assert sum(burden.token for burden in found) == sum(
        layer.token for layer in load.layers[len(load.layers) - max(0, offloaded - 1) :]
    )


def test_the_last_layers_go_first_and_gpus_share_them_by_free_memory() -> None:
    assert places(4, 0, [1]) == [None] * 5
    assert places(4, 1, [1]) == [None] * 4 + [0]
    assert places(4, 3, [1]) == [None, None, 0, 0, 0]
    assert places(4, -1, [1]) == places(4, 99, [1]) == [0] * 5
    assert places(4, 5, []) == [None] * 5
    assert places(7, -1, [10, 10]) == [0] * 4 + [1] * 4
    assert places(7, -1, [30, 10]) == [0] * 6 + [1] * 2
    assert places(7, 4, [10, 10]) == [None] * 4 + [0, 0, 1, 1]


def test_tensors_are_weighed() -> None:
    tensors = {
        "token_embd.weight": 100,
        "blk.0.attn_q.weight": 10,
        "blk.1.attn_q.weight": 11,
        "blk.10.attn_q.weight": 20,
        "output_norm.weight": 1,
    }
    load = weigh(tensors.items(), 11, {0: 4, 10: 5}, 7)
    assert load.layers[0] == LayerBytes(10, 4)
    assert load.layers[10] == LayerBytes(20, 5)
    assert (load.input, load.output, load.host_output) == (100, 101, 1)
    untied = weigh([*tensors.items(), ("output.weight", 50)], 11, {}, 7)
    assert (untied.input, untied.output, untied.host_output) == (100, 51, 51)


def test_an_error_has_the_numbers() -> None:
    load = Load((LayerBytes(100, 2), LayerBytes(100, 2)), 10, 20, 20, 5)
    with pytest.raises(OutOfMemory) as raised:
        check_fits(load, 3, [Gpu("CUDA0", 300)], 30, 0.9)
    for number in ("CUDA0", "takes 345 bytes", "220 for weights", "5 to compute", "120 for a KV cache"):
        assert number in str(raised.value)
    assert 'n_gpu_layers=2 would fit, and "auto" finds it' in str(raised.value)


def test_gpus_that_are_found() -> None:
    def device(name: str, kind: Any) -> Device:
        return Device(name, "", kind, 9, 5)

    cpu, blas = device("CPU", "cpu"), device("BLAS", "accelerator")
    shared, own = device("V0", "igpu"), [device("CUDA0", "gpu"), device("CUDA1", "gpu")]
    assert find_gpus([cpu, blas]) == ()
    assert find_gpus([cpu, shared, device("V1", "igpu")]) == (Gpu("V0", 5),)
    assert [gpu.name for gpu in find_gpus([own[0], cpu, shared, own[1]])] == ["CUDA0", "CUDA1"]


# ---- one number of blocks for all sides ----


class Shape:
    def __init__(self, layer: int) -> None:
        self.layer, self.n_head_kv, self.head_dim_k, self.head_dim_v = layer, 8, 64, 64


GEOMETRY = make_geometry("small", [Shape(i) for i in range(16)])
TOKEN = GEOMETRY.token_bytes // 16  # of a layer


def request(layers: list[int], free: list[int], host: int, **settings: Any) -> PoolRequest:
    rooms = tuple(
        DeviceRoom(f"GPU{i}", n, 1 << 20, count * TOKEN)
        for i, (n, count) in enumerate(zip(free, layers, strict=True))
    )
    usual = {
        "max_num_seqs": 256,
        "n_ctx": None,
        "n_ctx_train": 131072,
        "kv_cache_bytes": None,
        "memory_utilization": 0.9,
        "free_bytes": host,
        "other_bytes": 1 << 20,
        "devices": rooms,
    }
    return PoolRequest(**{**usual, **settings})  # type: ignore[arg-type]


mib = st.integers(8, 4096).map(lambda n: n << 20)


@given(st.integers(0, 8), st.integers(0, 8), mib, mib, mib)
def test_every_side_has_room(first: int, second: int, free: int, free_too: int, host: int) -> None:
    want = request([first, second], [free, free_too], host)
    sides = [(first, free), (second, free_too), (16 - first - second, host)]
    room = [
        (int(0.9 * n) - (1 << 20)) // (layers * TOKEN * POOL_GRAIN) * POOL_GRAIN
        for layers, n in sides
        if layers
    ]
    try:
        pool = size_pool(GEOMETRY, want)
    except OutOfMemory:
        assert min(room) < POOL_GRAIN
        return
    assert pool.n_tokens <= min(room)
    comfort = wanted_tokens(GEOMETRY, want)
    assert pool.n_tokens == (min(room) if first + second == 16 else min(comfort, *room))


def test_a_pool_that_was_asked_for_must_fit_on_the_gpu() -> None:
    asked = 64 * POOL_GRAIN * GEOMETRY.token_bytes
    want = request([8], [asked // 2 + (1 << 20)], asked, kv_cache_bytes=asked)
    assert size_pool(GEOMETRY, want).n_tokens == 64 * POOL_GRAIN
    short = request([8], [asked // 4 + (1 << 20)], asked, kv_cache_bytes=asked)
    with pytest.raises(
        OutOfMemory, match=f"{asked // 2} bytes on GPU0.*; {asked // 2} or fewer n_gpu_layers"
    ):
        size_pool(GEOMETRY, short)


@pytest.mark.parametrize("built", [True, False])
def test_a_build_for_gpus_that_finds_none_says_so(
    tiny_model: Path, built: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asks for as many layers as fit gets the CPU; where that may be a mistake, a line too."""
    monkeypatch.setattr(offload, "devices", lambda: ())
    monkeypatch.setattr(
        offload, "system_info", lambda: "CUDA : ARCHS = 900, CPU : AVX2" if built else "CPU : AVX2"
    )
    auto = EngineConfig(model=tiny_model)
    assert plan_offload(auto, str(tiny_model), scan_model(tiny_model)) == NOTHING
    said = [record.getMessage() for record in caplog.records if record.name == "pyvelo"]
    assert len(said) == built
    assert all("CUDA finds no GPU here" in line and "the CPU computes everything" in line for line in said)
    for settings in ({"n_gpu_layers": 0}, {"deterministic": True}):
        none = EngineConfig(model=tiny_model, **settings)  # type: ignore[arg-type]
        assert plan_offload(none, str(tiny_model), scan_model(tiny_model)) == NOTHING
    assert len(caplog.records) == built
