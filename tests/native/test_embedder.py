"""Embedder: valid and invalid input, and cancelling."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pyvelo.errors import Cancelled, ClosedError, ConfigError, ModelError
from pyvelo.native import POOLINGS, Embedder, Model
from pyvelo.native._ffi import ffi, lib
from scripts.models import _shapes, make
from tests import forks
from tests.t5_models import Shape, t5_with_buckets, write_model


@pytest.fixture(scope="module")
def embedder(model: Model) -> Embedder:
    return Embedder(model, max_tokens=700, n_threads=1)


MEAN = POOLINGS["mean"]


def test_texts_of_any_number_and_length(embedder: Embedder) -> None:
    lengths = [1, 700, 511, 512, 513, 3] * 3 + [1, 30] * 27
    texts = [[3 + (i * j) % 1000 for j in range(n)] for i, n in enumerate(lengths)]
    vectors = embedder.embed(texts, MEAN)
    assert vectors.shape == (72, embedder.n_embd)
    for number in (0, 1, 2, 4, 71):
        alone = embedder.embed(texts[number : number + 1], MEAN)
        assert np.abs(alone - vectors[number]).max() < 1e-3 * np.abs(alone).max()
    assert embedder.embed([], MEAN).shape == (0, embedder.n_embd)
    last, first = embedder.embed([[7]], POOLINGS["last"]), embedder.embed([[7]], POOLINGS["cls"])
    assert np.array_equal(last, first)
    assert np.array_equal(last, embedder.embed([[7]], MEAN))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1], []], "the length of a text is 0, but must be from 1 to 700"),
        ([[1] * 701], "the length of a text is 701"),
        ([[1], [1096]], "a token is 1096, but must be from 0 to 1095"),
        ([[-1]], "a token is -1"),
        ([[1 << 40]], "32 bits"),
        ([[1.5]], "whole numbers"),
    ],
)
def test_wrong_texts(embedder: Embedder, texts: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        embedder.embed(texts, MEAN)


@pytest.mark.parametrize("pooling", [0, 4, -1, 99])
def test_wrong_poolings(embedder: Embedder, pooling: int) -> None:
    with pytest.raises(ConfigError, match="pooling is"):
        embedder.embed([[1]], pooling)


def test_wrong_settings(model: Model, tiny_model_f32: Path) -> None:
    for wrong in (0, -1, model.info.n_ctx_train + 1, 2**31 - 1):
        with pytest.raises(ConfigError, match="max_tokens is"):
            Embedder(model, max_tokens=wrong)
    with pytest.raises(ConfigError, match="n_threads is"):
        Embedder(model, max_tokens=8, n_threads=-1)
    with Model(tiny_model_f32, vocab_only=True) as empty, pytest.raises(ConfigError, match="vocab_only"):
        Embedder(empty, max_tokens=8)


def test_an_encoder_without_its_position_bias_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    tensors = _shapes.tensors
    shape, path = _shapes.Shape(arch="t5encoder", kv_heads=4, ctx=64), tmp_path / "t5.gguf"
    make.write_model(shape, path)
    Model(path).close()
    monkeypatch.setattr(
        _shapes, "tensors", lambda *given: (t for t in tensors(*given) if "attn_rel_b" not in t.name)
    )
    make.write_model(shape, path)
    with pytest.raises(ModelError, match="no relative position bias"):
        Model(path)


def resident(path: Path) -> int:
    """Return the bytes of the file's mappings that this process has touched."""
    total, within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            within = bool(rest) and rest[-1] == str(path)
        elif within and name == "Rss:":
            total += int(rest[0]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what was touched")
def test_logits_are_not_computed(tmp_path: Path) -> None:
    path = tmp_path / "wide.gguf"
    write_model(Shape(embd=1024, heads=4, kv_heads=1, layers=1, tied=False), path, type_name="f32")
    output = 1096 * 1024 * 4
    with Model(path, deterministic=True) as model:  # weights are used in their mapping
        assert Embedder(model, max_tokens=64, n_threads=2).embed([[1, 2, 3]], MEAN).any()
        assert 0 < resident(path) < path.stat().st_size - output
        assert resident(path) > (path.stat().st_size - 2 * output) // 2, "the layer was computed"


# Arguments: a bad model, a good one, threads, tokens. Prints the error, and whether the good one still works.
BAD_BUCKETS = """
import sys
from pyvelo.errors import ComputeError
from pyvelo.native import Embedder, Model
path, sound, n_threads, n_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
for _ in range(20 if n_tokens < 100 else 5):
    try:
        embedder = Embedder(Model(path), max_tokens=n_tokens, n_threads=n_threads)
        embedder.embed([[1] * n_tokens], 1)
    except ComputeError as error:
        said = str(error)
print(said)
print(Embedder(Model(sound), max_tokens=8, n_threads=n_threads).embed([[1]], 1).any())
"""


@pytest.mark.parametrize("n_threads", [1, 2, 4])
@pytest.mark.parametrize(("buckets", "n_tokens"), [(1, 8), (2, 8), (3, 8), (1024, 600)])
def test_an_abort_in_a_computation_is_an_error(
    tiny_model_f32: Path, tmp_path: Path, n_threads: int, buckets: int, n_tokens: int
) -> None:
    path = tmp_path / "t5.gguf"
    t5_with_buckets(path, buckets, ctx=1024)
    command = [
        sys.executable,
        "-c",
        BAD_BUCKETS,
        str(path),
        str(tiny_model_f32),
        str(n_threads),
        str(n_tokens),
    ]
    done = forks.run(command, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said, works = done.stdout.splitlines()
    assert said.startswith("the embeddings cannot be computed (status -3): GGML_ASSERT(")
    assert works == "True"


def test_a_buffer_that_is_too_small(embedder: Embedder) -> None:
    tokens, lengths, out = ffi.new("int32_t[1]"), ffi.new("int32_t[1]", [1]), ffi.new("float[255]")
    assert lib.velo_embed(embedder.handle, tokens, lengths, 1, MEAN, out, 255) == lib.VELO_INVALID
    assert lib.velo_embed(embedder.handle, tokens, lengths, -1, MEAN, out, 255) == lib.VELO_INVALID
    assert lib.velo_embed(embedder.handle, tokens, ffi.NULL, 1, MEAN, out, 255) == lib.VELO_INVALID
    assert lib.velo_embed(embedder.handle, ffi.NULL, lengths, 1, MEAN, out, 255) == lib.VELO_INVALID
    assert lib.velo_embed(embedder.handle, tokens, lengths, 1, MEAN, ffi.NULL, 256) == lib.VELO_INVALID


def test_a_call_can_be_cancelled_and_the_next_one_runs(embedder: Embedder) -> None:
    embedder.cancel()  # no call is in progress
    raised: list[BaseException] = []

    def work() -> None:
        try:
            embedder.embed([[5] * 600] * 2000, MEAN)
        except Cancelled as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        embedder.cancel()
        time.sleep(0.01)
    thread.join()
    assert len(raised) == 1
    assert np.isfinite(embedder.embed([[5] * 600], MEAN)).all()


def test_an_embedder_outlives_its_model_until_close(tiny_model_f32: Path) -> None:
    model = Model(tiny_model_f32)
    with Embedder(model, max_tokens=16, n_threads=1) as made:
        model.close()
        assert made.embed([[1, 2, 3]], MEAN).shape == (1, 256)
    assert made.closed
    with pytest.raises(ClosedError):
        made.embed([[1]], MEAN)
    with pytest.raises(ClosedError):
        Embedder(model, max_tokens=16)
