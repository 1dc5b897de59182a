"""Contexts: a pool of blocks on the model's devices, and the steps that run over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, ConfigError
from ._ffi import Handle, check, created, ffi, from_c, int32, ints, lib
from .arrays import StepArrays
from .library import devices
from .model import Model
from .sampler import Sampler

__all__ = ["Context", "ContextInfo", "DeviceMemory", "Timings"]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ContextInfo:
    """Sizes of a context. `n_states` is 0 if the model has no recurrent layers.

    `block_bytes` are the bytes of one block over all layers of a group, K and V; `pool_bytes` are allocated
    for all blocks.
    """

    n_blocks: int
    block_size: int
    n_groups: int
    n_states: int
    max_batch_tokens: int
    block_bytes: int
    pool_bytes: int
    state_bytes: int
    compute_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device, a number in `devices()`. `pool_bytes` includes recurrent states."""

    device: int
    weight_bytes: int
    pool_bytes: int
    compute_bytes: int


@dataclass(frozen=True)
class Timings:
    """Totals since the context was made. `n_graphs_reused` counts runs with the graph of the run before."""

    n_runs: int
    n_tokens: int
    n_graphs_reused: int
    run_seconds: float
    sample_seconds: float


class Context(Handle):
    """Pool of KV blocks and the graphs that use it.

    Calls from several threads run one after another, except `cancel()`.

    Args:
        model: the model to run; the context keeps its weights alive.
        n_blocks: blocks of the pool; their tokens must be a multiple of 256.
        block_size: tokens of a block: 32, 64, 128 or 256.
        type_k, type_v: ggml types of K and V rows; 1 is f16.
        max_batch_tokens: tokens of one step.
        max_seqs: sequences of one step, and recurrent states if the model has them.
        max_seq_len: tokens of one sequence.
        max_outputs: rows of logits of one step; None: one for each sequence.
        n_threads: 0 uses all cores.
        deterministic: logits do not depend on the rest of the batch; the model must be loaded so, too.
        fast_attention: products of many query rows may be rounded to bfloat16, for all types.
        n_swap_blocks: blocks in host memory beside the pool, for `swap_out`.
        layer_groups: group of each layer, from 0 on; -1 for a layer without a cache. Empty: one group.
        slot_bytes: bytes of a slot, if no layer of the model has a cache.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
        UnsupportedError: the model cannot be paged, or not with these types.
        OutOfMemory: the pool does not fit.
        ClosedError: the model was closed.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_blocks: int,
        block_size: int = 32,
        type_k: int = 1,
        type_v: int = 1,
        max_batch_tokens: int = 512,
        max_seqs: int = 256,
        max_seq_len: int,
        max_outputs: int | None = None,
        n_threads: int = 0,
        deterministic: bool = False,
        fast_attention: bool = False,
        n_swap_blocks: int = 0,
        layer_groups: Sequence[int] = (),
        slot_bytes: int = 0,
    ) -> None:
        params = ffi.new("velo_context_params *")
        params.n_blocks = int32("n_blocks", n_blocks)
        params.block_size = int32("block_size", block_size)
        params.type_k = int32("type_k", type_k)
        params.type_v = int32("type_v", type_v)
        params.max_batch_tokens = int32("max_batch_tokens", max_batch_tokens)
        params.max_seqs = int32("max_seqs", max_seqs)
        params.max_seq_len = int32("max_seq_len", max_seq_len)
        params.max_outputs = int32("max_outputs", max_outputs or 0)
        params.n_threads = int32("n_threads", n_threads)
        params.deterministic = bool(deterministic)
        params.fast_attention = bool(fast_attention)
        params.n_swap_blocks = int32("n_swap_blocks", n_swap_blocks)
        params.slot_bytes = int32("slot_bytes", slot_bytes)
        groups = ffi.new("int32_t[]", [int32("layer_groups", group) for group in layer_groups])
        if layer_groups:
            params.layer_groups, params.n_layer_groups = groups, len(layer_groups)
        out = ffi.new("velo_context **")
        status = lib.velo_context_create(model.handle, params, out)
        self._handle = created(status, out, lib.velo_context_free)
        self.n_vocab: Final[int] = model.info.n_vocab
        self._watcher = model.watcher
        self._block_bytes = self.info.block_bytes

    @property
    def info(self) -> ContextInfo:
        """Sizes of the context. Some buffers grow with the steps."""
        out = ffi.new("velo_context_info *")
        check(lib.velo_context_get_info(self.handle, out))
        return from_c(ContextInfo, out)

    @property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """Memory on each device in use, the model's weights included."""
        count = ffi.new("int32_t *")
        capacity = 16
        while True:
            found = ffi.new("velo_device_memory[]", capacity)
            status = lib.velo_context_memory(self.handle, found, capacity, count)
            if status != lib.VELO_BUFFER_TOO_SMALL:
                check(status)
                return tuple(from_c(DeviceMemory, found[i]) for i in range(count[0]))
            capacity = count[0]

    @property
    def pins_swap(self) -> bool:
        """Whether memory for all swapped blocks is taken at the start: a GPU copies from and to it."""
        there = devices()
        return any(each.pool_bytes and there[each.device].kind in ("gpu", "igpu") for each in self.memory)

    @property
    def timings(self) -> Timings:
        """Totals of the runs so far."""
        out = ffi.new("velo_timings *")
        check(lib.velo_context_timings(self.handle, out))
        return from_c(Timings, out)

    def run(self, arrays: StepArrays, n_tokens: int, n_seqs: int, n_copies: int = 0) -> None:
        """Run one step: copy blocks, then the forward pass of `n_tokens` tokens of `n_seqs` sequences.

        The first run of a model packs its weights. An exception of the model's `progress` is raised here.

        Raises:
            ConfigError: the arrays contradict one another; nothing was computed.
            Cancelled: `cancel()` was called meanwhile. The same step may be run again, but all recurrent
                states are cleared.
            ComputeError: the computation failed.
        """
        max_tokens, max_seqs, max_copies = arrays.limits
        if not (0 < n_tokens <= max_tokens and 0 < n_seqs <= max_seqs and 0 <= n_copies <= max_copies):
            raise ConfigError(
                f"a step of {n_tokens} tokens, {n_seqs} sequences and {n_copies} copies does not fit the "
                f"arrays, which have room for {max_tokens}, {max_seqs} and {max_copies}"
            )
        batch = arrays.batch
        batch.n_tokens = n_tokens
        batch.n_seqs = n_seqs
        batch.n_copies = n_copies
        if self._watcher.packed:
            check(lib.velo_context_run(self.handle, batch))
        else:
            self._watcher.run(lib.velo_context_run, self.handle, batch)

    def cancel(self) -> None:
        """Make a run in progress, in another thread, raise `Cancelled` soon. A later run is not affected."""
        check(lib.velo_context_cancel(self.handle))

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of an output row of the last run: a copy, float32 [n_vocab].

        Raises:
            ConfigError: the last run had no such row.
        """
        out = np.empty(self.n_vocab, np.float32)
        target = ffi.from_buffer("float[]", out)
        check(lib.velo_context_logits(self.handle, int32("row", row), target, self.n_vocab))
        return out

    def sample(self, rows: Int32Array, samplers: Sequence[Sampler]) -> tuple[Int32Array, Int32Array]:
        """Sample a token for each of these output rows of the last run, each with its own sampler.

        Args:
            rows: int32 [n], output rows.
            samplers: one for each row; each remembers its tokens.

        Returns:
            Tokens and statuses, int32 [n] each. A status other than 0 means that no token could be
            sampled: the logits have a NaN or an infinity, or every token is banned.

        Raises:
            ConfigError: a row or a sampler is wrong; no sampler has changed.
            ClosedError: the context or a sampler was closed.
        """
        n = len(samplers)
        rows = np.ascontiguousarray(rows, np.int32)
        if rows.shape != (n,):
            raise ConfigError(f"{n} samplers need as many rows, but rows have the shape {rows.shape}")
        handles = [sampler.handle for sampler in samplers]
        if None in handles:
            raise ClosedError("a sampler was closed")
        tokens = np.empty(n, np.int32)
        statuses = np.empty(n, np.int32)
        check(
            lib.velo_sample(
                self.handle,
                ints(rows),
                ffi.new("velo_sampler *[]", handles),
                n,
                ints(tokens),
                ints(statuses),
            )
        )
        return tokens, statuses

    def logprobs(
        self, rows: Int32Array, tokens: Int32Array, k: int = 0
    ) -> tuple[Float32Array, Int32Array, Float32Array]:
        """Return log probabilities of output rows of the last run, before a sampler's bias and temperature.

        Args:
            rows: int32 [n], output rows.
            tokens: int32 [n], one for each row.
            k: number of the most likely tokens to return.

        Returns:
            ln of the probability of each token, float32 [n]; the k most likely tokens, int32 [n, k], the most
            likely first; their log probabilities, float32 [n, k]. A token is -1 if fewer than k are possible.

        Raises:
            ConfigError: a row, a token or k is wrong.
            ComputeError: the logits have a NaN or an infinity.
        """
        rows, tokens = np.ascontiguousarray(rows, np.int32), np.ascontiguousarray(tokens, np.int32)
        n = len(rows)
        if rows.ndim != 1 or tokens.shape != (n,):
            raise ConfigError(f"rows and tokens must be equally many, not {rows.shape} and {tokens.shape}")
        k = int32("k", k)
        out = np.empty(n, np.float32)
        top_tokens, top = np.empty((n, max(0, k)), np.int32), np.empty((n, max(0, k)), np.float32)
        status = lib.velo_logprobs(
            self.handle,
            ints(rows),
            ints(tokens),
            n,
            k,
            ffi.from_buffer("float[]", out),
            ints(top_tokens.reshape(-1)),
            ffi.from_buffer("float[]", top.reshape(-1)),
        )
        check(status)
        return out, top_tokens, top

    def set_threads(self, n_threads: int) -> None:
        """Compute with this number of threads from now on; 0 uses all cores."""
        check(lib.velo_context_set_threads(self.handle, int32("n_threads", n_threads)))

    # ---- whole blocks, over all layers ----

    def copy_blocks(self, src: Sequence[int] | Int32Array, dst: Sequence[int] | Int32Array) -> None:
        """Copy the blocks `src` to the blocks `dst`, one by one.

        Raises:
            ConfigError: they are not equally many, or not all in the pool.
        """
        sources, targets = _blocks(src), _blocks(dst)
        _check_pairs(sources, targets)
        check(lib.velo_blocks_copy(self.handle, ints(sources), ints(targets), len(sources)))

    def read_blocks(self, blocks: Sequence[int] | Int32Array) -> npt.NDArray[np.uint8]:
        """Return the bytes of blocks, uint8 [n, block_bytes]: layer by layer, K rows and then V rows.

        Raises:
            ConfigError: one is not in the pool.
        """
        ids = _blocks(blocks)
        out = np.empty((len(ids), self._block_bytes), np.uint8)
        target = ffi.from_buffer("uint8_t[]", out.reshape(-1))
        check(lib.velo_blocks_read(self.handle, ints(ids), len(ids), target, out.nbytes))
        return out

    def write_blocks(self, blocks: Sequence[int] | Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Write the bytes of blocks, uint8 [n, block_bytes], as `read_blocks` returns them.

        Raises:
            ConfigError: a block is not in the pool, or `data` has another shape or type.
        """
        ids = _blocks(blocks)
        shape = (len(ids), self._block_bytes)
        if data.dtype != np.uint8 or data.shape != shape:
            raise ConfigError(
                f"the data of {len(ids)} blocks are uint8 of shape {shape}, not {data.dtype} of {data.shape}"
            )
        source = ffi.from_buffer("uint8_t[]", np.ascontiguousarray(data).reshape(-1))
        check(lib.velo_blocks_write(self.handle, ints(ids), len(ids), source, data.nbytes))

    def swap_out(self, blocks: Sequence[int] | Int32Array, swap_blocks: Sequence[int] | Int32Array) -> None:
        """Copy blocks to `swap_blocks` in host memory, numbers from 0 to `n_swap_blocks` - 1.

        Raises:
            ConfigError: they are not equally many, or one does not exist.
        """
        sources, targets = _blocks(blocks), _blocks(swap_blocks)
        _check_pairs(sources, targets)
        check(lib.velo_blocks_swap_out(self.handle, ints(sources), ints(targets), len(sources)))

    def swap_in(self, swap_blocks: Sequence[int] | Int32Array, blocks: Sequence[int] | Int32Array) -> None:
        """Copy `swap_blocks` of host memory to blocks.

        Raises:
            ConfigError: they are not equally many, or one does not exist.
        """
        sources, targets = _blocks(swap_blocks), _blocks(blocks)
        _check_pairs(sources, targets)
        check(lib.velo_blocks_swap_in(self.handle, ints(sources), ints(targets), len(sources)))

    def fill_blocks(self, blocks: Sequence[int] | Int32Array, byte: int) -> None:
        """Set every byte of blocks; 0xFF is NaN in f32, f16 and bf16 and in the scales of the other types.

        Raises:
            ConfigError: a block is not in the pool, or `byte` is out of range.
        """
        if not 0 <= byte <= 255:
            raise ConfigError(f"byte is {byte}, but must be from 0 to 255")
        ids = _blocks(blocks)
        check(lib.velo_blocks_fill(self.handle, ints(ids), len(ids), byte))

    def clear_state(self, state: int) -> None:
        """Clear a recurrent state for a new sequence. Do nothing without recurrent states."""
        check(lib.velo_state_clear(self.handle, int32("state", state)))

    def copy_state(self, source: int, target: int) -> None:
        """Copy a recurrent state to another one; raise ConfigError if one does not exist."""
        check(lib.velo_state_copy(self.handle, int32("source", source), int32("target", target)))

    def save_state(self, state: int, blocks: Sequence[int] | Int32Array, *, swapped: bool = False) -> None:
        """Save a recurrent state in blocks of the pool; swapped: of host memory.

        Raises:
            ConfigError: the state or a block does not exist, or the number of blocks is wrong.
        """
        ids = _blocks(blocks)
        check(lib.velo_state_save(self.handle, int32("state", state), ints(ids), len(ids), swapped))

    def load_state(self, state: int, blocks: Sequence[int] | Int32Array, *, swapped: bool = False) -> None:
        """Load a recurrent state from blocks in which one was saved; raise as `save_state`."""
        ids = _blocks(blocks)
        check(lib.velo_state_load(self.handle, int32("state", state), ints(ids), len(ids), swapped))


def _blocks(blocks: Sequence[int] | Int32Array) -> Int32Array:
    if isinstance(blocks, np.ndarray) and blocks.dtype == np.int32 and blocks.ndim == 1:
        return np.ascontiguousarray(blocks)
    return np.array([int32("a block", block) for block in blocks], np.int32)


def _check_pairs(sources: Int32Array, targets: Int32Array) -> None:
    if len(sources) != len(targets):
        raise ConfigError(f"{len(sources)} blocks cannot be copied to {len(targets)}")
