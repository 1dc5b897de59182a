from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyvelo.native import Context, Model, StepArrays


@pytest.fixture(scope="module")
def model(tiny_model_f32: Path) -> Iterator[Model]:
    with Model(tiny_model_f32) as loaded:
        yield loaded


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(model, n_blocks=16, max_batch_tokens=64, max_seqs=4, max_seq_len=128, n_threads=1) as made:
        yield made


@pytest.fixture
def arrays() -> StepArrays:
    return StepArrays(max_tokens=64, max_seqs=4, max_width=4, max_copies=4)
