"""Memory reserved on a GPU for computing, against the needs of the kernels and products by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pyvelo.memory.gpu import (
    LIBRARY_BYTES,
    ROUNDING_BYTES,
    Step,
    attention_bytes,
    product_bytes,
    workspace_bytes,
)
from pyvelo.models.gguf_scan import GgufTensor
from pyvelo.native import Layer

from .cases import Case, make
from .lab import HEADER, GpuPlan, Heads

STEP = Step(n_tokens=512, n_rows=64, n_outputs=100, longest=4096)


def layer(n_head: int = 32, d_k: int = 128, d_v: int = 128) -> Layer:
    return Layer(0, n_head, 8, d_k, d_v, 0, 0, 0)


def tensor(name: str, kind: str, *shape: int) -> GgufTensor:
    return GgufTensor(name, kind, shape, 0, 0)


@pytest.mark.parametrize("seed", range(12))
def test_the_kernels_never_ask_for_more(seed: int) -> None:
    """For any mixture of sequences within a step's limits."""
    rng = random.Random(seed)
    n_head, d = rng.choice([1, 4, 14]), rng.choice([64, 80, 128])
    longest = rng.choice([1, 31, 256, 257, 3000, 9000])
    sequences, left = [], 60
    for _ in range(rng.randint(1, 9)):
        rows = min(left, rng.choice([1, 1, 1, 2, 16, 17]), longest)
        if rows:
            sequences.append((rows, rng.randint(rows, longest)))
            left -= rows
    call = make(Case(Heads(d, d, n_head, 1), sequences=tuple(sequences)))
    plan = GpuPlan(call.case.heads, call.case.params, call.q, call.k, call.v, call.table)
    n_rows, width = call.table.shape
    step = Step(
        n_tokens=60, n_rows=n_rows, n_outputs=9, longest=(width - HEADER + 1) * call.case.params.block_size
    )
    asked = 4 * plan.max_partials * (d + 4)
    assert asked <= attention_bytes([layer(n_head, d, d)], step)


def test_attention_by_hand() -> None:
    """A Llama-8B shape, and others; more than 256 MiB is computed in parts."""
    assert attention_bytes([layer()], STEP) == 4 * 512 * 32 * 9 * 132
    assert attention_bytes([layer(4, 64, 64), layer()], STEP) == attention_bytes([layer()], STEP)
    assert attention_bytes([layer()], replace(STEP, longest=1000)) == 4 * 512 * 32 * 5 * 132
    assert attention_bytes([layer()], replace(STEP, longest=1 << 20)) == 256 << 20
    assert attention_bytes([layer()], replace(STEP, n_rows=1)) == 4 * 16 * 32 * 9 * 132
    assert attention_bytes([layer(16, 576, 0)], STEP) == 4 * 512 * 16 * 9 * 580, "V is in K"
    one = replace(STEP, n_rows=1, longest=1 << 20)
    assert attention_bytes([layer(512, 512, 512)], one) == 4 * 16 * 512 * 32 * 516 > 256 << 20
    assert attention_bytes([], STEP) == 0


def test_products_by_hand() -> None:
    up, down = tensor("blk.0.ffn_up.weight", "Q4_K", 4096, 14336), tensor("b", "Q4_K", 14336, 4096)
    assert product_bytes([up, down], STEP) == 512 * 14336 * 9 // 8
    assert product_bytes([tensor("b", "Q8_0", 100, 64)], STEP) == 512 * 512 * 9 // 8, "rows are padded"
    assert product_bytes([tensor("b", "F16", 64, 100)], STEP) == 2 * 512 * 164
    assert product_bytes([tensor("b", "F32", 64, 100)], STEP) == 0
    assert product_bytes([tensor("b", "TQ1_0", 64, 100)], STEP) == 2 * 6400 + 2 * 512 * 164
    assert product_bytes([tensor("blk.0.attn_norm.weight", "F32", 4096)], STEP) == 0


def test_only_the_output_sees_fewer_rows() -> None:
    input_, output = tensor("token_embd.weight", "F16", 64, 900), tensor("output.weight", "F16", 64, 900)
    assert product_bytes([input_], STEP) == 2 * 100 * 964, "it is the output too"
    assert product_bytes([input_, output], STEP) == 2 * 512 * 964


def test_experts_see_every_token_as_often_as_it_is_sent() -> None:
    experts = replace(STEP, n_experts=4)
    assert product_bytes([tensor("b", "Q4_K", 512, 64, 8)], experts) == 4 * 512 * 512 * 9 // 8
    assert product_bytes([tensor("b", "F16", 64, 100, 8)], experts) == 6 * 4 * 512 * 164
    assert product_bytes([tensor("b", "F16", 64, 100)], experts) == 2 * 512 * 164


def test_one_operation_at_a_time_works() -> None:
    """The pool is as large as the largest operation needs."""
    small, large = tensor("b", "F16", 64, 100), tensor("b", "F16", 1 << 17, 1 << 17)
    assert workspace_bytes([], [], STEP) == LIBRARY_BYTES + ROUNDING_BYTES
    with_attention = workspace_bytes([layer()], [small], STEP)
    assert with_attention == LIBRARY_BYTES + ROUNDING_BYTES + attention_bytes([layer()], STEP)
    assert workspace_bytes([layer()], [large], STEP) - with_attention == product_bytes(
        [large], STEP
    ) - attention_bytes([layer()], STEP)
