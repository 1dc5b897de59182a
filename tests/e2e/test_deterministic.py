"""Deterministic mode: a sequence gets the same bits alone, in a batch, and for any chunks of its prompt."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import MakeModel
from .paged import PagedRunner

F16, Q8_0 = 1, 8
SHAPE = ("--arch", "qwen3", "--layers", "2", "--embd", "256", "--ffn", "512",
         "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--vocab", "none")  # fmt: skip


def prompts_of(n: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 300, rng.integers(1, 60)).tolist() for _ in range(n)]


@pytest.mark.parametrize("weights", ["f32", "f16", "q8_0", "Q4_K_M"])
@pytest.mark.parametrize("kv", [F16, Q8_0])
def test_logits_do_not_depend_on_batch_or_chunks(weights: str, kv: int, make_model: MakeModel) -> None:
    path = make_model(*SHAPE, "--type", weights)
    prompt, *others = prompts_of(9, seed=5)
    prompt = [*prompt, *prompts_of(1, seed=6)[0], *range(3, 60)]

    def last_logits(cuts: list[int], batched: bool, n_threads: int) -> np.ndarray:
        with PagedRunner(path, type_k=kv, type_v=kv, max_seqs=16, n_blocks=128, n_threads=n_threads,
                         deterministic=True, seed=n_threads) as runner:  # fmt: skip
            seq, at = runner.sequence(), 0
            for cut in [*cuts, len(prompt)]:
                beside = [(runner.sequence(), tokens) for tokens in others] if batched else []
                logits = runner.step([*beside, (seq, prompt[at:cut])])[-1]
                at = cut
            return logits

    alone = last_logits([], batched=False, n_threads=2)
    for cuts, batched, n_threads in [
        ([1], False, 2),
        ([1, 2, 40], True, 2),
        ([31, 33], True, 1),
        ([64], False, 3),
    ]:
        np.testing.assert_array_equal(alone, last_logits(cuts, batched, n_threads))
