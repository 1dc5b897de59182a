"""The laboratory library from Python: operators on NumPy arrays.

`PYVELO_LAB` names another library file than the installed one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cffi import FFI

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.int32]

#: name: the number that ggml gives the type
KV_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
#: of weights too
TYPES = {**KV_TYPES, "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_xs": 23, "mxfp4": 39}
QUANTIZED = tuple(name for name in KV_TYPES if name not in ("f32", "f16", "bf16"))
HEADER = 20
"""Integers in front of the block ids of a table row."""
WINDOWS = {"none": 0, "sliding": 1, "chunked": 2}
DETERMINISTIC = 1
FAST = 2
SINGLE = 4
PREFIXES = 8

_CDEF = """
struct lab_run {
    int32_t n_threads, use_ref, n_layers, repeat;
    int64_t layer_stride;
    double *seconds;
};
struct lab_paged {
    int32_t type_k, type_v;
    int64_t d_k, d_v, n_head, n_head_kv, n_tokens, n_slots;
    int64_t n_rows, width;
    int64_t q_head_stride, q_token_stride;
    int64_t k_head_stride, k_slot_stride;
    int64_t v_head_stride, v_slot_stride;
    float scale, max_bias, softcap;
    int32_t block_size, window, window_type, flags;
    const float *q;
    const void *k, *v;
    const int32_t *table;
    const float *sinks;
    float *out;
};
struct lab_flash {
    int32_t type_k, type_v;
    int64_t d_k, d_v, n_head, n_head_kv, n_q, n_kv, n_seqs;
    float scale, max_bias, softcap;
    const float *q;
    const void *k, *v;
    const uint16_t *mask;
    const float *sinks;
    float *out;
};
const char *lab_paged_attn(const struct lab_paged *op, const struct lab_run *run);
const char *lab_team_barrier(int32_t n_threads, int32_t n_rounds);
struct lab_crew;
struct lab_crew *lab_crew_new(int32_t most);
void lab_crew_free(struct lab_crew *crew);
int32_t lab_crew_worked(struct lab_crew *crew, int64_t time, int64_t wall, int64_t lost, int64_t n_tokens);
void lab_find_shared(int32_t *table, int64_t n_rows, int64_t width, int32_t block_size);
const char *lab_paged_attn_gpu(const struct lab_paged *op, int32_t n_blocks, int32_t shared_bytes,
                               int64_t workspace_bytes, bool tensor_cores, int32_t order);
struct lab_gpu_launch {
    int32_t min_rows, max_rows, division, tile_rows, columns, tile_tokens, shared_bytes;
};
struct lab_gpu_item {
    int32_t row, tile, head_kv, split, n_splits, members, partials, begin, end;
};
const char *lab_gpu_refusal(const struct lab_paged *op, int32_t shared_bytes);
int32_t lab_gpu_launches(const struct lab_paged *op, int32_t shared_bytes, struct lab_gpu_launch *to);
int64_t lab_gpu_max_partials(const struct lab_paged *op);
int32_t lab_gpu_items(const struct lab_paged *op, const struct lab_gpu_launch *kernel, int32_t n_blocks,
                      struct lab_gpu_item *to, int32_t capacity);
