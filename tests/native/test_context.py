"""Contexts: settings, steps, blocks, cancelling, and errors."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyvelo.errors import Cancelled, ClosedError, ConfigError, OutOfMemory, UnsupportedError
from pyvelo.native import Context, Model, Sampler, StepArrays

from .steps import Seq, fill_step, logits_of, run

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


# ---- settings ----


def test_sizes(model: Model, context: Context) -> None:
    info = context.info
    assert (info.n_blocks, info.block_size, info.max_batch_tokens) == (16, 32, 64)
    row = sum(2 * (layer.head_dim_k + layer.head_dim_v) * layer.n_head_kv for layer in model.layers)  # f16
    assert info.block_bytes == 32 * row
    assert info.pool_bytes >= 16 * info.block_bytes
    assert (info.n_states, info.state_bytes) == (0, 0)
    assert info.compute_bytes > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_blocks": 0}, "n_blocks is 0, but must be from 1"),
        ({"n_blocks": -8}, "n_blocks is -8"),
        ({"n_blocks": 9}, "it must be a multiple of 8, as 16 is"),
        ({"n_blocks": 2**26}, "more than a pool can have"),
        ({"n_blocks": 2**31}, "does not fit in 32 bits"),
        ({"block_size": 48}, "block_size is 48 tokens, but must be 32, 64, 128 or 256"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0"),
        ({"max_seqs": 0}, "max_seqs is 0"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"max_outputs": 65}, "max_outputs is 65, but must be from 0 to 64"),
        ({"n_threads": -1}, "n_threads is -1"),
        ({"n_threads": 513}, "n_threads is 513, but must be from 0 to 512"),
        ({"deterministic": True}, "loaded with deterministic"),
    ],
)
def test_settings_out_of_range(model: Model, settings: dict[str, int], message: str) -> None:
    chosen = {"n_blocks": 16, "max_seq_len": 128, "max_batch_tokens": 64, **settings}
    with pytest.raises(ConfigError, match=message):
        Context(model, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("type", [-1, 4, 5, 10, 12, 24, 1000, 2**31 - 1])
def test_types_that_rows_cannot_have(model: Model, type: int) -> None:
    for which in ("type_k", "type_v"):
        with pytest.raises(UnsupportedError, match=f"{which} is ggml type {type}, but K and V can be f32"):
            Context(model, n_blocks=16, max_seq_len=128, **{which: type})  # type: ignore[arg-type]


def test_too_many_swapped_blocks(model: Model) -> None:
    said = (
        "2147483647 swapped blocks need .* MiB of host memory, but .* MiB are free: use a smaller swap_bytes"
    )
    with pytest.raises(OutOfMemory, match=said):
        Context(model, n_blocks=8, max_seq_len=64, n_swap_blocks=2**31 - 1)


def test_a_pool_beyond_the_memory_is_refused_with_the_numbers(model: Model) -> None:
    with pytest.raises(OutOfMemory, match=r"need [\d.]+ MiB, but [\d.]+ MiB of (memory|\w+\d) are free"):
        Context(model, n_blocks=2**26 - 8, max_seq_len=128, type_k=0, type_v=0)


# ---- steps ----


def test_a_step_gives_logits(context: Context, arrays: StepArrays) -> None:
    run(context, arrays, [(Seq([0]), PROMPT), (Seq([5]), PROMPT[:3])])
    logits = logits_of(context, 2)
    assert logits.shape == (2, context.n_vocab)
    assert np.isfinite(logits).all()
    with pytest.raises(ConfigError, match="row 2"):
        context.logits(2)
    with pytest.raises(ConfigError, match="row -1"):
        context.logits(-1)


def test_a_refused_step_leaves_the_results_of_the_last(context: Context, arrays: StepArrays) -> None:
    run(context, arrays, [(Seq([0]), PROMPT), (Seq([5]), PROMPT[:3])])
    before = logits_of(context, 2)
    counts = fill_step(arrays, 32, [(Seq([1]), PROMPT)])
    arrays.slots[0, 2] = 16 * 32
    with pytest.raises(ConfigError, match="slot"):
        context.run(arrays, *counts)
    np.testing.assert_array_equal(logits_of(context, 2), before)


def test_no_logits_before_the_first_step(context: Context) -> None:
    with pytest.raises(ConfigError, match="row 0"):
        context.logits(0)


def test_steps_continue_a_sequence_in_any_blocks(context: Context, arrays: StepArrays) -> None:
    whole, parts = Seq([0, 1]), Seq([11, 3])
    tokens = (PROMPT * 4)[:40]
    run(context, arrays, [(whole, tokens)])
    expected = context.logits(0)
    run(context, arrays, [(parts, tokens[:17])])
    run(context, arrays, [(parts, tokens[17:])])
    np.testing.assert_allclose(context.logits(0), expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_copies_come_before_the_step(context: Context, arrays: StepArrays) -> None:
    first = Seq([2])
    run(context, arrays, [(first, PROMPT)])
    run(context, arrays, [(first, [7])])
    expected = context.logits(0)

    fork = Seq([9], length=len(PROMPT))
    arrays.copies[0] = (2, 9)
    context.run(arrays, *fill_step(arrays, 32, [(fork, [7])]), n_copies=1)
    np.testing.assert_array_equal(context.logits(0), expected)


def _set(name: str, index: object, value: int) -> Callable[[StepArrays], None]:
    def change(arrays: StepArrays) -> None:
        getattr(arrays, name)[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("tokens", 1, -1), "token -1"),
        (_set("tokens", 1, 10**6), "token 1000000"),
        (_set("positions", 1, 5), "got 5"),
        (_set("slots", (0, 1), 40), "slot"),
        (_set("slots", (0, 0), -1), "slot"),
        (_set("tables", (0, 0, 0), 16), "block 16"),
        (_set("tables", (0, 0, 0), -1), "block -1"),
        (_set("firsts", (0, 0), 1), "must begin with block 0 to 0 because of its window, got 1"),
        (_set("firsts", (0, 0), -1), "must begin with block 0 to 0"),
        (_set("seqs", (0, 0), 1), "tokens"),
        (_set("seqs", (0, 1), 0), "tokens"),
        (_set("seqs", (0, 1), 2**31 - 1), "tokens"),
        (_set("seqs", (0, 2), 5), "length"),
        (_set("seqs", (0, 2), 2**31 - 1), "length"),
        (_set("seqs", (0, 3), 1), "fourth"),
    ],
)
def test_inconsistent_arrays_raise(
    context: Context, arrays: StepArrays, change: Callable[[StepArrays], None], message: str
) -> None:
    counts = fill_step(arrays, 32, [(Seq([0]), PROMPT)])
    change(arrays)
    with pytest.raises(ConfigError, match=message):
        context.run(arrays, *counts)
    run(context, arrays, [(Seq([0]), PROMPT)])


def test_copies_of_blocks_outside_the_pool(context: Context, arrays: StepArrays) -> None:
    counts = fill_step(arrays, 32, [(Seq([0]), PROMPT)])
    arrays.copies[0] = (3, 16)
    with pytest.raises(ConfigError, match="block 16"):
        context.run(arrays, *counts, n_copies=1)


@pytest.mark.parametrize(
    "counts", [(0, 1, 0), (1, 0, 0), (65, 1, 0), (1, 5, 0), (1, 1, 5), (1, 1, -1), (-1, 1, 0)]
)
def test_steps_that_do_not_fit_the_arrays(
    context: Context, arrays: StepArrays, counts: tuple[int, int, int]
) -> None:
    fill_step(arrays, 32, [(Seq([0]), PROMPT)])
    with pytest.raises(ConfigError, match="does not fit the arrays"):
        context.run(arrays, *counts)


def test_steps_that_do_not_fit_the_context(model: Model) -> None:
    wide = StepArrays(max_tokens=128, max_seqs=4, max_width=4, max_copies=0)
    with Context(
        model, n_blocks=16, max_batch_tokens=32, max_seqs=2, max_outputs=1, max_seq_len=48
    ) as context:
        with pytest.raises(ConfigError, match="1 to 32 tokens, got 33"):
            run(context, wide, [(Seq([0, 1]), (PROMPT * 4)[:33])])
        with pytest.raises(ConfigError, match="at most 1 outputs, got 2"):
            run(context, wide, [(Seq([0]), PROMPT), (Seq([1]), PROMPT)])
        with pytest.raises(ConfigError, match="got 49"):
            run(context, wide, [(Seq([0, 1], length=48), [1])])


@pytest.mark.parametrize("sizes", [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, -1), (2**31, 1, 1, 0)])
def test_arrays_need_a_size(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError):
        StepArrays(*sizes)


def test_steps_are_timed_and_graphs_reused(context: Context, arrays: StepArrays) -> None:
    seq = Seq([0])
    run(context, arrays, [(seq, PROMPT)])
    for token in range(6):
        run(context, arrays, [(seq, [token])])
    timings = context.timings
    assert (timings.n_runs, timings.n_tokens) == (7, len(PROMPT) + 6)
    assert 4 <= timings.n_graphs_reused <= 6
    assert timings.run_seconds > 0
    assert timings.sample_seconds == 0


def test_logits_do_not_depend_on_the_number_of_threads(context: Context, arrays: StepArrays) -> None:
    results = []
    for n_threads in (1, 2, 3):
        context.set_threads(n_threads)
        run(context, arrays, [(Seq([0]), PROMPT)])
        results.append(context.logits(0))
    np.testing.assert_allclose(results[1], results[0], atol=1e-4)
    np.testing.assert_allclose(results[2], results[0], atol=1e-4)
    context.set_threads(0)
    with pytest.raises(ConfigError, match="n_threads is -1"):
        context.set_threads(-1)


# ---- blocks ----


def test_blocks_are_read_written_copied_and_filled(context: Context, arrays: StepArrays) -> None:
    run(context, arrays, [(Seq([4]), PROMPT)])
    (four,) = context.read_blocks([4])
    assert four.shape == (context.info.block_bytes,)
    assert four.any()

    context.fill_blocks([1, 2, 3], 0xAB)
    context.write_blocks([2], four[None])
    context.copy_blocks([4, 2], [3, 5])
    blocks = context.read_blocks(np.array([1, 2, 3, 5], np.int32))
    assert (blocks[0] == 0xAB).all()
    for block in blocks[1:]:
        np.testing.assert_array_equal(block, four)
    assert context.read_blocks([]).shape == (0, context.info.block_bytes)


def test_blocks_outside_the_pool(context: Context) -> None:
    data = np.zeros((1, context.info.block_bytes), np.uint8)
    for bad in (-1, 16, 2**31 - 1):
        with pytest.raises(ConfigError, match=f"block {bad} is not in the pool"):
            context.read_blocks([bad])
        with pytest.raises(ConfigError, match=f"block {bad}"):
            context.write_blocks([bad], data)
        with pytest.raises(ConfigError, match=f"block {bad}"):
            context.copy_blocks([0], [bad])
        with pytest.raises(ConfigError, match=f"block {bad}"):
            context.copy_blocks([bad], [0])
        with pytest.raises(ConfigError, match=f"block {bad}"):
            context.fill_blocks([bad], 0)
    with pytest.raises(ConfigError, match="32 bits"):
        context.read_blocks([2**31])


def test_block_data_of_another_shape(context: Context) -> None:
    size = context.info.block_bytes
    for data in (
        np.zeros((1, size - 1), np.uint8),
        np.zeros((2, size), np.uint8),
        np.zeros((1, size), np.int8),
    ):
        with pytest.raises(ConfigError, match="the data of 1 blocks are uint8"):
            context.write_blocks([0], data)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 blocks cannot be copied to 1"):
        context.copy_blocks([0, 1], [2])
    with pytest.raises(ConfigError, match="byte is 256"):
        context.fill_blocks([0], 256)


def test_no_recurrent_states_to_clear(context: Context) -> None:
    context.clear_state(0)


# ---- cancelling, threads, the end ----


@pytest.fixture
def long_step(model: Model) -> tuple[Context, StepArrays, tuple[int, int]]:
    n = 2048
    context = Context(model, n_blocks=64, max_batch_tokens=n, max_seqs=1, max_seq_len=n, n_threads=1)
    arrays = StepArrays(max_tokens=n, max_seqs=1, max_width=64, max_copies=0)
    tokens = np.random.default_rng(0).integers(0, context.n_vocab, n).tolist()
    return context, arrays, fill_step(arrays, 32, [(Seq(list(range(64))), tokens)])


def run_many_times(context: Context, arrays: StepArrays, counts: tuple[int, int]) -> None:
    for _ in range(100):
        context.run(arrays, *counts)


def test_cancel_from_another_thread(long_step: tuple[Context, StepArrays, tuple[int, int]]) -> None:
    """A run releases the GIL, so another thread can cancel it. A cancel between runs does nothing."""
    context, arrays, counts = long_step
    context.run(arrays, *counts)
    expected = context.logits(0)

    done = threading.Event()

    def cancel() -> None:
        while not done.wait(0.001):
            context.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        with pytest.raises(Cancelled):
            run_many_times(context, arrays, counts)
    finally:
        done.set()
        thread.join()
    n_runs = context.timings.n_runs
    with pytest.raises(ConfigError, match="row 0"):
        context.logits(0)

    context.cancel()
    context.run(arrays, *counts)  # the same step again, whole
    assert context.timings.n_runs == n_runs + 1
    np.testing.assert_array_equal(context.logits(0), expected)
    context.close()


def test_calls_of_many_threads_run_one_after_another(context: Context) -> None:
    wrong: list[BaseException] = []

    def work(block: int) -> None:
        try:
            own = StepArrays(max_tokens=16, max_seqs=1, max_width=1, max_copies=0)
            for _ in range(20):
                run(context, own, [(Seq([block]), PROMPT)])
                assert context.read_blocks([block]).any()
                assert context.timings.n_runs > 0
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(block,)) for block in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert context.timings.n_runs == 80


def test_close_waits_for_the_run(long_step: tuple[Context, StepArrays, tuple[int, int]]) -> None:
    context, arrays, counts = long_step
    results: list[str] = []

    def work() -> None:
        try:
            while True:
                context.run(arrays, *counts)
                results.append("ran")
        except ClosedError:
            results.append("closed")

    thread = threading.Thread(target=work)
    thread.start()
    while not results:
        time.sleep(0.001)
    context.close()
    thread.join()
    assert results[-1] == "closed"


def test_a_closed_context_raises(model: Model, arrays: StepArrays) -> None:
    context = Context(model, n_blocks=16, max_seq_len=128, n_threads=1)
    sampler = Sampler(model, seed=0)
    counts = fill_step(arrays, 32, [(Seq([0]), PROMPT)])
    assert not context.closed
    context.close()
    context.close()
    assert context.closed
    for use in (
        lambda: context.run(arrays, *counts),
        lambda: context.logits(0),
        lambda: context.sample(np.zeros(1, np.int32), [sampler]),
        lambda: context.copy_blocks([0], [1]),
        lambda: context.read_blocks([0]),
        lambda: context.fill_blocks([0], 0),
        lambda: context.clear_state(0),
        lambda: context.set_threads(1),
        context.cancel,
        lambda: context.info,
        lambda: context.timings,
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_cycle_of_models_contexts_and_samplers_is_collected(tiny_model: Path) -> None:
    """Without close(), in any order: contexts and samplers keep their model alive in C."""
    model = Model(tiny_model)
    context = Context(model, n_blocks=8, max_seq_len=32, max_batch_tokens=8, n_threads=1)
    sampler = Sampler(model, seed=0)
    alive = [weakref.ref(thing) for thing in (model, context, sampler)]
    cycle: list[object] = [model, sampler, context]
    cycle.append(cycle)
    del model, context, sampler, cycle
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
