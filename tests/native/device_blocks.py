"""Run by test_device_blocks.py in its own process: blocks of a pool that is half on a device."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from pyvelo.errors import ConfigError, OutOfMemory
from pyvelo.native import Context, Model, StepArrays, devices
from tests import lab_device
from tests.native.steps import Seq, logits_of, run

N_BLOCKS = 32


def open_context(model: Model, n_swap_blocks: int = 24) -> Context:
    return Context(model, n_blocks=N_BLOCKS, max_seqs=4, max_seq_len=256, n_swap_blocks=n_swap_blocks)


def fill(context: Context, rng: np.random.Generator) -> np.ndarray:
    """Write different bytes to every block. Return them."""
    data = rng.integers(0, 256, (N_BLOCKS, context.info.block_bytes), np.uint8)
    context.write_blocks(range(N_BLOCKS), data)
    return data


def check_pool(context: Context, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(context.read_blocks(range(N_BLOCKS)), expected)


def check_copies(context: Context, rng: np.random.Generator) -> None:
    """Compare with NumPy's copies of rows: neighbours, copies of copies, blocks copied to themselves."""
    lists = [
        ([1], [7]),
        ([3], [3]),
        ([0, 1, 2, 3], [8, 9, 10, 11]),
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6], [3, 4, 5]),
        ([5, 6, 1], [6, 1, 5]),
    ]
    lists += [tuple(rng.integers(0, N_BLOCKS, (2, n)).tolist()) for n in (1, 2, 5, 20, 40)]
    for sources, targets in lists:
        data = fill(context, rng)
        before = lab_device.counts().reads
        context.copy_blocks(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            data[target] = data[source]
        assert lab_device.counts().reads == before, "no byte went through the host"
        check_pool(context, data)


def check_swap(context: Context, rng: np.random.Generator) -> None:
    """Blocks are the same after swaps out and in, with any swap blocks, although the pool is overwritten."""
    for _ in range(12):
        data, n = fill(context, rng), int(rng.integers(1, 20))
        blocks = rng.permutation(N_BLOCKS)[:n] if rng.integers(2) else np.arange(n) + 3
        swap_blocks = rng.permutation(24)[:n] if rng.integers(2) else np.arange(n) + 4
        context.swap_out(blocks.tolist(), swap_blocks.tolist())
        context.fill_blocks(blocks.tolist(), 0xFF)
        back = rng.permutation(N_BLOCKS)[:n]
        kept = data.copy()
        kept[blocks] = 0xFF
        check_pool(context, kept)
        context.swap_in(swap_blocks.tolist(), back.tolist())
        kept[back] = data[blocks]
        check_pool(context, kept)


def check_shared(context: Context, n_layers_there: int) -> None:
    """The device gets the shared blocks of sequences. A step of three sequences has two shared prefixes."""
    arrays = StepArrays(max_tokens=200, max_seqs=4, max_width=8, max_copies=0)
    work = [
        (Seq([4, 5, 6, 7], 100), [1]),
        (Seq([4, 5, 6, 9, 10], 128), [2]),
        (Seq([4, 5, 8], 70), [3, 4]),
        (Seq([9], 20), [5]),
    ]
    before = lab_device.counts().shared
    run(context, arrays, work)
    logits_of(context, len(work))
    assert lab_device.counts().shared - before == (3 + 2) * n_layers_there


def check_refusals(context: Context, model: Model) -> None:
    for call, message in (
        (lambda: context.swap_out([0], [24]), "swapped block 24 does not exist; there are 24"),
        (lambda: context.swap_in([-1], [0]), "swapped block -1"),
        (lambda: context.swap_out([N_BLOCKS], [0]), "block 32 is not in the pool"),
        (lambda: context.swap_in([0, 1], [0]), "2 blocks cannot be copied to 1"),
        (lambda: open_context(model, 0).swap_out([0], [0]), "there are 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def main(path: str, n_gpu_layers: int, n_layers_there: int) -> None:
    rng = np.random.default_rng(n_gpu_layers + 1)
    with Model(path, n_gpu_layers=n_gpu_layers) as model:
        gpus = [i for i, device in enumerate(devices()) if device.kind == "gpu"]
        assert sum(layer.device in gpus for layer in model.layers) == n_layers_there
        before = lab_device.counts()
        with open_context(model, 0):
            without_swap = lab_device.counts().pinned
        with open_context(model) as context:
            info = context.info
            held = {memory.device: memory.pool_bytes for memory in context.memory}
            there = sum(held.get(gpu, 0) for gpu in gpus)
            assert sum(held.values()) == info.pool_bytes
            assert there == info.pool_bytes * n_layers_there // len(model.layers)
            pinned = lab_device.counts().pinned - without_swap
            assert pinned == (24 * info.block_bytes if n_layers_there else 0)
            check_copies(context, rng)
            check_swap(context, rng)
            check_shared(context, n_layers_there)
            check_refusals(context, model)
        assert lab_device.counts().pinned == before.pinned
        if n_layers_there:
            with pytest.raises(OutOfMemory, match="MiB of LAB0 are free"):
                Context(model, n_blocks=1 << 15, max_seq_len=256)


if __name__ == "__main__":
    lab_device.add_device(64 << 20)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