const char *lab_flash_attn(const struct lab_flash *op, const struct lab_run *run);
struct lab_product {
    int32_t type, n_threads, packed;
    int64_t n_out, n_in, n_rows, n_experts, n_used;
    int32_t own_rows;
    const int32_t *experts;
    const void *weights;
    const float *x;
    float *out;
    const char *layout;
};
const char *lab_product_run(struct lab_product *p);
const char *lab_quantize(int32_t type, const float *from, void *to, int64_t n_rows, int64_t n);
const char *lab_dequantize(int32_t type, const void *from, float *to, int64_t n_rows, int64_t n);
int64_t lab_row_size(int32_t type, int64_t n);
const char *lab_type_name(int32_t type);
double lab_read_rate(const void *data, int64_t bytes, int32_t n_threads, int32_t n_streams);
"""


def _library() -> Path:
    if named := os.environ.get("PYVELO_LAB"):
        return Path(named)
    name = {"darwin": "libvelo-lab.dylib", "win32": "velo-lab.dll"}.get(sys.platform, "libvelo-lab.so")
    spec = importlib.util.find_spec("pyvelo")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / "native" / "lib" / name
        if path.exists():
            return path
    raise FileNotFoundError(f"no {name} in {folders}: build with -DPYVELO_BUILD_TESTS=ON, or set PYVELO_LAB")


_ffi = FFI()
_ffi.cdef(_CDEF)
_lib = _ffi.dlopen(str(_library()))


def _raise_on(message: Any) -> None:
    if message != _ffi.NULL:
        raise ValueError(_ffi.string(message).decode())


def _pointer(array: npt.NDArray[Any] | None, ctype: str) -> Any:
    return _ffi.NULL if array is None else _ffi.cast(ctype, array.ctypes.data)


@dataclass
class Run:
    """Settings of a run: threads, the CPU backend's reference mode, layers and repetitions of benchmarks."""

    threads: int = 2
    use_ref: bool = False
    layers: int = 1
    layer_stride: int = 0  # bytes
    repeat: int = 1


@dataclass
class Heads:
    """The sizes of one attention layer."""

    d_k: int
    d_v: int
    n_head: int
    n_head_kv: int
    type_k: str = "f16"
    type_v: str = "f16"


@dataclass
class Params:
    """The operator's parameters; `scale` None: 1/sqrt(d_k)."""

    scale: float | None = None
    max_bias: float = 0.0
    softcap: float = 0.0
    block_size: int = 32
    window: int = 0
    window_type: str = "none"
    deterministic: bool = False
    fast: bool = False
    single: bool = False
    prefixes: bool = False


def row_size(kv_type: str, n: int) -> int:
    """Bytes of a row of n elements; ValueError where n is not a whole number of groups."""
    size = int(_lib.lab_row_size(TYPES[kv_type], n))
    if size < 0:
        raise ValueError(f"{n} elements are not a whole number of groups of {kv_type}")
    return size


def type_name(number: int) -> str:
    """ggml's name for one of its type numbers."""
    return str(_ffi.string(_lib.lab_type_name(number)).decode())


def quantize(kv_type: str, rows: Floats) -> Bytes:
    """[..., n] floats to [..., row_size] bytes."""
    rows = np.ascontiguousarray(rows, np.float32)
    n = rows.shape[-1]
    out = np.empty((*rows.shape[:-1], row_size(kv_type, n)), np.uint8)
    _raise_on(
        _lib.lab_quantize(
            TYPES[kv_type], _pointer(rows, "float *"), _pointer(out, "void *"), rows.size // n, n
        )
    )
    return out


def dequantize(kv_type: str, rows: Bytes, n: int) -> Floats:
    """[..., row_size] bytes to [..., n] floats."""
    rows = np.ascontiguousarray(rows)
    out = np.empty((*rows.shape[:-1], n), np.float32)
    _raise_on(
        _lib.lab_dequantize(
            TYPES[kv_type], _pointer(rows, "void *"), _pointer(out, "float *"), out.size // n, n
        )
    )
    return out


def product(kind: str, weights: Bytes, rows: Floats, *, packed: bool, threads: int = 2) -> Floats | None:
    """Return weights (bytes [n_out, row_size]) times rows [n, n_in]; None if no layout packs them."""
    return product_in(kind, weights, rows, packed=packed, threads=threads)[0]


def product_in(
    kind: str, weights: Bytes, rows: Floats, *, packed: bool, threads: int = 2, layout: str | None = None
) -> tuple[Floats | None, str | None]:
    """The same, and what ggml calls the layout that the weights had; `layout` is the only one to try."""
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.full((len(rows), len(weights)), np.nan, np.float32)
    c = _new_product(kind, weights, rows, out, packed, threads)
    return _run_product(c, out, layout)


