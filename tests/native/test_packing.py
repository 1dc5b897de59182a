"""Weights that the first run packs: once, and with the same bytes as packed by the load."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvelo.errors import Cancelled
from pyvelo.memory.host import free_memory
from pyvelo.native import Context, Embedder, Model, StepArrays, devices, quantize, reserved_memory

from .steps import Seq, logits_of, run

Reserved = Callable[[], int]


@pytest.fixture(autouse=True)
def reserved() -> Iterator[Reserved]:
    """Return a function that counts the bytes that the test's models reserve; at its end none may be left."""
    gc.collect()  # engines that other tests dropped
    others = reserved_memory()  # a server that tests share may not have run yet
    yield lambda: reserved_memory() - others
    assert reserved_memory() == others


def context_of(model: Model) -> Context:
    return Context(model, n_blocks=8, max_batch_tokens=64, max_seqs=4, max_seq_len=128, n_threads=2)


def logits(context: Context) -> bytes:
    """Return the logits of the last token."""
    arrays = StepArrays(max_tokens=64, max_seqs=4, max_width=4, max_copies=4)
    run(context, arrays, [(Seq([0]), list(range(1, 30)))])
    return logits_of(context, 1).tobytes()


def expected(path: Path) -> bytes:
    """Return the logits of a model whose load packs the weights."""
    with Model(path, use_mmap=False) as model, context_of(model) as context:
        return logits(context)


@pytest.mark.packing
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K_M", "Q6_K", "IQ4_NL"])
def test_the_first_run_packs_the_same_weights_as_the_load(
    tiny_model_f32: Path, tmp_path: Path, kind: str, reserved: Reserved
) -> None:
    path = tmp_path / "model.gguf"
    quantize(tiny_model_f32, path, kind)
    with Model(path) as model, context_of(model) as context:
        assert (reserved() > 0) >= (kind in ("Q4_0", "Q4_K_M"))  # other types: not on every processor
        first = logits(context)
        assert reserved() == 0
        assert logits(context) == first
    assert first == expected(path)


def test_the_load_packs_no_weights(packed_model: Path, reserved: Reserved) -> None:
    size = packed_model.stat().st_size
    with Model(packed_model) as model:
        assert 0.7 * size < reserved() < 1.3 * size
        with Model(packed_model) as twin:
            assert reserved() > 1.4 * size
            logits(context_of(twin))
            assert 0.7 * size < reserved() < 1.3 * size
        logits(context_of(model))
        assert reserved() == 0


@pytest.mark.parametrize("settings", [{"use_mmap": False}, {"vocab_only": True}])
def test_no_memory_is_reserved_if_nothing_is_packed_later(
    packed_model: Path, settings: dict[str, bool], reserved: Reserved
) -> None:
    with Model(packed_model, **settings):  # type: ignore[arg-type]
        assert reserved() == 0


def test_models_that_are_never_run(packed_model: Path, reserved: Reserved) -> None:
    with Model(packed_model) as model, context_of(model):
        assert reserved() > 0


def test_reserved_memory_is_not_free(packed_model: Path, reserved: Reserved) -> None:
    def missing() -> float:
        """Return the free memory of the system less the free memory that the library reports."""
        samples = []
        for _ in range(41):
            cpu = next(device for device in devices() if device.kind == "cpu")
            samples.append((free_memory() or 0) - cpu.memory_free)
        return statistics.median(samples)

    before = missing()
    with Model(packed_model), Model(packed_model), Model(packed_model):
        assert missing() - before == pytest.approx(reserved(), rel=0.2)


def test_threads_that_start_at_once_pack_once(packed_model: Path) -> None:
    shares: list[float] = []
    answers: dict[int, bytes] = {}
    with Model(packed_model, progress=shares.append) as model:
        contexts = [context_of(model) for _ in range(3)]
    shares.clear()
    together = threading.Barrier(len(contexts))

    def work(number: int) -> None:
        together.wait()
        answers[number] = logits(contexts[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(contexts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == len(contexts)
    assert set(answers.values()) == {expected(packed_model)}
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(set(shares)) == len(shares) > 10
    assert shares == sorted(shares)


Stop = Callable[[Context], Any]


def no_more(_: Context) -> bool:
    return False


def fail(_: Context) -> None:
    raise KeyError("enough")


@pytest.mark.parametrize(
    ("stop", "error"), [(Context.cancel, Cancelled), (no_more, Cancelled), (fail, KeyError)]
)
def test_cancelled_packing_continues_later(
    packed_model: Path, stop: Stop, error: type[Exception], reserved: Reserved
) -> None:
    shares: list[float] = []
    stops: list[Callable[[], Any]] = []

    def watch(share: float) -> Any:
        shares.append(share)
        return stops.pop()() if stops and share > 0.3 else None

    with Model(packed_model, progress=watch) as model, context_of(model) as context:
        at_first = reserved()
        stops.append(lambda: stop(context))
        with pytest.raises(error):
            logits(context)
        reached = shares[-1]
        assert 0.3 < reached < 0.6
        assert reserved() == pytest.approx(at_first * (1 - reached), rel=0.01)
        shares.clear()
        assert logits(context) == expected(packed_model)
        assert (shares[0], shares[-1]) == (reached, 1.0)


def test_contexts_that_outlive_their_model_still_report_progress(packed_model: Path) -> None:
    shares: list[float] = []
    model = Model(packed_model, progress=lambda share: shares.append(share))
    context = context_of(model)
    model.close()
    del model
    shares.clear()
    assert logits(context) == expected(packed_model)
    assert shares[-1] == 1.0


def test_an_embedder_packs_too(packed_model: Path, reserved: Reserved) -> None:
    with Model(packed_model) as model, Embedder(model, max_tokens=64, n_threads=2) as embedder:
        vectors = embedder.embed([[1, 2, 3]], 1)
        assert reserved() == 0
        with context_of(model) as context:
            assert logits(context) == expected(packed_model)
    with (
        Model(packed_model, use_mmap=False) as model,
        Embedder(model, max_tokens=64, n_threads=2) as embedder,
    ):
        assert (embedder.embed([[1, 2, 3]], 1) == vectors).all()


FORK = """
import os, sys
from pathlib import Path
from tests.native.test_packing import Model, context_of, expected, logits
path = Path(sys.argv[1])
model = Model(path)
context = context_of(model)
child = os.fork()
sound = logits(context) == expected(path)
if child == 0:
    os._exit(0 if sound else 1)
print(sound, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks of processes with threads are safe there alone")
def test_both_sides_of_a_fork_pack(packed_model: Path) -> None:
    command = [sys.executable, "-c", "import sys\n" + FORK, str(packed_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "True 0\n", done.stderr
