"""Matrix products with weights in the layouts that the CPU backend packs them into."""

from __future__ import annotations

import numpy as np
import pytest

from .lab import Bytes, Floats, dequantize, expert_products, product, product_in, quantize

TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "q4_k", "q5_k", "q6_k", "iq4_xs")
GROUP = 256
"""Values that are rounded to bytes together, at most: upstream's q8_K."""


def weights(kind: str, n_out: int, n_in: int, seed: int) -> tuple[Bytes, Floats]:
    """As in a file, and what they stand for."""
    values = np.random.default_rng(seed).standard_normal((n_out, n_in)).astype(np.float32)
    packed = quantize(kind, values)
    return packed, dequantize(kind, packed, n_in)


def has_products(kind: str, layout: str) -> bool:
    x = np.ones((1, 256), np.float32)
    return product_in(kind, weights(kind, 32, 256, seed=0)[0], x, packed=True, layout=layout)[0] is not None


OURS = [(kind, layout) for layout in ("AMX", "TILES") for kind in TYPES if has_products(kind, layout)]
"""Types and layouts whose products are ours: AMX's layout with VNNI of AVX-512, tiles with AVX2."""


def rows(n: int, n_in: int) -> Floats:
    """Rows of very different sizes, for each is rounded by itself; a zero one among them."""
    generator = np.random.default_rng(n)
    values = generator.standard_normal((n, n_in)) * generator.choice([1e-3, 1.0, 50.0], (n, 1))
    values[n // 3] = 0.0
    values[0, ::7] *= 30  # outliers
    return values.astype(np.float32)


def check(y: Floats, x: Floats, values: Floats) -> None:
    """Compare y, rows x times weights with these values, with the exact product."""
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    # a value is off by half a step at most where its group is rounded to bytes
    groups = np.abs(x).reshape(len(x), -1, GROUP).max(2)
    sizes = np.abs(values).astype(np.float64).reshape(len(values), -1, GROUP).sum(2)
    bound = 0.51 / 127 * groups @ sizes.T
    assert (np.abs(y - exact) <= bound + 1e-6 * np.abs(exact).max()).all()
    error = np.square(y - exact).sum(1) / np.maximum(np.square(exact).sum(1), 1e-30)
    assert np.median(error) < 1e-4


@pytest.mark.parametrize(("n_out", "n_in"), [(64, 256), (160, 512), (32, 1280), (16, 768)])
@pytest.mark.parametrize(("kind", "layout"), OURS or [(kind, None) for kind in TYPES])
def test_packed_products_are_right(kind: str, layout: str | None, n_out: int, n_in: int) -> None:
    if layout == "AMX" and n_out % 32:
        layout = "TILES"  # AMX's tiles come in pairs
    file, values = weights(kind, n_out, n_in, seed=n_in)
    for n in (1, 2, 3, 7, 8, 9, 13, 16, 17, 31, 33, 70):
        x, threads = rows(n, n_in), 2 if n in (1, 8, 70) else 1
        y, _ = product_in(kind, file, x, packed=True, threads=threads, layout=layout)
        if y is None and layout is None:
            y = product(kind, file, x, packed=False)
        assert y is not None
        check(y, x, values)


LARGE = [
    (4096, 2048, (1, 3, 6)),  # more than 4 MiB for each of two threads: chunks for few rows, too
    (2048, 256, (5, 20, 40)),  # several groups of tiles
    (3072, 48, (6, 20)),  # tiles larger than a group
]


@pytest.mark.parametrize(("n_in", "n_out", "n_rows"), LARGE)
@pytest.mark.parametrize("kind", [kind for kind, layout in OURS if layout == "TILES"])
def test_products_of_large_matrices_are_right(
    kind: str, n_in: int, n_out: int, n_rows: tuple[int, ...]
) -> None:
    file, values = weights(kind, n_out, n_in, seed=n_in)
    for n in n_rows:
        x = rows(n, n_in)
        for threads in (1, 2, 5):
            y, _ = product_in(kind, file, x, packed=True, threads=threads, layout="TILES")
            assert y is not None
            check(y, x, values)


@pytest.mark.parametrize("kind", TYPES)
def test_products_of_experts_are_right(kind: str) -> None:
    """Each row is multiplied with the weights of its experts; some experts have no row, some have many."""
    n_experts, n_out, n_in = 9, 48, 512
    made = [weights(kind, n_out, n_in, seed) for seed in range(n_experts)]
    file = np.stack([packed for packed, _ in made])
    for n, n_used, own_rows in ((1, 4, False), (1, 3, True), (7, 2, True), (40, 3, False), (33, 1, True)):
        draw = np.random.default_rng(n)
        experts = np.stack([draw.choice(n_experts - 1, n_used, replace=False) for _ in range(n)])
        x = rows(n * n_used if own_rows else n, n_in).reshape(n, -1, n_in)
        for threads in (1, 2, 3):
            y = expert_products(kind, file, x, experts, packed=True, threads=threads)
            if y is None:
                y = expert_products(kind, file, x, experts, packed=False)
            assert y is not None
            for expert in range(n_experts):
                row, place = np.nonzero(experts == expert)
                if len(row) > 0:
                    check(y[row, place], x[row, place if own_rows else 0], made[expert][1])


@pytest.mark.parametrize(("kind", "layout"), OURS)
def test_a_row_is_the_same_in_any_batch(kind: str, layout: str) -> None:
    """A row's bits do not depend on the other rows, up to twelve, or on the number of threads.

    Over tiles, they depend on no number of rows. Upstream's products over other layouts round one row in
    another way than four.
    """
    file, _ = weights(kind, 96, 1280, seed=3)
    x = rows(40 if layout == "TILES" else 12, 1280)
    together, _ = product_in(kind, file, x, packed=True, threads=2, layout=layout)
    assert together is not None
    for n in (1, 2, 3, 5, 8, 9, 11):
        for first in (0, len(x) - n):
            for threads in (1, 2, 3):
                part, _ = product_in(
                    kind, file, x[first : first + n], packed=True, threads=threads, layout=layout
                )
                assert part is not None
                np.testing.assert_array_equal(part.view(np.int32), together[first : first + n].view(np.int32))


@pytest.mark.parametrize(("kind", "layout"), [pair for pair in OURS if pair[0] in ("q4_0", "q8_0", "q5_k")])
@pytest.mark.parametrize("n", [7, 8, 16, 40, 70])
def test_bits_do_not_depend_on_the_threads(kind: str, n: int, layout: str) -> None:
    """From eight rows on, chunks of the columns go to threads as they become free."""
    for n_out in (1056, 32):  # at times fewer tiles than threads
        file, _ = weights(kind, n_out, 256, seed=n)
        x = rows(n, 256)
        alone, _ = product_in(kind, file, x, packed=True, threads=1, layout=layout)
        assert alone is not None
        for threads in (2, 3, 7):
            together, _ = product_in(kind, file, x, packed=True, threads=threads, layout=layout)
            assert together is not None
            np.testing.assert_array_equal(together.view(np.int32), alone.view(np.int32))


@pytest.mark.parametrize(("kind", "layout"), OURS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none(kind: str, layout: str, value: float) -> None:
    """A row with such a value has such results; other rows do not."""
    file, _ = weights(kind, 32, 512, seed=1)
    x = rows(6, 512)
    good, _ = product_in(kind, file, x, packed=True, layout=layout)
    x[4, 300] = value
    y, _ = product_in(kind, file, x, packed=True, layout=layout)
    assert y is not None
    assert good is not None
    assert not np.isfinite(y[4]).any()
    np.testing.assert_array_equal(np.delete(y, 4, 0), np.delete(good, 4, 0))