def expert_products(
    kind: str, weights: Bytes, rows: Floats, experts: Table, *, packed: bool, threads: int = 2
) -> Floats | None:
    """Return rows [n, n_used or 1, n_in] times the weights of their experts; None if no layout packs these.

    `weights` are bytes [n_experts, n_out, row_size], `experts` [n, n_used], the result [n, n_used, n_out].
    """
    rows, experts = np.ascontiguousarray(rows, np.float32), np.ascontiguousarray(experts, np.int32)
    out = np.full((*experts.shape, weights.shape[1]), np.nan, np.float32)
    c = _new_product(kind, weights, rows, out, packed, threads)
    c.n_experts, c.n_used, c.own_rows = len(weights), experts.shape[1], rows.shape[1] > 1
    c.experts = _pointer(experts, "int32_t *")
    return _run_product(c, out, None)[0]


def _new_product(kind: str, weights: Bytes, rows: Floats, out: Floats, packed: bool, threads: int) -> Any:
    """Return the struct, which points to these arrays."""
    c = _ffi.new("struct lab_product *")
    c.type, c.n_threads, c.packed = TYPES[kind], threads, packed
    c.n_out, c.n_in, c.n_rows = weights.shape[-2], rows.shape[-1], len(rows)
    c.weights, c.x = _pointer(weights, "void *"), _pointer(rows, "float *")
    c.out = _pointer(out, "float *")
    return c


def _run_product(c: Any, out: Floats, layout: str | None) -> tuple[Floats | None, str | None]:
    wanted = _ffi.NULL if layout is None else _ffi.new("char[]", layout.encode())
    c.layout = wanted
    message = _lib.lab_product_run(c)
    if message != _ffi.NULL and b"nothing here" in _ffi.string(message):
        return None, None
    _raise_on(message)
    return out, _ffi.string(c.layout).decode()


def read_rate(threads: int, streams: int, tries: int) -> float:
    """Bytes a second that memory gives `threads` threads, each of which reads from `streams` places in turns.

    The best of so many tries over 512 MB.
    """
    memory = np.ones(512 << 20, np.uint8)
    at = _pointer(memory, "void *")
    return max(float(_lib.lab_read_rate(at, memory.nbytes, threads, streams)) for _ in range(tries))


def _run_struct(run: Run) -> tuple[Any, npt.NDArray[np.float64]]:
    seconds = np.zeros(run.repeat, np.float64)
    c = _ffi.new("struct lab_run *")
    c.n_threads, c.use_ref, c.n_layers, c.repeat = run.threads, run.use_ref, run.layers, run.repeat
    c.layer_stride = run.layer_stride
    c.seconds = _pointer(seconds, "double *")
    return c, seconds


def paged_attention(
    heads: Heads,
    params: Params,
    q: Floats,
    k: Bytes,
    v: Bytes | None,
    table: Table,
    sinks: Floats | None = None,
    run: Run | None = None,
    out: Floats | None = None,
) -> tuple[Floats, npt.NDArray[np.float64]]:
    """The operator on the arrays themselves; returns (out, seconds of each repetition).

    q [n_tokens, n_head, d_k]; k and v [n_slots, n_head_kv, row bytes], v None for a view of k; these may be
    strided views whose last axis is contiguous. table [n_rows, HEADER + width]; out [n_tokens, n_head, d_v].
    ValueError carries the sentence with which the operator refused.
    """
    out = np.empty((q.shape[0], heads.n_head, heads.d_v), np.float32) if out is None else out
    op = _paged_struct(heads, params, q, k, v, table, sinks, out)
    c_run, seconds = _run_struct(run or Run())
    _raise_on(_lib.lab_paged_attn(op, c_run))
    return out, seconds


