#include "late-weights.h"

#include "llama-mmap.h"
#include "llama-model-loader.h"
#include "llama-model.h"
#include "llama-paged-hooks.h"

#include <algorithm>

static thread_local llama_load_watch * watching = nullptr;

void llama_watch_load(llama_load_watch * watch) { watching = watch; }

void llama_paged_mapped(const llama_model_loader & loader) {
    for (const auto & mapping : loader.mappings) {
        if (watching && watching->mapped) {
            watching->mapped(mapping->addr(), mapping->size());
        }
    }
}

llama_mapped_part llama_part_in_use(const llama_model * model, const std::vector<llama_late_weight> & weights,
                                    llama_mapped_part mapping, size_t page) {
    llama_mapped_part part = {UINTPTR_MAX, 0};
    const auto        add  = [&](const void * data, size_t size) {
        const auto first = reinterpret_cast<uintptr_t>(data);
        if (mapping.first <= first && first < mapping.last) {
            part.first = std::min(part.first, first / page * page);
            part.last  = std::max(part.last, (first + size + page - 1) / page * page);
        }
    };
    for (const auto & [name, tensor] : model->tensors_by_name) {
        add(tensor->data, ggml_nbytes(tensor));
    }
    for (const llama_late_weight & weight : weights) {
        add(weight.data, ggml_nbytes(weight.tensor));
    }
    return part.first < part.last ? part : llama_mapped_part{0, 0};
}

// A CPU buffer that is not plain host memory has a packed layout.
static bool is_packed(const ggml_tensor * tensor) {
    const auto buft   = ggml_backend_buffer_get_type(tensor->buffer);
    const auto device = ggml_backend_buft_get_device(buft);
    return device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU && !ggml_backend_buft_is_host(buft);
}

bool llama_late_weight_left(llama_model_loader & loader, size_t file, ggml_tensor * tensor, const void * data) {
    if (!watching || !is_packed(tensor)) {
        return false;
    }
    watching->weights.push_back({tensor, data});
    // the loader unmaps everything outside the used range
    const size_t begin = (const char *) data - (const char *) loader.mappings.at(file)->addr();
    auto &       used  = loader.mmaps_used.at(file);
    used.first         = std::min(used.first, begin);
    used.second        = std::max(used.second, begin + ggml_nbytes(tensor));
    return true;
}
