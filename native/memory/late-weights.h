// Weights that the model's first run packs into the layout of their buffer. Packing reads them, and loading should only
// map a model.
#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

struct llama_late_weight {
    ggml_tensor * tensor; // its buffer is allocated but not written
    const void *  data;   // bytes for ggml_backend_tensor_set, mapped while the model exists
};

// Work that a load with LLAMA_LOAD_MODE_ON_DEMAND leaves to its caller.
struct llama_load_watch {
    std::vector<llama_late_weight>            weights; // to pack before the model runs
    std::function<void(const void *, size_t)> mapped;  // called with each mapping before it is read
};

// Set the watch of this thread's later loads. NULL: the load packs all weights, as upstream does.
LLAMA_API void llama_watch_load(llama_load_watch * watch);

// A part of a mapping.
struct llama_mapped_part {
    uintptr_t first, last;
};
// Return the part of a mapping that the loader left mapped: the pages with the model's weights. It may be empty.
LLAMA_API llama_mapped_part llama_part_in_use(const llama_model * model, const std::vector<llama_late_weight> & weights,
                                              llama_mapped_part mapping, size_t page);