def paged_attention_gpu(
    heads: Heads,
    params: Params,
    q: Floats,
    k: Bytes,
    v: Bytes | None,
    table: Table,
    sinks: Floats | None = None,
    blocks: int = 4,
    shared_bytes: int = 227 << 10,
    tensor_cores: bool = True,
    order: int = 0,
    workspace_bytes: int = 256 << 20,
) -> Floats:
    """The same by the kernels for GPUs, on the host: so many blocks of threads, so much memory for each.

    The call is computed in parts whose partial results fit into the workspace, a row of the table at least.
    Threads take turns from the first one on (order 0), from the last one on (-1), or by chance (a seed).
    """
    out = np.full((q.shape[0], heads.n_head, heads.d_v), np.nan, np.float32)
    op = _paged_struct(heads, params, q, k, v, table, sinks, out)
    _raise_on(
        _gpu_library().lab_paged_attn_gpu(op, blocks, shared_bytes, workspace_bytes, tensor_cores, order)
    )
    return out


def find_shared(table: Table, block_size: int) -> Table:
    """Return a copy whose rows have the number of blocks that they share with the row before."""
    table = table.copy()
    _lib.lab_find_shared(_pointer(table, "int32_t *"), table.shape[0], table.shape[1] - HEADER, block_size)
    return table


@dataclass(frozen=True)
class GpuLaunch:
    """Launch of a GPU kernel, for the sequences with `min_rows` to `max_rows` packed rows."""

    min_rows: int
    max_rows: int
    division: int
    """Division of a tile among warps: 0 by tokens, 1 by rows, 2 by columns of V."""
    tile_rows: int
    columns: int
    tile_tokens: int
    shared_bytes: int


@dataclass(frozen=True)
class GpuItem:
    """Work item of a thread block: rows of a tile, a KV head, and tokens begin .. end.

    The rows belong to `members` sequences, from `row` of the table on.
    """

    row: int
    tile: int
    head_kv: int
    split: int
    n_splits: int
    members: int
    partials: int
    begin: int
    end: int


class GpuPlan:
    """Launches of a call with `shared_bytes` for a thread block; nothing is computed.

    Arrays as in paged_attention. `refusal` is the reason why no kernel supports the call, or empty.
    `launches` excludes the merge.
    """

    def __init__(
        self,
        heads: Heads,
        params: Params,
        q: Floats,
        k: Bytes,
        v: Bytes | None,
        table: Table,
        shared_bytes: int = 227 << 10,
    ) -> None:
        self._kept = (q, k, v, table, np.empty((q.shape[0], heads.n_head, heads.d_v), np.float32))
        self._op = _paged_struct(heads, params, q, k, v, table, None, self._kept[-1])
        library = _gpu_library()
        why = library.lab_gpu_refusal(self._op, shared_bytes)
        self.refusal = "" if why == _ffi.NULL else _ffi.string(why).decode()
        found = _ffi.new("struct lab_gpu_launch[3]")
        n = 0 if self.refusal else library.lab_gpu_launches(self._op, shared_bytes, found)
        launches = [GpuLaunch(*(getattr(one, name) for name in GpuLaunch.__annotations__)) for one in found]
        self.launches = launches[:n]
        self.max_partials = int(library.lab_gpu_max_partials(self._op))

    def items(self, launch: GpuLaunch, blocks: int = 4) -> list[GpuItem]:
        """Return the work items of a launch of `blocks` thread blocks, in the order of their numbers."""
        library = _gpu_library()
        kernel = _ffi.new("struct lab_gpu_launch *", [getattr(launch, n) for n in GpuLaunch.__annotations__])
        n = library.lab_gpu_items(self._op, kernel, blocks, _ffi.NULL, 0)
        found = _ffi.new("struct lab_gpu_item[]", max(1, n))
        library.lab_gpu_items(self._op, kernel, blocks, found, n)
        return [GpuItem(*(getattr(found[i], name) for name in GpuItem.__annotations__)) for i in range(n)]


@cache
def _gpu_library() -> Any:
    return _ffi.dlopen(str(_library().with_name(_library().name.replace("velo-lab", "velo-lab-gpu"))))


