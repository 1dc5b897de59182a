"""Whole models whose heads have unusual shapes: not grouped, or wider than the kernels over codes take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pyvelo import LLM, SamplingParams

from .conftest import MakeModel
from .paged import PagedRunner, nmse

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
QUANTIZED = {"q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}


@pytest.fixture
def ungrouped(make_model: MakeModel) -> Path:
    """A KV head for each query head: 32 query rows fit an item of the decode kernel."""
    return make_model(
        "--arch", "llama", "--heads", "4", "--kv-heads", "4", "--head-dim", "96", "--type", "f16"
    )


def test_many_equal_prompts_without_grouped_heads(ungrouped: Path) -> None:
    """24 requests that share 640 tokens, and 24 samples of one: each answers as the others do."""
    prompt = np.random.default_rng(1).integers(5, 250, 641).tolist()
    with LLM(ungrouped, n_ctx=1024, n_threads=2) as llm:
        outputs = llm.generate([prompt] * 24, GREEDY)
        assert len({output.token_ids for output in outputs}) == 1
        params = SamplingParams(n=24, max_tokens=20, temperature=0, ignore_eos=True)
        samples = llm.generate(prompt, params)[0].outputs
        assert {sample.token_ids for sample in samples} == {outputs[0].token_ids}


def logits_of(path: Path, kv: int, tokens: list[int], deterministic: bool) -> npt.NDArray[np.float32]:
    """The logits after a prompt in pieces and after each further token."""
    logits = []
    with PagedRunner(path, type_k=kv, type_v=kv, n_blocks=8, deterministic=deterministic) as runner:
        seq = runner.sequence()
        for n in (33, 5, 20, *[1] * 4):
            logits.append(runner.step([(seq, tokens[seq.length : seq.length + n])])[0])
    return np.stack(logits)


@pytest.mark.parametrize("kv_type", QUANTIZED)
@pytest.mark.parametrize("d", [608, 640, 672, 1024, 4096])
def test_wide_heads_over_quantized_pages(d: int, kv_type: str, make_model: MakeModel) -> None:
    """Kernels for few query rows against kernels for many, which deterministic mode always takes.

    Both may round queries to 8 bits, differently: the logits are up to 2e-4 apart.
    """
    shape = ("--layers", "1", "--embd", "64", "--ffn", "64", "--heads", "2", "--kv-heads", "1")
    path = make_model("--arch", "llama", *shape, "--head-dim", str(d), "--type", "f32")
    tokens = np.random.default_rng(2).integers(5, 250, 62).tolist()
    expected = logits_of(path, QUANTIZED[kv_type], tokens, deterministic=True)
    assert nmse(expected, logits_of(path, QUANTIZED[kv_type], tokens, deterministic=False)) <= 5e-4
