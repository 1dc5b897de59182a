"""Logprobs of the matrix's answers, compared with the contiguous path's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scripts.check._matrix_axes import Config
from tests.e2e.contiguous import CDEF

if TYPE_CHECKING:
    from pyvelo.outputs import RequestOutput, TokenLogprob

N_CTX = 1024

FACTOR = 4.0
"""Largest ratio of our logprobs' error to the contiguous path's over the same types."""

FLOOR = {"f32": 1e-6, "q8_0": 1e-3}
"""Normalised squared error of rounding for each type of weights. q8_0 rounds activations to bytes."""


def too_far(config: Config, model: Path, outputs: Sequence[RequestOutput]) -> list[str]:
    """Compare logprobs with the contiguous path over f32 pages (the truth) and over the same types."""
    if not outputs:
        return []
    ours = np.concatenate([_top(output.outputs[0].logprobs or ()) for output in outputs])
    truth = _follow(model, outputs, ("f32", "f32"))
    far = _nmse(truth, ours)
    if far <= FLOOR[config.weights]:
        return []
    stock = _follow(model, outputs, config.kv_types)
    near = _nmse(truth, stock)
    if far <= FACTOR * near:
        return []
    return [f"logprobs are {far:.1e} from those over f32, the contiguous path's are {near:.1e}"]


def _top(logprobs: Sequence[TokenLogprob]) -> npt.NDArray[np.float64]:
    return np.array([value for token in logprobs for _, value in token.top], np.float64)


def _nmse(expected: npt.NDArray[np.float64], actual: npt.NDArray[np.float64]) -> float:
    return float(((expected - actual) ** 2).sum() / (expected**2).sum())


def _follow(
    model: Path, outputs: Sequence[RequestOutput], kv_types: tuple[str, str]
) -> npt.NDArray[np.float64]:
    """Decode prompts and answers in the contiguous path; return the logprobs of the listed tokens."""
    from pyvelo.kv.types import KV_TYPES

    ffi, lib = _laboratory()
    params = ffi.new("struct contiguous_params *")
    params.type_k, params.type_v = (KV_TYPES[name].id for name in kv_types)
    params.n_ctx = params.n_batch = N_CTX
    params.n_seqs, params.n_threads = 1, 1
    params.flash_attn = int(kv_types != ("f32", "f32"))
    handle = lib.contiguous_open(os.fsencode(model), params)
    if handle == ffi.NULL:
        raise AssertionError(f"the contiguous path does not open {model} with {kv_types}")
    values: list[float] = []
    held: list[int] = []
    try:
        for output in outputs:
            prompt = output.prompt_token_ids
            pairs = zip(
                held, prompt[:-2], strict=False
            )  # at least two rows, so that the last is not the first
            n_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            begin = lib.contiguous_keep(handle, n_shared, 0)
            held = [*prompt, *output.token_ids[:-1]]
            values += _logprobs(handle, held, begin, output)
    finally:
        lib.contiguous_close(handle)
    return np.array(values, np.float64)


def _logprobs(handle: Any, ids: Sequence[int], begin: int, output: RequestOutput) -> Iterator[float]:
    """Decode a prompt from `begin` on and its answer; yield the logprobs of the listed tokens."""
    ffi, lib = _laboratory()
    tokens = np.array(ids, np.int32)
    logits = np.empty(lib.contiguous_n_vocab(handle), np.float32)
    end = len(output.prompt_token_ids)
    for token in output.outputs[0].logprobs or ():
        part = ffi.from_buffer("int32_t[]", tokens[begin:end])
        if lib.contiguous_decode(handle, part, end - begin, begin, 0):
            raise AssertionError("the contiguous path does not decode")
        lib.contiguous_logits(handle, ffi.from_buffer("float[]", logits))
        exact = logits.astype(np.float64)
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        yield from (exact[number] for number, _ in token.top)
        begin, end = end, end + 1


@cache
def _laboratory() -> tuple[Any, Any]:
    """Open the library of the tests, which exports the contiguous path."""
    from cffi import FFI

    import pyvelo

    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    library = Path(pyvelo.__file__).parent / "native" / "lib" / f"libvelo-lab{suffix}"
    if not library.exists():
        raise SystemExit(f"{library} is missing: install with -C cmake.define.PYVELO_BUILD_TESTS=ON")
    ffi = FFI()
    ffi.cdef(CDEF)
    return ffi, ffi.dlopen(os.fspath(library))
