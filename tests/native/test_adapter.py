"""Adapters in C: what passes the checks never aborts, and an adapter of another model is refused."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyvelo.errors import ClosedError, ConfigError, ModelError, UnsupportedError, VeloError
from pyvelo.models.gguf_parts import scan_model
from pyvelo.models.lora import AdaptedModel, check_lora
from pyvelo.native import Adapter, Context, Embedder, Model, StepArrays, adapt
from pyvelo.native._ffi import check, ffi, lib
from scripts.models import lora, make
from tests import forks
from tests.models.test_lora import GOOD, Q, damaged, write

from .steps import Seq, run


@pytest.fixture
def context(model: Model) -> Context:
    return Context(model, n_blocks=8, max_seq_len=64, n_threads=1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("adapter") / "good.gguf", GOOD)


@contextlib.contextmanager
def freed_memory_overwritten() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    set_option, perturb = ctypes.CDLL(None).mallopt, -6
    set_option(perturb, 0xA5)
    try:
        yield
    finally:
        set_option(perturb, 0)


def test_load_apply_and_close(model: Model, context: Context, good: Path) -> None:
    adapter = Adapter(model, good, name="good", scale=0.5)
    assert adapter.n_bytes >= 2 * (8 * 256 + 256 * 8) * 4
    adapt(context, adapter)
    adapt(context, adapter)
    adapt(context, None)
    adapt(context, adapter)
    adapter.close()
    adapter.close()
    assert adapter.closed
    with pytest.raises(ClosedError, match="the adapter 'good' was unloaded"):
        adapt(context, adapter)


def test_logits_of_the_last_step_stay(model: Model, context: Context, tmp_path: Path) -> None:
    arrays = StepArrays(max_tokens=16, max_seqs=1, max_width=2, max_copies=1)
    run(context, arrays, [(Seq([0]), list(range(16)))])
    before = context.logits(0)
    wide = write(tmp_path / "wide.gguf", {Q: ((4096, 256), (256, 4096))})
    with freed_memory_overwritten():
        adapt(context, Adapter(model, wide))  # the largest graph takes more memory, so all graphs move
    np.testing.assert_array_equal(context.logits(0), before)
    run(context, arrays, [(Seq([1]), list(range(16)))])
    assert not np.array_equal(context.logits(0), before)


def test_the_adapter_of_another_model(context: Context, tiny_model_f32: Path, good: Path) -> None:
    with Model(tiny_model_f32) as other:
        adapter = Adapter(other, good)
        with pytest.raises(ConfigError, match="was loaded for another model"):
            adapt(context, adapter)
        with Embedder(other, max_tokens=8) as embedder:
            adapt(embedder, adapter)


def test_a_scale_that_is_not_finite(model: Model, context: Context, good: Path) -> None:
    with pytest.raises(ConfigError, match="must be finite"):
        adapt(context, Adapter(model, good, scale=float("nan")))


def test_null_arguments(model: Model, good: Path) -> None:
    out, n_bytes = ffi.new("velo_adapter **"), ffi.new("int64_t *")
    path = str(good).encode()
    calls = (
        lambda: lib.velo_adapter_load(ffi.NULL, path, out, n_bytes),
        lambda: lib.velo_adapter_load(model.handle, ffi.NULL, out, n_bytes),
        lambda: lib.velo_adapter_load(model.handle, path, ffi.NULL, n_bytes),
        lambda: lib.velo_adapter_load(model.handle, path, out, ffi.NULL),
        lambda: lib.velo_context_adapt(ffi.NULL, ffi.NULL, 1.0),
        lambda: lib.velo_embedder_adapt(ffi.NULL, ffi.NULL, 1.0),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="is NULL"):
            check(call())


@pytest.mark.parametrize(
    ("name", "shape", "arch"),
    [
        ("blk.0.attn_q.weight", ((8, 128), (256, 8)), "llama"),
        ("blk.0.attn_q.weight", ((8, 256), (256, 4)), "llama"),
        ("blk.7.attn_q.weight", ((8, 256), (256, 8)), "llama"),
        ("blk.0.attn_q.weight", ((8, 256), (256, 8)), "qwen3"),
    ],
)
def test_files_that_upstream_refuses(
    name: str, shape: tuple[tuple[int, ...], tuple[int, ...]], arch: str, model: Model, tmp_path: Path
) -> None:
    """Also without the checks in Python there is an error with upstream's reason."""
    with pytest.raises(ModelError, match="cannot be loaded: "):
        Adapter(model, write(tmp_path / "wrong.gguf", {name: shape}, arch))
    with pytest.raises(ModelError, match="cannot be loaded: "):
        Adapter(model, tmp_path / "absent.gguf")


