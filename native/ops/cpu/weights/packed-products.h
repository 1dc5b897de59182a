// Matrix products with weights in the layout that upstream packs them into for AMX.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// This thread's part of dst = src[0] * src[1]. False, and nothing is done, where AMX does better as upstream uses it.
bool velo_packed_products(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of the work buffer that it takes.
size_t velo_packed_work_size(const struct ggml_tensor * dst);

// Whether all products are ours: the processor has no AMX.
bool velo_packed_products_suffice(void);

// The same for many rows alone. False, too, where a thread has no memory for weights as they are unpacked.
bool   velo_packed_products_of_many(const struct ggml_compute_params * params, struct ggml_tensor * dst);
size_t velo_packed_work_size_of_many(const struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
