// GGML_OP_PAGED_ATTN in ggml's CUDA backend, for its dispatch and supports_op.
#pragma once

#include "common.cuh"

void ggml_cuda_paged_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Return whether the kernels can compute this call on this device. The CPU computes other calls.
bool ggml_cuda_paged_attn_supported(int device, const ggml_tensor * dst);
