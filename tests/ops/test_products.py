"""Matrix products with weights in the layouts that the CPU backend packs them into."""

from __future__ import annotations

import numpy as np
import pytest

from .lab import Bytes, Floats, dequantize, product, product_in, quantize

TYPES = ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs")
GROUP = 256
"""Values that are rounded to bytes together, at most: upstream's q8_K."""


def weights(kind: str, n_out: int, n_in: int, seed: int) -> tuple[Bytes, Floats]:
    """As in a file, and what they stand for."""
    values = np.random.default_rng(seed).standard_normal((n_out, n_in)).astype(np.float32)
    packed = quantize(kind, values)
    return packed, dequantize(kind, packed, n_in)


def rows(n: int, n_in: int) -> Floats:
    """Rows of very different sizes, for each is rounded by itself; a zero one among them."""
    generator = np.random.default_rng(n)
    values = generator.standard_normal((n, n_in)) * generator.choice([1e-3, 1.0, 50.0], (n, 1))
    values[n // 3] = 0.0
    values[0, ::7] *= 30  # outliers
    return values.astype(np.float32)


@pytest.mark.parametrize(("n_out", "n_in"), [(64, 256), (160, 512), (32, 1280)])
@pytest.mark.parametrize("kind", TYPES)
def test_packed_products_are_right(kind: str, n_out: int, n_in: int) -> None:
    file, values = weights(kind, n_out, n_in, seed=n_in)
    for n in (1, 2, 7, 8, 9, 13, 16, 17, 31, 33, 70):
        x = rows(n, n_in)
        y = product(kind, file, x, packed=True, threads=2 if n in (1, 8, 70) else 1)
        if y is None:
            y = product(kind, file, x, packed=False)  # a processor without such a layout
        assert y is not None
        exact = x.astype(np.float64) @ values.astype(np.float64).T
        # a value is off by half a step at most where its group is rounded to bytes
        groups = np.abs(x).reshape(n, -1, GROUP).max(2)
        sizes = np.abs(values).astype(np.float64).reshape(n_out, -1, GROUP).sum(2)
        bound = 0.51 / 127 * groups @ sizes.T
        assert (np.abs(y - exact) <= bound + 1e-6 * np.abs(exact).max()).all()
        error = np.square(y - exact).sum(1) / np.maximum(np.square(exact).sum(1), 1e-30)
        assert np.median(error) < 1e-4


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_is_the_same_in_any_batch(kind: str) -> None:
    """A row's bits do not depend on the other rows, up to twelve, or on the number of threads.

    Our products over AMX's layout guarantee this on any processor with AVX-512's VNNI. Upstream's products
    over other layouts round one row in another way than four.
    """
    file, _ = weights(kind, 96, 512, seed=3)
    x = rows(12, 512)
    together, layout = product_in(kind, file, x, packed=True, threads=2)
    if together is None or layout != "AMX":
        pytest.skip("no products of bytes in AVX-512 here: such weights are multiplied by upstream")
    for n in (1, 2, 3, 5, 8, 9, 11):
        for first in (0, 12 - n):
            for threads in (1, 2, 3):
                part = product(kind, file, x[first : first + n], packed=True, threads=threads)
                assert part is not None
                np.testing.assert_array_equal(part.view(np.int32), together[first : first + n].view(np.int32))


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q5_k"])
@pytest.mark.parametrize("n", [7, 8, 16, 40, 70])
def test_bits_do_not_depend_on_the_threads(kind: str, n: int) -> None:
    """From eight rows on, chunks of the columns go to threads as they become free."""
    file, _ = weights(kind, 1056, 256, seed=n)
    x = rows(n, 256)
    alone, layout = product_in(kind, file, x, packed=True, threads=1)
    if alone is None or layout != "AMX":
        pytest.skip("no products of bytes in AVX-512 here: such weights are multiplied by upstream")
    for threads in (2, 3, 7):
        together = product(kind, file, x, packed=True, threads=threads)
        assert together is not None
        np.testing.assert_array_equal(together.view(np.int32), alone.view(np.int32))
