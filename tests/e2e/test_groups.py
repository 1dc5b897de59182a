"""Contexts whose layers are in several groups: what is refused, and that groups change no logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pyvelo.errors import ConfigError, UnsupportedError
from pyvelo.kv.geometry import make_geometry
from pyvelo.native import Context, Model, StepArrays

from .conftest import MakeModel
from .paged import PagedRunner

GEMMA = ("tiny", "--arch", "gemma3", "--layers", "7", "--window", "48", "--type", "f32")
FULL, N_LAYERS = 5, 7  # the layer without a window, and all


@pytest.fixture
def gemma(make_model: MakeModel) -> Path:
    return make_model(*GEMMA)


def gemma4(kv_heads: str) -> tuple[str, ...]:
    """Return arguments for Gemma 4 with two layers without a window among seven."""
    heads = ("--kv-heads", kv_heads, "--head-dim", "32")
    return ("tiny", "--arch", "gemma4", "--layers", "7", "--period", "3", *heads, "--type", "f32")


def open_context(model: Model, layer_groups: Sequence[int]) -> Context:
    return Context(
        model, n_blocks=64, max_batch_tokens=64, max_seqs=2, max_seq_len=256, layer_groups=layer_groups
    )


def test_the_nth_layers_of_all_groups_share_memory(gemma: Path) -> None:
    with Model(gemma) as model:
        geometry = make_geometry("gemma", model.layers, "f16")
        with open_context(model, ()) as one, open_context(model, geometry.layer_groups) as many:
            assert (one.info.n_groups, many.info.n_groups) == (1, N_LAYERS)
            assert one.info.block_bytes == N_LAYERS * many.info.block_bytes
            assert many.info.block_bytes == geometry.block_bytes
            assert one.info.pool_bytes == N_LAYERS * many.info.pool_bytes


@pytest.mark.parametrize(("kv_heads", "sizes"), [("1", [2, 3, 2]), ("4", [2, 1, 1, 1, 1, 1])])
def test_layers_with_shorter_rows_share_a_block(
    make_model: MakeModel, kv_heads: str, sizes: list[int]
) -> None:
    with Model(make_model(*gemma4(kv_heads), "--window", "48")) as model:
        geometry = make_geometry("gemma", model.layers, "f16")
        assert [len(group.layers) for group in geometry.groups] == sizes
        with open_context(model, geometry.layer_groups) as context:
            assert context.info.block_bytes == geometry.block_bytes
        # rows of several lengths in one cache, or in one group
        for groups in ([0, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1, 1]):
            with pytest.raises(UnsupportedError):
                open_context(model, groups).close()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([0] * 6, "layer_groups has 6 entries, none for layer 6"),
        ([0, 0, 0, -1, 0, 0, 0], "layer 3 is in group -1"),
        ([0, 0, 0, 7, 0, 0, 0], "layer 3 is in group 7"),
        ([0, 0, 0, 2, 0, 0, 0], "names group 2, but only 2 groups have a layer"),
    ],
)
def test_groups_that_do_not_exist(gemma: Path, groups: list[int], message: str) -> None:
    with Model(gemma) as model, pytest.raises(UnsupportedError, match=message):
        open_context(model, groups)


def logits_after(path: Path, tokens: list[int], window: int, *, windows: bool) -> npt.NDArray[np.float32]:
    """Return the logits after chunks that are several windows long, and after some single tokens."""
    found = []
    with PagedRunner(path, type_k=0, type_v=0, n_blocks=32, windows=windows, deterministic=True) as runner:
        seq, other = runner.sequence(), runner.sequence()
        for size in (1, 100, 37, 64, 130, *[1] * 40):
            chunk = tokens[seq.length : seq.length + size]
            found.append(runner.step([(other, [5]), (seq, chunk)])[1])
        assert seq.tables[0], "the last block is never freed"
        if windows:
            assert max(map(len, seq.tables[1:])) <= window // 32 + 2, "blocks behind a window are freed"
    return np.stack(found)


@pytest.mark.parametrize(
    ("arch", "window"),
    [
        *[("gemma3", window) for window in (1, 32, 48, 200)],
        ("gemma4 1", 48),
        ("gemma4 4", 1),
        ("gemma4 4", 48),
    ],
)
def test_freed_blocks_change_no_bit(make_model: MakeModel, arch: str, window: int) -> None:
    """In Gemma 4, rows without a window are twice as long with one KV head, and half as long with four."""
    if arch == "gemma3":
        path = make_model(*GEMMA[:5], "--window", str(window), "--type", "f32")
    else:
        path = make_model(*gemma4(arch[-1]), "--window", str(window))
    tokens = np.random.default_rng(3).integers(10, 1000, 400).tolist()
    whole, trimmed = (logits_after(path, tokens, window, windows=windows) for windows in (False, True))
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(whole, trimmed)


def test_tables_of_another_number_of_groups(gemma: Path) -> None:
    with Model(gemma) as model, open_context(model, [1] * FULL + [0, 1]) as context:
        arrays = StepArrays(max_tokens=64, max_seqs=2, max_width=8, max_copies=0, n_groups=3)
        arrays.tokens[0], arrays.outputs[0] = 5, 1
        arrays.tables[:, 0, 0], arrays.seqs[0] = 0, (0, 1, 1, 0)
        with pytest.raises(ConfigError, match="tables for 2 groups of layers, got 3"):
            context.run(arrays, 1, 1)


@pytest.mark.parametrize(("group", "most"), [(0, 0), (1, 1)])
def test_tables_that_begin_too_late(gemma: Path, group: int, most: int) -> None:
    """A table begins at block 0, or at most where the window of the first query begins."""
    with Model(gemma) as model, open_context(model, [1] * FULL + [0, 1]) as context:
        arrays = StepArrays(max_tokens=64, max_seqs=2, max_width=8, max_copies=0, n_groups=2)
        arrays.tokens[0], arrays.positions[0], arrays.outputs[0] = 5, 95, 1
        arrays.seqs[0] = 0, 1, 96, 0  # the query at 95 attends 48 to 95 in a window
        for g in range(2):
            arrays.tables[g, 0, :3] = 3 * g, 3 * g + 1, 3 * g + 2
            arrays.slots[g, 0] = (3 * g + 2) * 32 + 31
        context.run(arrays, 1, 1)
        if most:  # without its first block
            arrays.firsts[group, 0] = most
            arrays.tables[group, 0, :2] = arrays.tables[group, 0, 1:3]
            context.run(arrays, 1, 1)
        for wrong in (most + 1, -1, 2**31 - 1, -(2**31)):
            arrays.firsts[group, 0] = wrong
            with pytest.raises(ConfigError, match=f"must begin with block 0 to {most} because of its window"):
                context.run(arrays, 1, 1)
