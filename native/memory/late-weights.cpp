#include "late-weights.h"

#include "llama-model-loader.h"
#include "llama-paged-hooks.h"

#include <algorithm>

static thread_local std::vector<llama_late_weight> * left = nullptr;

void llama_leave_weights(std::vector<llama_late_weight> * weights) { left = weights; }

// The CPU's buffers that are not plain host memory are those of its other layouts.
static bool is_packed(const ggml_tensor * tensor) {
    const auto buft   = ggml_backend_buffer_get_type(tensor->buffer);
    const auto device = ggml_backend_buft_get_device(buft);
    return device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU && !ggml_backend_buft_is_host(buft);
}

bool llama_late_weight_left(llama_model_loader & loader, size_t file, ggml_tensor * tensor, const void * data) {
    if (!left || !is_packed(tensor)) {
        return false;
    }
    left->push_back({tensor, data});
    // the loader unmaps what is outside the range that is used
    const size_t begin = (const char *) data - (const char *) loader.mappings.at(file)->addr();
    auto &       used  = loader.mmaps_used.at(file);
    used.first         = std::min(used.first, begin);
    used.second        = std::max(used.second, begin + ggml_nbytes(tensor));
    return true;
}
