"""Logits with an adapter equal the logits of a model whose weights contain the adapter's product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyvelo.models.gguf_parts import scan_model
from pyvelo.models.lora import AdaptedModel, check_lora
from pyvelo.native import Adapter, Embedder, Model
from pyvelo.native import adapt as apply
from scripts.models import lora
from scripts.models.make import import_gguf

from .conftest import MakeModel
from .loras import SMALL, adapt
from .paged import PagedRunner, nmse

PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 300, 70)]


def logits(path: Path, adapter: Path | None = None, scale: float = 1.0, *, deterministic: bool = False,
           cuts: tuple[int, ...] = (33, 69, 70)) -> np.ndarray:  # fmt: skip
    with PagedRunner(path, type_k=0, type_v=0, deterministic=deterministic) as runner:
        if adapter is not None:
            check_lora(adapter, AdaptedModel.of(scan_model(path)))
            loaded = Adapter(runner.model, adapter, scale=scale)
            apply(runner.context, loaded)
        seq, rows, at = runner.sequence(), [], 0
        for cut in cuts:
            rows.append(runner.step([(seq, PROMPT[at:cut])], every=True))
            at = cut
    return np.concatenate(rows)


def assert_equal_to_merged(got: np.ndarray, path: Path, merged: Path, limit: float = 1e-8) -> None:
    wanted, base = logits(merged), logits(path)
    assert nmse(base, wanted) > 1e-3, "the adapter changes the logits"
    assert nmse(wanted, got) < limit


@pytest.mark.parametrize(
    "shape",
    [
        ("--arch", "llama", *SMALL),
        ("--arch", "llama", *SMALL, "--experts", "4"),
        ("--arch", "qwen2", *SMALL),
        ("--arch", "qwen3", *SMALL),
        ("--arch", "gemma2", *SMALL),
        ("--arch", "gemma3", *SMALL, "--window", "32"),
        ("--arch", "gpt-oss", *SMALL, "--experts", "4", "--window", "32"),
        ("--arch", "lfm2", *SMALL),
    ],
    ids=lambda shape: "-".join(str(part).strip("-") for part in (shape[1], *shape[12:])),
)
def test_logits_equal_merged_weights(shape: tuple[str, ...], make_model: MakeModel, tmp_path: Path) -> None:
    files = adapt(make_model(*shape, "--type", "f32"), tmp_path)
    assert_equal_to_merged(logits(files.model, files.adapter), files.model, files.merged)


@pytest.mark.parametrize("weights", [r"token_embd\.weight", r"output\.weight", r".*attn_v\.weight"])
def test_each_kind_of_weight(weights: str, make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("--arch", "llama", *SMALL, "--untied", "--type", "f32")
    files = adapt(model, tmp_path, weights=weights, gain=2.0)
    assert_equal_to_merged(logits(model, files.adapter), model, files.merged)


@pytest.mark.parametrize(("alpha", "scale"), [(16.0, 1.0), (4.0, 0.5), (None, 2.0), (8.0, -1.0)])
def test_alpha_and_scale(alpha: float | None, scale: float, make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("--arch", "llama", *SMALL, "--type", "f32")
    files = adapt(model, tmp_path, alpha=alpha, scale=scale)
    assert_equal_to_merged(logits(model, files.adapter, scale), model, files.merged)


@pytest.mark.parametrize(("type_name", "limit"), [("f16", 1e-6), ("bf16", 1e-4), ("q8_0", 1e-3)])
def test_types_of_adapters(type_name: str, limit: float, make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("--arch", "llama", *SMALL, "--type", "f32")
    files = adapt(model, tmp_path, type_name=type_name)
    assert_equal_to_merged(logits(model, files.adapter), model, files.merged, limit)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("type_name", ["q4_0", "q8_0", "Q4_K_M"])
def test_quantized_and_packed_weights(
    deterministic: bool, type_name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """With an adapter, quantized weights are not less exact than without one."""
    shape = ("--arch", "llama", "--layers", "2", "--embd", "256", "--ffn", "512", "--untied")
    model = make_model(*shape, "--type", type_name)
    quants, plain = import_gguf().quants, tmp_path / "plain.gguf"
    exact = make_model(*shape, "--type", "f32")
    data, values = bytearray(exact.read_bytes()), {}
    for tensor in import_gguf().GGUFReader(model).tensors:
        values[tensor.name] = quants.dequantize(tensor.data, tensor.tensor_type)
    for tensor in import_gguf().GGUFReader(exact).tensors:  # f32, with the values of the quantized weights
        start = int(tensor.data_offset)
        data[start : start + int(tensor.n_bytes)] = values[tensor.name].astype("<f4").tobytes()
    plain.write_bytes(data)
    files = adapt(plain, tmp_path)
    error_of_base = nmse(logits(plain), logits(model, deterministic=deterministic))
    got = logits(model, files.adapter, deterministic=deterministic)
    assert nmse(logits(files.merged), got) < 3 * error_of_base + 1e-9
    assert nmse(logits(plain), got) > 1e-2


def test_the_deterministic_mode_has_the_same_bits_for_any_chunks(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model("--arch", "llama", *SMALL, "--type", "q8_0")
    files = adapt(
        make_model("--arch", "llama", *SMALL, "--type", "f32"), tmp_path, merge=False, type_name="f16"
    )
    one, other = (
        logits(model, files.adapter, deterministic=True, cuts=cuts) for cuts in ((70,), (1, 2, 31, 64, 70))
    )
    np.testing.assert_array_equal(one, other)


def test_steps_with_and_without_an_adapter_alternate(make_model: MakeModel, tmp_path: Path) -> None:
    """Steps of the same sizes could reuse the graph of another adapter."""
    model = make_model("--arch", "llama", *SMALL, "--type", "f32")
    first, second = (adapt(model, tmp_path, name=name, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    paths = (model, first.merged, second.merged)
    alone = [logits(path, cuts=(*range(60, 71),)) for path in paths]
    with PagedRunner(model, type_k=0, type_v=0) as runner:
        loaded = [Adapter(runner.model, files.adapter) for files in (first, second)]
        seqs, rows = [runner.sequence() for _ in range(3)], [[], [], []]
        at = 0
        for cut in range(60, 71):
            for number, adapter in enumerate((None, *loaded)):
                apply(runner.context, adapter)
                rows[number].append(runner.step([(seqs[number], PROMPT[at:cut])], every=True))
            at = cut
        for number in range(3):
            assert nmse(alone[number], np.concatenate(rows[number])) < 1e-9
        before = runner.context.timings.n_graphs_reused
        for _ in range(4):
            apply(runner.context, loaded[0])  # again: nothing changes
            runner.step([(seqs[1], [5])])
        assert runner.context.timings.n_graphs_reused > before


def test_vectors_equal_merged_weights(make_model: MakeModel, tmp_path: Path) -> None:
    for arch in ("llama", "bert"):
        kv = ("--kv-heads", "4") if arch == "bert" else ()
        model = make_model("--arch", arch, *SMALL, *kv, "--type", "f32")
        files = adapt(model, tmp_path, weights=r"blk\.\d+\.(attn_(q|v)|ffn_(up|down))\.weight")
        with Model(model) as base, Model(files.merged) as merged:
            one, other = (Embedder(each, max_tokens=100, n_threads=1) for each in (base, merged))
            wanted, plain = other.embed([PROMPT], 1), one.embed([PROMPT], 1)
            assert nmse(plain, wanted) > 1e-3
            adapter = Adapter(base, files.adapter)
            apply(one, adapter)
            # the attention of some processors' kernels reads K and V in 16 bits
            assert nmse(wanted, one.embed([PROMPT], 1)) < 1e-7
            apply(one, None)
            np.testing.assert_array_equal(plain, one.embed([PROMPT], 1))


def test_an_adapter_outlives_its_names(make_model: MakeModel, tmp_path: Path) -> None:
    """A context keeps the adapter that it applies, whatever is closed first."""
    model = make_model("--arch", "llama", *SMALL, "--type", "f32")
    files = adapt(model, tmp_path)
    with PagedRunner(model, type_k=0, type_v=0) as runner:
        adapter = Adapter(runner.model, files.adapter)
        apply(runner.context, adapter)
        adapter.close()
        runner.model.close()
        got = runner.step([(runner.sequence(), PROMPT)], every=True)
    assert nmse(logits(files.merged), got) < 1e-9


def test_the_script_merges_as_this_oracle_does(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("--arch", "llama", *SMALL, "--type", "f32")
    pairs = lora.random_pairs(model, 4, r"blk\.0\.attn_q\.weight")
    ((name, (a, b)),) = pairs.items()
    lora.write_merged(model, tmp_path / "merged.gguf", pairs, 0.5)
    old, new = (
        next(t for t in import_gguf().GGUFReader(path).tensors if t.name == name).data
        for path in (model, tmp_path / "merged.gguf")
    )
    np.testing.assert_allclose(new, old + 0.5 * (b @ a), rtol=0, atol=1e-6)
