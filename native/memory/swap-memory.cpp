#include "swap-memory.h"

ggml_backend_dev_t pool_device(const ggml_tensor * pool) {
    return ggml_backend_buft_get_device(ggml_backend_buffer_get_type(pool->buffer));
}

ggml_backend_t paged_swap::stream_of(const ggml_tensor * pool) const {
    const ggml_backend_dev_t device = pool_device(pool);
    for (const lane & l : lanes) {
        if (l.device == device) {
            return l.stream.get();
        }
    }
    return nullptr;
}
