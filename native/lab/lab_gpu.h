// GPU kernels, run on the host. A library of its own, because it is slow to build and only tests use it.
#pragma once

#include "lab.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

// One launch of a kernel of attention, for sequences with min_rows to max_rows packed rows.
struct lab_gpu_launch {
    int32_t min_rows, max_rows;
    int32_t division;           // of a tile among warps: paged::division
    int32_t tile_rows, columns; // rows of a tile, and columns of V that fit into the registers
    int32_t tile_tokens, shared_bytes;
};

// A work item of a thread block.
struct lab_gpu_item {
    int32_t row, tile, head_kv, split, n_splits, members, partials, begin, end;
};

// Compute GGML_OP_PAGED_ATTN with `n_blocks` thread blocks of `shared_bytes` each, in parts whose partial results fit
// into `workspace_bytes`. tensor_cores false: emulate an old GPU. order: 0 runs threads from the first, -1 from the
// last, a positive number is a random seed. The table needs no plan. Return null or an error.
LAB_API const char * lab_paged_attn_gpu(const struct lab_paged * op, int32_t n_blocks, int32_t shared_bytes,
                                        int64_t workspace_bytes, bool tensor_cores, int32_t order);

// The same with the numbers of an H200, another random order of threads at each call, and the plan that the table has.
// For lab_device_attend.
LAB_API const char * lab_paged_attn_emulated(const struct lab_paged * op);

// Return why no kernel supports this call, or null. Only shapes and addresses of the tensors are used.
LAB_API const char * lab_gpu_refusal(const struct lab_paged * op, int32_t shared_bytes);

// Write the launches of a call but the merge, at most three. Return their number.
LAB_API int32_t lab_gpu_launches(const struct lab_paged * op, int32_t shared_bytes, struct lab_gpu_launch * to);

// Return the bound of the workspace's rows, which follows from shapes.
LAB_API int64_t lab_gpu_max_partials(const struct lab_paged * op);

// Write the first `capacity` work items of a launch of `n_blocks` thread blocks. Return the number of all.
LAB_API int32_t lab_gpu_items(const struct lab_paged * op, const struct lab_gpu_launch * kernel, int32_t n_blocks,
                              struct lab_gpu_item * to, int32_t capacity);

#ifdef __cplusplus
}
#endif
