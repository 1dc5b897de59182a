"""Layers on GPUs, compared with every possibility and with numbers by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.config import EngineConfig
from pyvelo.errors import OutOfMemory
from pyvelo.kv.geometry import POOL_GRAIN, Geometry, LayerGroup, LayerRows, make_geometry
from pyvelo.kv.prefix import FULL
from pyvelo.kv.types import KV_TYPES
from pyvelo.memory import offload
from pyvelo.memory.budget import DeviceRoom, PoolRequest, size_pool, wanted_slots
from pyvelo.memory.offload import NOTHING, find_gpus, plan_offload
from pyvelo.memory.placement import (
    Gpu,
    ModelBytes,
    bytes_by_gpu,
    host_weights,
    most_layers,
    split,
    split_all,
    sum_tensors,
)
from pyvelo.models.gguf_parts import scan_model
from pyvelo.native import Device

sizes = st.integers(0, 1000)


def geometry_of(tokens: list[int]) -> Geometry:
    """Return the geometry of layers with these bytes of a token; all layers are in one group."""
    rows = tuple(LayerRows(number, token, 0) for number, token in enumerate(tokens))
    return Geometry(KV_TYPES["f16"], KV_TYPES["f16"], 32, rows, (LayerGroup(FULL, tuple(range(len(rows)))),))


def windowed(windows: list[int]) -> Geometry:
    """Return the geometry of layers with these windows, whose tokens take 4 bytes each."""
    layers = [SimpleNamespace(**SMALLEST, layer=number, window=size) for number, size in enumerate(windows)]
    return make_geometry("small", layers)


@st.composite
def model_sizes(draw: st.DrawFn) -> ModelBytes:
    weights = draw(st.lists(sizes, max_size=9))
    tokens = st.lists(st.integers(0, 9), min_size=len(weights), max_size=len(weights)).map(geometry_of)
    windows = st.lists(st.sampled_from([0, 64, 4096]), min_size=len(weights), max_size=len(weights))
    return ModelBytes(
        tuple(weights),
        input=draw(sizes),
        output=draw(sizes),
        host_output=draw(sizes),
        scratch=draw(st.integers(0, 300)),
        states=draw(st.integers(0, 50)),
        geometry=draw(tokens | windows.map(windowed) if weights else st.none()),
    )


SMALLEST = {"n_head_kv": 1, "head_dim_k": 1, "head_dim_v": 1, "window_type": 1, "device": 0}
loads = model_sizes()
gpu_lists = st.lists(st.integers(1, 9000), max_size=3).map(
    lambda free: [Gpu(f"GPU{i}", n) for i, n in enumerate(free)]
)


def slot_bytes(geometry: Geometry | None, layers: range) -> int:
    """Return the bytes of a slot on a device with these layers, counted group by group."""
    if geometry is None:
        return 0
    if len(geometry.groups) == 1:
        return sum(row.n_bytes for row in geometry.rows if row.layer in layers)
    kinds = {
        group.window: [g for g in geometry.groups if g.window == group.window] for group in geometry.groups
    }
    most = 0
    for kind in kinds.values():
        held = sum(layer in layers for group in kind for layer in group.layers)
        while most * len(kind) < held:  # each group has room for as many layers
            most += 1
    return most * 4


def bytes_on(sizes: ModelBytes, counts: tuple[int, ...], slots: int) -> list[int]:
    """Return the bytes on each GPU, summed layer by layer."""
    n_layers, part, total = len(sizes.layers), len(sizes.layers) + 1 - sum(counts), []
    for count in counts:
        mine = range(part, min(part + count, n_layers))
        size = sum(sizes.layers[number] for number in mine) + slots * slot_bytes(sizes.geometry, mine)
        size += sizes.output * (part + count > n_layers) * (count > 0)
        total.append(size + (sizes.scratch + sizes.states) * (count > 0))
        part += count
    return total


def fits(sizes: ModelBytes, counts: tuple[int, ...], gpus: list[Gpu], tokens: int, share: float) -> bool:
    return all(
        count == 0 or size <= int(share * gpu.free_bytes)
        for size, count, gpu in zip(bytes_on(sizes, counts, tokens), counts, gpus, strict=True)
    )


def ways(n: int, n_gpus: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to split `n` layers among the GPUs, in order."""
    if n_gpus < 2:
        yield from [(n,)] * n_gpus or [()] * (n == 0)
        return
    for first in range(n + 1):
        yield from ((first, *rest) for rest in ways(n - first, n_gpus - 1))