def _paged_struct(
    heads: Heads,
    params: Params,
    q: Floats,
    k: Bytes,
    v: Bytes | None,
    table: Table,
    sinks: Floats | None,
    out: Floats,
) -> Any:
    op = _ffi.new("struct lab_paged *")
    op.type_k, op.type_v = KV_TYPES[heads.type_k], KV_TYPES[heads.type_v]
    op.d_k, op.d_v, op.n_head, op.n_head_kv = heads.d_k, heads.d_v, heads.n_head, heads.n_head_kv
    op.n_tokens, op.n_slots = q.shape[0], k.shape[0]
    op.n_rows, op.width = table.shape[0], table.shape[1] - HEADER
    op.q_token_stride, op.q_head_stride = q.strides[0], q.strides[1]
    op.k_slot_stride, op.k_head_stride = k.strides[0], k.strides[1]
    if v is not None:
        op.v_slot_stride, op.v_head_stride = v.strides[0], v.strides[1]
    op.scale = params.scale if params.scale is not None else heads.d_k**-0.5
    op.max_bias, op.softcap, op.block_size = params.max_bias, params.softcap, params.block_size
    op.window, op.window_type = params.window, WINDOWS[params.window_type]
    chosen = {
        DETERMINISTIC: params.deterministic,
        FAST: params.fast,
        SINGLE: params.single,
        PREFIXES: params.prefixes,
    }
    op.flags = sum(flag for flag, wanted in chosen.items() if wanted)
    op.q, op.k, op.v = _pointer(q, "float *"), _pointer(k, "void *"), _pointer(v, "void *")
    op.table, op.sinks = _pointer(table, "int32_t *"), _pointer(sinks, "float *")
    op.out = _pointer(out, "float *")
    return op


def flash_attention(
    heads: Heads,
    params: Params,
    q: Floats,
    k: Bytes,
    v: Bytes | None,
    mask: npt.NDArray[np.float16],
    sinks: Floats | None = None,
    run: Run | None = None,
) -> tuple[Floats, npt.NDArray[np.float64]]:
    """Stock FLASH_ATTN_EXT; returns (out, seconds of each repetition).

    q [n_seqs, n_q, n_head, d_k], k and v [n_seqs, n_kv, n_head_kv, row bytes], v None for a view of k,
    mask [n_seqs, n_q, n_kv]; all contiguous. out [n_seqs, n_q, n_head, d_v].
    """
    run = run or Run()
    out = np.empty((*q.shape[:3], heads.d_v), np.float32)
    op = _ffi.new("struct lab_flash *")
    op.type_k, op.type_v = KV_TYPES[heads.type_k], KV_TYPES[heads.type_v]
    op.d_k, op.d_v, op.n_head, op.n_head_kv = heads.d_k, heads.d_v, heads.n_head, heads.n_head_kv
    op.n_seqs, op.n_q, op.n_kv = q.shape[0], q.shape[1], k.shape[1]
    op.scale = params.scale if params.scale is not None else heads.d_k**-0.5
    op.max_bias, op.softcap = params.max_bias, params.softcap
    op.q, op.k, op.v = _pointer(q, "float *"), _pointer(k, "void *"), _pointer(v, "void *")
    op.mask, op.sinks, op.out = (
        _pointer(mask, "uint16_t *"),
        _pointer(sinks, "float *"),
        _pointer(out, "float *"),
    )
    c_run, seconds = _run_struct(run)
    _raise_on(_lib.lab_flash_attn(op, c_run))
    return out, seconds


def meet(n_threads: int, n_rounds: int) -> None:
    """Threads meet so often at the CPU backend's barrier; raises if one left before another had come."""
    _raise_on(_lib.lab_team_barrier(n_threads, n_rounds))


class Crew:
    """Number of threads that compute, `most` at most, by the steps so far. Times are in milliseconds."""

    def __init__(self, most: int) -> None:
        self.size, self.time = most, 0.0
        self._crew = _ffi.gc(_lib.lab_crew_new(most), _lib.lab_crew_free)

    def worked(self, wall: float, lost: float, n_tokens: int = 1) -> None:
        """Record a step; `lost` is the sum of the threads' waits."""
        self.time += wall
        numbers = (round(1e6 * x) for x in (self.time, wall, lost))
        self.size = _lib.lab_crew_worked(self._crew, *numbers, n_tokens)
