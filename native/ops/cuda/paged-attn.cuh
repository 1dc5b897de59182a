// GGML_OP_PAGED_ATTN in ggml's CUDA backend: what its dispatch and its supports_op call.
#pragma once

#include "common.cuh"

void ggml_cuda_paged_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Whether the kernels compute this call on this device; what they do not is the CPU's.
bool ggml_cuda_paged_attn_supported(int device, const ggml_tensor * dst);
