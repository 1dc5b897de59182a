// Matrix products with weights that upstream packed for AMX.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// This thread's part of dst = src[0] * src[1], whose rows of activations lie quantized in the work buffer. False, and
// nothing is done, where AMX does better.
bool velo_packed_products(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
