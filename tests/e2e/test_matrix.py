"""Shapes times features: configurations that cover every pair of them, each in a process that may die."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from scripts.check._matrix_axes import Config, configurations, covering
from scripts.check.matrix import Worker

pytestmark = pytest.mark.laboratory  # its contiguous path

PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))]
"""The first covers three of five pairs; the others are slow tests."""
EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))
"""How many covering sets are run; scripts/check/matrix.py is the long profile."""


@pytest.fixture(scope="module")
def configs() -> list[Config]:
    return configurations(round(len(covering(0)) * EFFORT), 0)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.mark.parametrize("part", PARTS)
def test_shapes_times_features(part: int, configs: list[Config], worker: Worker) -> None:
    begin, end = (number * len(configs) // len(PARTS) for number in (part, part + 1))
    found = {
        json.dumps(asdict(config)): wrong for config in configs[begin:end] if (wrong := worker.ask(config))
    }
    assert not found, "replay with scripts/check/matrix.py --replay JSON"
