// Kernels for GPUs, run on the host: a library of its own, for it is slow to build and only tests want it.
#pragma once

#include "lab.h"

#ifdef __cplusplus
extern "C" {
#endif

// GGML_OP_PAGED_ATTN as `n_blocks` blocks of threads would compute it, each with so much shared memory. Null, or why
// not.
LAB_API const char * lab_paged_attn_gpu(const struct lab_paged * op, int32_t n_blocks, int32_t shared_bytes);

#ifdef __cplusplus
}
#endif