def test_what_upstream_asserts_is_an_error(model: Model, context: Context, tmp_path: Path) -> None:
    """Without the checks in Python: an abort of upstream while it reads a file, or builds a graph."""
    arrays = StepArrays(max_tokens=16, max_seqs=1, max_width=2, max_copies=1)
    run(context, arrays, [(Seq([0]), list(range(16)))])
    logits = context.logits(0)
    with pytest.raises(ModelError, match="cannot be loaded: "):
        Adapter(model, write(tmp_path / "alpha.gguf", GOOD, adapter__lora__alpha="x"))
    tied = {"token_embd.weight": ((1096, 8), (256, 8))}  # the output layer multiplies with it, too
    adapter = Adapter(model, write(tmp_path / "tied.gguf", tied))
    with pytest.raises(UnsupportedError, match="the model's graph does not take it"):
        adapt(context, adapter)
    np.testing.assert_array_equal(context.logits(0), logits)
    with pytest.raises(ConfigError, match="row 1 is not one of the 1 outputs"):
        context.logits(1)
    good = Adapter(model, write(tmp_path / "good.gguf", GOOD))
    adapt(context, good)  # the context is as before


def test_a_weight_that_the_graph_does_not_adapt(tmp_path: Path) -> None:
    """Upstream would leave out this part of an adapter without a word."""
    path = tmp_path / "experts.gguf"
    assert make.main(["--arch", "lfm2", "--layers", "2", "--type", "f32", str(path)]) == 0
    name = next(t.name for t in scan_model(path).tensors if "shortconv.conv" in t.name)
    shape = {t.name: t.shape for t in scan_model(path).tensors}[name]
    pair = {name: ((2, shape[0]), (shape[1], 2))}
    adapter_path = write(tmp_path / "conv.gguf", pair, "lfm2")
    check_lora(adapter_path, AdaptedModel.of(scan_model(path)))
    with (
        Model(path) as model,
        Context(model, n_blocks=8, max_seq_len=64, max_seqs=2) as context,
        pytest.raises(UnsupportedError, match=f"applies no adapter to {name}"),
    ):
        adapt(context, Adapter(model, adapter_path))


def load_damaged(model_path: str, folder: str, seeds: range) -> int:
    """Load damaged adapters and build graphs with them; return how many that worked for."""
    adapted, path = AdaptedModel.of(scan_model(model_path)), Path(folder) / "bad.gguf"
    kinds = ("f32", "q8_0")
    good = {kind: write(Path(folder) / f"{kind}.gguf", GOOD, type_name=kind).read_bytes() for kind in kinds}
    n_loaded = n_asserts = 0
    with Model(model_path) as model, Context(model, n_blocks=8, max_seq_len=64, n_threads=1) as context:
        for seed in seeds:
            rng = random.Random(seed)
            path.write_bytes(damaged(good[rng.choice(kinds)], rng))
            try:
                check_lora(path, adapted)
                adapter = Adapter(model, path)
                adapt(context, adapter)
            except VeloError as error:
                n_asserts += "GGML_ASSERT" in str(error)
            else:
                n_loaded += 1
    assert not n_asserts
    return n_loaded


def test_damaged_files_never_abort(tiny_model_f32: Path, tmp_path: Path) -> None:
    """With the checks in Python, no assertion of upstream is even reached."""
    code = (
        "from tests.native.test_adapter import load_damaged as load; "
        f"print(load({str(tiny_model_f32)!r}, {str(tmp_path)!r}, range(1000, 1600)))"
    )
    done = forks.run([sys.executable, "-c", code], text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 10, "some damage changes nothing that matters"


def test_memory_of_many_loads(model: Model, context: Context, good: Path) -> None:
    adapters = [Adapter(model, good) for _ in range(50)]
    for adapter in adapters:
        adapt(context, adapter)
    before = context.info.compute_bytes
    for adapter in adapters:
        adapt(context, adapter)
        adapter.close()
    assert context.info.compute_bytes == before
    assert np.isfinite(before)


def test_the_script_writes_what_the_check_takes(tiny_model_f32: Path, tmp_path: Path) -> None:
    pairs = lora.random_pairs(tiny_model_f32, 4)
    lora.write_adapter(tmp_path / "a.gguf", "llama", pairs, alpha=2.0, type_name="f16")
    found = check_lora(tmp_path / "a.gguf", AdaptedModel.of(scan_model(tiny_model_f32)))
    assert (found.n_weights, found.rank) == (14, 4)
