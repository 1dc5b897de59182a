// Matrix products with weights in the layout into which upstream packs them for AMX.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// Computes this thread's share of dst = src[0] * src[1]. Returns false and does nothing if upstream's AMX products are
// faster.
bool velo_packed_products(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Returns the bytes of its work buffer.
size_t velo_packed_work_size(const struct ggml_tensor * dst);

// Returns whether it computes all products, because the processor has no AMX.
bool velo_packed_products_suffice(void);

// The same for many rows alone. Also returns false if a thread has no memory for unpacked weights.
bool   velo_packed_products_of_many(const struct ggml_compute_params * params, struct ggml_tensor * dst);
size_t velo_packed_work_size_of_many(const struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
