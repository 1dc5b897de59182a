// Kernels for GPUs, run on the host: a library of its own, for it is slow to build and only tests want it.
#pragma once

#include "lab.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

// A launch of a kernel: of sequences with so many packed rows. All zero but the memory: the one that merges.
struct lab_gpu_launch {
    int32_t least_rows, most_rows;
    int32_t tile_rows, columns; // rows of a tile, and columns of V that there are registers for
    int32_t tile_tokens, shared_bytes;
};

// A piece of work of a block.
struct lab_gpu_item {
    int32_t row, tile, head_kv, split, n_splits, members, partials, begin, end;
};

// GGML_OP_PAGED_ATTN as `n_blocks` blocks of threads would compute it, each with so much shared memory, on a GPU with
// tensor cores or on an old one. Threads take turns from the first one on (order 0), from the last one on (-1), or by
// chance (a seed above 0). Null, or why not.
LAB_API const char * lab_paged_attn_gpu(const struct lab_paged * op, int32_t n_blocks, int32_t shared_bytes,
                                        bool tensor_cores, int32_t order);

// Why no kernel takes this call, or null; of the tensors only shapes and addresses are looked at.
LAB_API const char * lab_gpu_refusal(const struct lab_paged * op, int32_t shared_bytes);

// What would be launched, three launches at most; returns their number.
LAB_API int32_t lab_gpu_launches(const struct lab_paged * op, int32_t shared_bytes, struct lab_gpu_launch * to);

// Rows of the workspace, as shapes bound them.
LAB_API int64_t lab_gpu_most_partials(const struct lab_paged * op);

// The items of a launch of so many blocks, as these find them; returns their number, of which the first `room` are
// written.
LAB_API int32_t lab_gpu_items(const struct lab_paged * op, const struct lab_gpu_launch * kernel, int32_t n_blocks,
                              struct lab_gpu_item * to, int32_t room);

#ifdef __cplusplus
}
#endif
