"""The C interface itself: no argument makes it crash."""

from __future__ import annotations

from typing import Any

import pytest

from pyvelo.native import Context, Embedder, Model, Sampler
from pyvelo.native._ffi import ffi, lib

FUNCTIONS = sorted(name for name in dir(lib) if name.startswith("velo_") and callable(getattr(lib, name)))
CHECKED = [name for name in FUNCTIONS if ffi.typeof(getattr(lib, name)).result.kind == "enum"]  # type: ignore[attr-defined]
HANDLES = ("velo_model", "velo_context", "velo_sampler", "velo_embedder")


def empty(kind: Any) -> Any:
    """Return NULL, or 0."""
    if kind.kind in ("pointer", "function"):
        return ffi.NULL
    return 0.0 if kind.cname in ("float", "double") else 0


def arguments(name: str) -> list[Any]:
    return list(ffi.typeof(getattr(lib, name)).args)  # type: ignore[attr-defined]


def handle_of(name: str) -> str | None:
    """Return the type of the first argument of a function, if it is a handle."""
    first = arguments(name)[0]
    kind = first.item.cname.removeprefix("struct ") if first.kind == "pointer" else ""
    return kind if kind in HANDLES else None


def message() -> bytes:
    return ffi.string(lib.velo_message())


def test_the_interface_has_some_fifty_functions() -> None:
    assert 50 <= len(FUNCTIONS) <= 72
    assert len(CHECKED) >= 30


@pytest.mark.parametrize("name", sorted(set(CHECKED) - {"velo_log_set"}))
def test_null_everywhere(name: str) -> None:
    status = getattr(lib, name)(*map(empty, arguments(name)))
    assert status == lib.VELO_INVALID
    assert b"NULL" in message()


@pytest.mark.parametrize("name", [name for name in CHECKED if handle_of(name) and len(arguments(name)) > 1])
def test_a_handle_and_null_for_all_other_arguments(name: str, model: Model, context: Context) -> None:
    sampler = Sampler(model, seed=0)
    embedder = Embedder(model, max_tokens=8, n_threads=1)
    handles = {
        "velo_model": model.handle,
        "velo_context": context.handle,
        "velo_sampler": sampler.handle,
        "velo_embedder": embedder.handle,
    }
    status = getattr(lib, name)(handles[str(handle_of(name))], *map(empty, arguments(name)[1:]))
    # these succeed with no blocks to copy, no rows to sample and no adapter to apply
    harmless = {
        "velo_sample", "velo_logprobs", "velo_blocks_copy", "velo_blocks_read", "velo_blocks_write",
        "velo_blocks_fill", "velo_state_clear", "velo_context_set_threads", "velo_sampler_prompt",
        "velo_sampler_mask", "velo_blocks_swap_out", "velo_blocks_swap_in", "velo_context_adapt",
        "velo_embedder_adapt",
    }  # fmt: skip
    assert status == (lib.VELO_OK if name in harmless else lib.VELO_INVALID)


@pytest.mark.parametrize("n", [-1, -(2**31)])
def test_negative_sizes(model: Model, context: Context, n: int) -> None:
    null, sampler = ffi.NULL, Sampler(model, seed=0)
    out, length = ffi.new("int32_t *"), ffi.new("size_t *")
    assert lib.velo_sampler_prompt(sampler.handle or null, null, n) == lib.VELO_INVALID
    assert lib.velo_sample(context.handle, null, null, n, null, null) == lib.VELO_INVALID
    assert lib.velo_blocks_copy(context.handle, null, null, n) == lib.VELO_INVALID
    assert lib.velo_blocks_read(context.handle, null, n, null, 0) == lib.VELO_INVALID
    assert lib.velo_blocks_write(context.handle, null, n, null, 0) == lib.VELO_INVALID
    assert lib.velo_blocks_fill(context.handle, null, n, 0) == lib.VELO_INVALID
    assert lib.velo_detokenize(model.handle, null, n, 0, null, 0, length) == lib.VELO_INVALID
    assert lib.velo_tokenize(model.handle, b"a", 1, 0, 0, null, n, out) == lib.VELO_INVALID
    assert lib.velo_tokenize(model.handle, b"a", 2**40, 0, 0, null, 0, out) == lib.VELO_INVALID
    assert lib.velo_model_meta_key(model.handle, n, null, 0, length) == lib.VELO_INVALID
    assert lib.velo_model_meta_value(model.handle, b"no.such.key", null, 0, length) == lib.VELO_INVALID
    assert lib.velo_model_layers(model.handle, null, n, out) == lib.VELO_BUFFER_TOO_SMALL
    assert out[0] == len(model.layers)


def test_null_can_be_freed() -> None:
    lib.velo_model_free(ffi.NULL)
    lib.velo_context_free(ffi.NULL)
    lib.velo_sampler_free(ffi.NULL)
    lib.velo_embedder_free(ffi.NULL)
    lib.velo_adapter_free(ffi.NULL)
    lib.velo_chat_template_free(ffi.NULL)
    lib.velo_chat_plan_free(ffi.NULL)


def test_batches_without_arrays(context: Context) -> None:
    batch = ffi.new("velo_batch *")
    batch.n_tokens = batch.n_seqs = 1
    assert lib.velo_context_run(context.handle, batch) == lib.VELO_INVALID
    batch.n_copies = 1
    assert lib.velo_context_run(context.handle, batch) == lib.VELO_INVALID
    batch.n_copies = -1
    assert lib.velo_context_run(context.handle, batch) == lib.VELO_INVALID


def test_samplers_that_are_null(context: Context) -> None:
    samplers, rows, out = ffi.new("velo_sampler *[1]"), ffi.new("int32_t[1]"), ffi.new("int32_t[1]")
    assert lib.velo_sample(context.handle, rows, samplers, 1, out, out) == lib.VELO_INVALID
    assert b"a sampler is NULL" in message()


def test_the_message_is_of_this_thread(model: Model) -> None:
    import threading

    assert lib.velo_token_is_end(model.handle, -5, ffi.NULL) == lib.VELO_INVALID
    mine = message()
    other: list[bytes] = []
    thread = threading.Thread(target=lambda: other.append(message()))
    thread.start()
    thread.join()
    assert mine.startswith(b"token -5")
    assert other == [b""]