@given(loads, gpu_lists, st.integers(0, 100), st.sampled_from([0.5, 0.9, 1.0]))
def test_the_most_layers_that_fit(sizes: ModelBytes, gpus: list[Gpu], tokens: int, share: float) -> None:
    possible = {
        n
        for n in range(sizes.n_parts + 1)
        if any(fits(sizes, counts, gpus, tokens, share) for counts in ways(n, len(gpus)))
    }
    assert most_layers(sizes, gpus, tokens, share) == max(possible)
    for n in range(sizes.n_parts + 1):
        counts = split(sizes, n, gpus, tokens, share)
        assert (counts is not None) == (n in possible)
        if counts is not None:
            assert split_all(sizes, n, gpus, tokens, share) == counts
            assert sum(counts) == n
            assert fits(sizes, counts, gpus, tokens, share)
        else:
            with pytest.raises(OutOfMemory, match=f"n_gpu_layers={max(possible)} would fit"):
                split_all(sizes, n, gpus, tokens, share)


@given(loads, gpu_lists, st.integers(0, 10))
def test_a_split_leaves_room_for_the_largest_pool(sizes: ModelBytes, gpus: list[Gpu], n: int) -> None:
    def largest(counts: tuple[int, ...]) -> int:
        low, high = -1, 20000
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(sizes, counts, gpus, middle, 0.9) else (low, middle - 1)
        return low

    n = min(n, sizes.n_parts)
    best = max((largest(counts) for counts in ways(n, len(gpus))), default=-1)
    counts = split(sizes, n, gpus, 0, 0.9)
    assert largest(counts) == best if counts is not None else best == -1


@given(loads, gpu_lists, st.data())
def test_every_weight_is_held_once(sizes: ModelBytes, gpus: list[Gpu], data: st.DataObject) -> None:
    n = data.draw(st.integers(0, sizes.n_parts if gpus else 0))
    counts = data.draw(st.sampled_from(list(ways(n, len(gpus)))))
    found = bytes_by_gpu(sizes, counts, gpus)
    there = sum(held.weights for held in found) - sizes.output * (n > 0)
    here = host_weights(sizes, n) - sizes.input - sizes.host_output * (n == 0)
    assert there + here == sum(sizes.layers)
    assert [layer for held in found for layer in held.layers] == [
        *range(len(sizes.layers) - max(0, n - 1), len(sizes.layers))
    ]
    assert [held.gpu for held in found] == [gpu for gpu, count in zip(gpus, counts, strict=True) if count]
    assert [held.slot for held in found] == [slot_bytes(sizes.geometry, held.layers) for held in found]
    for held, size in zip(found, filter(None, map(bool, counts)), strict=True):
        assert size
        assert held.bytes_for(7) in bytes_on(sizes, counts, 7)


def gpus_of(*free: int) -> list[Gpu]:
    return [Gpu(f"GPU{number}", n, number) for number, n in enumerate(free)]


@pytest.mark.parametrize(
    ("weights", "free", "n", "expected"),
    [
        ([10] * 4, (1000,), 5, (5,)),
        ([10] * 4, (1000,), 2, (2,)),
        ([10] * 8, (500, 500), 9, (4, 5)),  # the output is a tenth part without a cache
        ([10] * 8, (30, 1000), 9, (0, 9)),  # the first GPU has no room for a layer
        ([10] * 8, (1000, 30), 9, (9, 0)),
        ([10] * 8, (1000, 10, 1000), 9, (4, 0, 5)),
        ([100, 10, 10, 10], (155, 130), 5, (1, 4)),
        ([10, 10, 10, 400], (125, 460), 5, (3, 2)),  # as by free memory, the last GPU would get too much
        ([10] * 4, (45, 45), 5, None),
    ],
)
def test_gpus_that_differ(
    weights: list[int], free: tuple[int, ...], n: int, expected: tuple[int, ...] | None
) -> None:
    cache = geometry_of([1] * len(weights))
    sizes = ModelBytes(tuple(weights), 5, output=0, host_output=5, scratch=10, states=15, geometry=cache)
    assert split(sizes, n, gpus_of(*free), 8, 1.0) == expected


