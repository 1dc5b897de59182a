// Matrix products with weights that are packed into tiles.
#pragma once

#include <cstddef>

struct ggml_compute_params;
struct ggml_tensor;

namespace tiles {

// Computes this thread's share of dst = src[0] * src[1].
void multiply(const ggml_compute_params * params, ggml_tensor * dst);

// Returns the bytes of its work buffer.
size_t work_size(const ggml_tensor * dst);

} // namespace tiles
