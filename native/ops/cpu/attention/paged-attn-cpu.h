// What ggml-cpu calls for GGML_OP_PAGED_ATTN.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// bytes of params->wdata; depends on shapes only, never on the contents of the table
size_t ggml_paged_attn_work_size(const struct ggml_tensor * dst, int n_tasks);

void ggml_compute_forward_paged_attn(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