def test_bytes_of_tensors() -> None:
    tensors = {
        "token_embd.weight": 100,
        "blk.0.attn_q.weight": 10,
        "blk.1.attn_q.weight": 11,
        "blk.10.attn_q.weight": 20,
        "output_norm.weight": 1,
    }
    sizes = sum_tensors(tensors.items(), 11, None, 7)
    assert sizes.layers == (10, 11, *[0] * 8, 20)
    assert (sizes.input, sizes.output, sizes.host_output) == (100, 101, 1)
    untied = sum_tensors([*tensors.items(), ("output.weight", 50)], 11, None, 7)
    assert (untied.input, untied.output, untied.host_output) == (100, 51, 51)


def test_an_error_has_the_numbers() -> None:
    sizes = ModelBytes((100, 100), 10, 20, 20, 5, geometry=geometry_of([2, 2]))
    with pytest.raises(OutOfMemory) as raised:
        split_all(sizes, 3, [Gpu("CUDA0", 300)], 30, 0.9)
    for number in (
        "takes 340 bytes", "220 for weights", "120 for the KV cache", "5 to compute", "270 of 300 on CUDA0"
    ):  # fmt: skip
        assert number in str(raised.value)
    assert 'n_gpu_layers=2 would fit, and "auto" finds it' in str(raised.value)


def test_the_gpus_that_are_used() -> None:
    def device(name: str, kind: Any) -> Device:
        return Device(name, "", kind, 9, 5)

    cpu, blas = device("CPU", "cpu"), device("BLAS", "accelerator")
    shared, own = device("V0", "igpu"), [device("CUDA0", "gpu"), device("CUDA1", "gpu")]
    assert find_gpus([cpu, blas]) == ()
    assert find_gpus([cpu, shared, device("V1", "igpu")]) == (Gpu("V0", 5, 1),)
    found = find_gpus([own[0], cpu, shared, own[1]])
    assert [(gpu.name, gpu.device) for gpu in found] == [("CUDA0", 0), ("CUDA1", 3)]


# ---- one number of blocks for all devices ----


class Shape:
    def __init__(self, layer: int) -> None:
        self.layer, self.n_head_kv, self.head_dim_k, self.head_dim_v = layer, 8, 64, 64
        self.window = self.window_type = self.device = 0


GEOMETRY = make_geometry("small", [Shape(i) for i in range(16)])
LAYOUT = GEOMETRY.layout(512)
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
def test_the_pool_fits_on_every_device(first: int, second: int, free: int, free_too: int, host: int) -> None:
    want = request([first, second], [free, free_too], host)
    sides = [(first, free), (second, free_too), (16 - first - second, host)]
    room = [
        (int(0.9 * n) - (1 << 20)) // (layers * TOKEN * POOL_GRAIN) * POOL_GRAIN
        for layers, n in sides
        if layers
    ]
    try:
        pool = size_pool(GEOMETRY, LAYOUT, want)
    except OutOfMemory:
        assert min(room) < POOL_GRAIN
        return
    assert pool.n_tokens <= min(room)
    usual = wanted_slots(GEOMETRY, LAYOUT, want)
    assert pool.n_tokens == (min(room) if first + second == 16 else min(usual, *room))


def test_a_requested_pool_must_fit_on_the_gpu() -> None:
    asked = 64 * POOL_GRAIN * GEOMETRY.token_bytes
    want = request([8], [asked // 2 + (1 << 20)], asked, kv_cache_bytes=asked)
    assert size_pool(GEOMETRY, LAYOUT, want).n_tokens == 64 * POOL_GRAIN
    short = request([8], [asked // 4 + (1 << 20)], asked, kv_cache_bytes=asked)
    with pytest.raises(
        OutOfMemory, match=f"{asked // 2} bytes on GPU0.*; {asked // 2} or fewer n_gpu_layers"
    ):
        size_pool(GEOMETRY, LAYOUT, short)


@pytest.mark.parametrize("built", [True, False])
def test_a_build_for_gpus_without_one_logs_a_warning(
    tiny_model: Path, built: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With "auto" and no GPU the CPU computes. A build for GPUs logs a warning."""
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
