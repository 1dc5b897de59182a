// Matrix products with weights that upstream packed for AMX.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// This thread's part of dst = src[0] * src[1], whose rows of activations lie quantized in the work buffer. False, and
// nothing is done, where AMX does better.
bool velo_packed_products(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// The same for many rows, before anything lies in the work buffer, of which it takes so many bytes.
bool   velo_packed_products_of_many(const struct ggml_compute_params * params, struct ggml_tensor * dst);
size_t velo_packed_work_size(const struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
