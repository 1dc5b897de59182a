"""The same model and the same tokens three ways: paged, contiguous in the patched tree, and stock.

Prefill in odd pieces, then 200 decode steps; blocks in random places, the pool full of NaN at first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tests import forks

from . import contiguous
from .conftest import MakeModel
from .paged import PagedRunner, nmse

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
CHUNKS = [1, 37, 64, 3, 129, 65, 33]
N_GREEDY = 200
SHAPE = ("--arch", "qwen3", "--layers", "3", "--embd", "256", "--ffn", "512",
         "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--vocab", "none")  # fmt: skip


def tokens_of(n_vocab: int, n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, n_vocab, n).tolist()


def run_contiguous(build: Path, job: contiguous.Job) -> contiguous.Result:
    """Run a job; the patched build may share a process with the package's libraries."""
    if build.stem == "libvelo-lab":
        return contiguous.run(build, job, partial(forks.run, text=True))
    return contiguous.run(build, job)


def run_paged(path: Path, kv: int, tokens: list[int], chunks: list[int], n_greedy: int) -> contiguous.Result:
    """The job of `contiguous.run`, over pages; the state is left empty."""
    logits: list[npt.NDArray[np.float32]] = []
    greedy: list[int] = []
    with PagedRunner(path, type_k=kv, type_v=kv) as runner:
        seq = runner.sequence()
        for chunk in chunks:
            logits.append(runner.step([(seq, tokens[seq.length : seq.length + chunk])])[0])
        for _ in range(n_greedy):
            greedy.append(int(logits[-1].argmax()))
            logits.append(runner.step([(seq, greedy[-1:])])[0])
    return contiguous.Result(np.stack(logits), np.asarray(greedy, np.int32), b"")


@pytest.fixture(scope="module")
def job(make_model: MakeModel) -> contiguous.Job:
    path = make_model(*SHAPE, "--type", "f32")
    with PagedRunner(path) as runner:
        n_vocab = runner.model.info.n_vocab
    tokens = tokens_of(n_vocab, sum(CHUNKS))
    return contiguous.Job(str(path), tokens, CHUNKS, N_GREEDY, type_k=F32, type_v=F32)


def test_f32_equals_stock_to_rounding(job: contiguous.Job, contiguous_build: Path) -> None:
    stock = run_contiguous(contiguous_build, job)
    paged = run_paged(Path(job.model), F32, job.tokens, job.chunks, job.n_greedy)
    assert nmse(stock.logits, paged.logits) <= 1e-7
    np.testing.assert_array_equal(stock.greedy, paged.greedy)


@pytest.mark.parametrize(
    "arch", ["llama", "gemma2", "gemma3", "gemma4", "gpt-oss", "deepseek2", "lfm2", "deci"]
)
def test_every_kind_of_memory(
    arch: str, job: contiguous.Job, make_model: MakeModel, contiguous_build: Path
) -> None:
    """Windows, soft-caps, sinks, experts, latent attention, recurrent states beside attention."""
    window = ("--window", "48") if arch in ("gemma2", "gemma3", "gemma4", "gpt-oss") else ()
    experts = ("--experts", "4") if arch == "gpt-oss" else ()
    path = make_model("--arch", arch, "--layers", "6", *window, *experts, "--type", "f32")
    here = replace(job, model=str(path), tokens=[token % 256 + 3 for token in job.tokens], n_greedy=20)
    stock = run_contiguous(contiguous_build, here)
    paged = run_paged(path, F32, here.tokens, here.chunks, here.n_greedy)
    assert nmse(stock.logits, paged.logits) <= 1e-7
    np.testing.assert_array_equal(stock.greedy, paged.greedy)


