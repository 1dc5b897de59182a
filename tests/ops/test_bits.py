"""The operator against itself, bit by bit: threads, batches, steps, garbage beside it, memory around it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from . import lab
from .cases import RAGGED, Call, Case, make, poisoned, same_bits
from .lab import HEADER, Floats, Heads, Params, Run
from .reference import nmse

BIT_CASES = [
    Case(Heads(128, 128, 8, 4, "f16", "f16"), sequences=RAGGED),
    Case(Heads(128, 128, 8, 4, "q8_0", "q8_0"), sequences=RAGGED),
    Case(Heads(64, 64, 8, 1, "q4_0", "q4_0"), sequences=RAGGED, sinks=True),
    Case(Heads(80, 80, 4, 4, "bf16", "f32"), Params(window=300, window_type="sliding"), RAGGED),
    Case(
        Heads(192, 128, 8, 2, "q5_0", "iq4_nl"),
        Params(window=700, window_type="chunked", softcap=20.0),
        RAGGED,
    ),
    Case(Heads(576, 512, 16, 1, "f16"), sequences=((1, 1100), (20, 90)), v_of_k=True),
    Case(Heads(40, 40, 4, 2, "f16"), Params(max_bias=8.0), RAGGED),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", BIT_CASES[3:5], ids=lambda c: c.params.window_type)
def test_bits_are_the_same_without_the_blocks_before_the_window(case: Case, deterministic: bool) -> None:
    """Chunks of tokens are cut at positions of the sequence, not of its table."""
    call, whole = make(case), make(replace(case, trimmed=False))
    table = whole.table.copy()
    assert call.table[:, 4].any()
    for row, first in zip(table, call.table[:, 4], strict=True):
        row[HEADER:] = np.append(row[HEADER + first :], [-1] * first)
        row[4] = first
    for threads in (1, 3):
        run = Run(threads=threads)
        assert same_bits(replace(whole, table=table).run(run, deterministic), whole.run(run, deterministic))


@pytest.mark.parametrize("case", BIT_CASES, ids=lambda c: f"{c.heads.d_k}-{c.heads.type_k}")
@pytest.mark.parametrize("deterministic", [False, True])
def test_bits_are_the_same_alone_in_any_batch_and_for_any_threads(case: Case, deterministic: bool) -> None:
    """A sequence's output depends on the sequence alone."""
    call = make(case)
    together = call.run(Run(threads=1), deterministic)
    for threads in (2, 3, 7):
        assert same_bits(call.run(Run(threads=threads), deterministic), together)
    order = np.random.default_rng(1).permutation(len(call.table))
    assert same_bits(
        replace(call, table=np.ascontiguousarray(call.table[order])).run(None, deterministic), together
    )
    for index, (n_q, _) in enumerate(case.sequences):
        if n_q > 0:
            q0 = int(call.table[index, 0])
            for threads in (1, 2, 7):
                alone = call.alone(index).run(Run(threads=threads), deterministic)
                assert same_bits(alone, together[q0 : q0 + n_q])


def part(call: Call, index: int, first: int, last: int) -> Floats:
    """Query rows first..last of a sequence as a step of their own."""
    alone = call.alone(index)
    table = alone.table.copy()
    table[0, 1] = last - first
    table[0, 2] -= int(alone.table[0, 1]) - last
    return replace(alone, q=np.ascontiguousarray(alone.q[first:last]), table=table).run(
        None, deterministic=True
    )


@pytest.mark.parametrize("case", BIT_CASES, ids=lambda c: f"{c.heads.d_k}-{c.heads.type_k}")
def test_deterministic_rows_do_not_depend_on_the_rows_of_their_step(case: Case) -> None:
    """The same row alone, among 7 and among 512 gives the same bits."""
    call = make(replace(case, sequences=((512, 700),)))
    prompt = call.run(deterministic=True)
    for first, last in ((0, 1), (0, 7), (3, 10), (255, 256), (300, 364), (505, 512), (511, 512)):
        assert same_bits(part(call, 0, first, last), prompt[first:last])


@pytest.mark.parametrize("case", BIT_CASES, ids=lambda c: f"{c.heads.d_k}-{c.heads.type_k}")
def test_garbage_in_absent_slots_changes_no_bit(case: Case) -> None:
    """0xFF is NaN in every float type; 0x7B7B is a large f16 number."""
    call = make(case)
    garbage = [poisoned(call, byte) for byte in (0xFF, 0x7B)]
    for run, deterministic in (
        (Run(), False),
        (Run(threads=7), False),
        (Run(use_ref=True), False),
        (None, True),
    ):
        clean = call.run(run, deterministic)
        assert all(same_bits(other.run(run, deterministic), clean) for other in garbage)


@pytest.mark.parametrize("case", BIT_CASES[:3], ids=lambda c: f"{c.heads.d_k}-{c.heads.type_k}")
def test_sentinels_around_the_output_stay(case: Case) -> None:
    """Nothing is written beside the output, nor into the inputs."""
    call = make(case)
    n = call.q.shape[0] * case.heads.n_head * case.heads.d_v
    guarded = np.full(n + 128, 12345.0, np.float32)
    before = [x.tobytes() for x in (call.q, call.k, call.table)]
    out = guarded[64 : 64 + n].reshape(-1, case.heads.n_head, case.heads.d_v)
    lab.paged_attention(
        case.heads, case.params, call.q, call.k, call.v, call.table, call.sinks, Run(threads=3), out
    )
    assert (guarded[:64] == 12345.0).all()
    assert (guarded[-64:] == 12345.0).all()
    assert same_bits(out, call.run())
    assert before == [x.tobytes() for x in (call.q, call.k, call.table)]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_1"])
@pytest.mark.parametrize("block_size", [32, 64, 96])
def test_a_shared_prefix_changes_no_bit(kv_type: str, block_size: int) -> None:
    """Sequences that begin with the same blocks are read together; each gets what it gets alone."""
    lengths = [(1, 1700), (1, 1152), (2, 1100), (1, 1500), (0, 1200), (1, 1152), (3, 1300)]
    lengths += [(1, 1160 + n) for n in range(14)]
    params = Params(block_size=block_size)
    call = make(
        Case(Heads(64, 64, 4, 2, kv_type, kv_type), params, tuple(lengths), shared_blocks=1152 // block_size)
    )
    together = call.run(Run(threads=1))
    assert nmse(together, call.exact()) < 1e-4
    for threads in (2, 5):
        assert same_bits(call.run(Run(threads=threads)), together)
    for index, (n_q, _) in enumerate(lengths):
        q0 = int(call.table[index, 0])
        assert same_bits(call.alone(index).run(Run(threads=1)), together[q0 : q0 + n_q])
    assert same_bits(poisoned(call, 0xFF).run(), together)


@pytest.mark.parametrize(
    "lengths", [((1, 512), (1, 512)), ((1, 900), (1, 512), (1, 512)), ((1, 512), (1, 600))]
)
def test_a_sequence_that_is_all_shared_prefix(lengths: tuple[tuple[int, int], ...]) -> None:
    """Nothing is left of it but what another one reads; the table is wide enough for results to be shared."""
    call = make(Case(Heads(64, 64, 4, 2), sequences=(*lengths, (1, 1100)), shared_blocks=16))
    for threads in (1, 2, 5):
        out = call.run(Run(threads=threads))
        assert nmse(out, call.exact()) <= 1e-7
        for index in range(len(lengths)):
            assert same_bits(call.alone(index).run(Run(threads=1)), out[index : index + 1])
