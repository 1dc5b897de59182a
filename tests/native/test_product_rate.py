"""The rate of products that `pyvelo models` measures."""

from __future__ import annotations

import math

import pytest

from pyvelo.errors import ConfigError
from pyvelo.native import product_rate


@pytest.mark.parametrize("kind", ["q4_K", "q5_0", "q6_K", "q8_0", "mxfp4", "tq1_0"])
@pytest.mark.parametrize("n_threads", [0, 1, 3])
def test_each_type_has_a_rate(kind: str, n_threads: int) -> None:
    rate = product_rate(kind, n_threads, seconds=0.0)
    assert 0 < rate < math.inf


@pytest.mark.parametrize("kind", ["", "Q4_K", "q4_K_M", "f16", "é", "q4"])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f'"{kind}" is no quantized type of ggml'):
        product_rate(kind, 1, seconds=0.0)


@pytest.mark.parametrize("seconds", [-1.0, 61.0, math.inf, math.nan])
def test_a_measurement_takes_up_to_a_minute(seconds: float) -> None:
    with pytest.raises(ConfigError, match="must be from 0 to 60"):
        product_rate("q4_K", 1, seconds)


@pytest.mark.parametrize("n_threads", [-1, 1 << 20, 1 << 40])
def test_threads_are_checked(n_threads: int) -> None:
    with pytest.raises(ConfigError, match="n_threads"):
        product_rate("q4_K", n_threads, seconds=0.0)