def test_f16_weights(job: contiguous.Job, make_model: MakeModel, contiguous_build: Path) -> None:
    path = make_model(*SHAPE, "--type", "f16")
    steered = [
        *job.tokens,
        *tokens_of(300, N_GREEDY, seed=2),
    ]  # the same tokens for both, whatever the argmax
    chunks = [*CHUNKS, *[1] * N_GREEDY]
    stock = run_contiguous(
        contiguous_build, replace(job, model=str(path), tokens=steered, chunks=chunks, n_greedy=0)
    )
    paged = run_paged(path, F32, steered, chunks, 0)
    assert nmse(stock.logits, paged.logits) <= 2e-5


@pytest.mark.parametrize("weights", ["f32", pytest.param("Q4_K_M", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv", [F16, Q8_0, Q4_0])
def test_no_further_from_the_truth_than_stock(
    kv: int,
    weights: str,
    job: contiguous.Job,
    make_model: MakeModel,
    contiguous_build: Path,
    tmp_path: Path,
) -> None:
    """The truth is stock with F32 pages and no flash attention, over what the weights stand for as floats.

    Random weights under Q4_K_M blow any rounding up, so there is no absolute bound: paged must be as near
    to the truth as stock's flash attention over the same KV type. If both round activations to bytes,
    which is nearer over one text is chance (0.96 to 1.05 of stock's distance): sixteen count together. What
    both round alike, as where products are of floats, must bring them nearer to each other than to the truth.
    """
    path = make_model(*SHAPE, "--type", weights)
    chunks = [*CHUNKS, *[1] * N_GREEDY]
    floats = as_floats(path, tmp_path / "floats.gguf")
    found = []
    for seed in (3,) if weights == "f32" else range(3, 19):
        tokens = [*job.tokens, *tokens_of(300, N_GREEDY, seed=seed)]
        exact = replace(job, model=str(floats), tokens=tokens, chunks=chunks, n_greedy=0)
        over_kv = replace(exact, model=str(path), type_k=kv, type_v=kv, flash_attn=True)
        runs = (
            run_contiguous(contiguous_build, exact),
            run_contiguous(contiguous_build, over_kv),
            run_paged(path, kv, tokens, chunks, 0),
        )
        found.append([run.logits[-N_GREEDY:] for run in runs])
    truth, stock, paged = (np.concatenate(logits) for logits in zip(*found, strict=True))
    assert nmse(truth, paged) <= 1.02 * nmse(truth, stock)
    if weights == "f32":
        assert nmse(stock, paged) <= nmse(truth, stock)


def as_floats(source: Path, target: Path) -> Path:
    """The same model with its weights as F32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_fast_attention_costs_little(job: contiguous.Job, make_model: MakeModel) -> None:
    """A prompt's products in bfloat16 move f32 logits as far as bfloat16 does."""
    path = make_model(*SHAPE, "--type", "f32")
    logits = []
    for fast in (False, True):
        with PagedRunner(path, type_k=F16, type_v=F16, fast_attention=fast) as runner:
            logits.append(runner.step([(runner.sequence(), job.tokens)], every=True))
    assert nmse(*logits) <= 1e-3


@pytest.mark.parametrize("kv", [F16, Q8_0, Q4_0])
def test_rows_hold_the_bytes_of_stock(kv: int, make_model: MakeModel, contiguous_build: Path) -> None:
    """One layer: its rows do not depend on attention, so not a bit may differ, rotation included."""
    path = make_model(*SHAPE[:2], "--layers", "1", *SHAPE[4:], "--type", "f32")
    with PagedRunner(path, type_k=kv, type_v=kv) as runner:
        tokens = tokens_of(runner.model.info.n_vocab, sum(CHUNKS))
        seq = runner.sequence()
        for chunk in CHUNKS:
            runner.step([(seq, tokens[seq.length : seq.length + chunk])])
        job = contiguous.Job(
            model=str(path), tokens=tokens, chunks=CHUNKS, type_k=kv, type_v=kv, flash_attn=True
        )
        stock = contiguous.rows_of_state(run_contiguous(contiguous_build, job).state, len(tokens))
        ours = runner.rows(seq, [rows.shape[1] for rows in stock])
    for mine, theirs in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(mine, theirs)
