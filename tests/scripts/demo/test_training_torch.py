"""The demo model's training with PyTorch: it computes what PyVelo computes, learns, and resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyvelo import LLM, SamplingParams

torch = pytest.importorskip("torch")

from scripts.demo._export import write_gguf  # noqa: E402
from scripts.demo._model import hidden, initial  # noqa: E402
from scripts.demo._optimize import orthogonal  # noqa: E402
from scripts.demo._shape import Config  # noqa: E402
from scripts.demo._training import Plan, Training  # noqa: E402
from scripts.demo._vocab import BOS, Vocab, demo_vocab, spoken  # noqa: E402


@pytest.fixture(scope="module")
def vocab() -> Vocab:
    return demo_vocab()


def small(vocab: Vocab) -> Config:
    return Config(len(vocab), width=64, layers=2, ffn=64)


def test_pyvelo_says_what_the_training_computes(vocab: Vocab, tmp_path: Path) -> None:
    config = small(vocab)
    tensors = initial(config, vocab.forms, spoken(vocab), seed=1)
    write_gguf(tmp_path / "x.gguf", vocab, config, {name: t.numpy() for name, t in tensors.items()})
    ids = [vocab.ids[BOS], *vocab.encode(" Who is Anna? What is 12 + 30?")]
    with LLM(tmp_path / "x.gguf", kv_type="f32") as llm:
        got = llm.generate(ids, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    for token in got.outputs[0].token_ids:
        x = hidden(config, tensors, torch.tensor([ids]), torch.arange(len(ids))[None], torch.float32)
        logits = x[0, -1] @ tensors["output.weight"].T
        # the file's weights are rounded to Q8_0: the likeliest tokens may then be ties
        assert logits[token] > logits.max() - 0.1 * logits.std()
        ids.append(token)


def test_updates_are_nearly_orthogonal() -> None:
    rng = torch.Generator().manual_seed(0)
    for shape in ((3, 64, 16), (2, 16, 64)):
        singular = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=rng)))
        assert 0.5 < float(singular.min()) < float(singular.max()) < 1.5


def test_it_learns_and_resumes_where_it_stood(vocab: Vocab, tmp_path: Path) -> None:
    plan = Plan(minutes=1, tokens=512)
    one = Training(vocab, small(vocab), plan, tmp_path)
    losses = [one.step() for _ in range(60)]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    one.save()
    other = Training(vocab, small(vocab), plan, tmp_path)
    other.resume()
    assert one.step() == pytest.approx(other.step(), rel=1e-6)
    assert one.progress == other.progress
