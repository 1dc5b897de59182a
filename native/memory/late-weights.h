// Weights that are packed into the layout of their buffer when the model first runs, not when it is loaded: packing
// reads them, and a model should be mapped, not read, before its first step.
#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

struct llama_late_weight {
    ggml_tensor * tensor; // its buffer is allocated, and nothing was written to it
    const void *  data;   // the bytes for ggml_backend_tensor_set, mapped as long as the model lives
};

// What a load with LLAMA_LOAD_MODE_ON_DEMAND leaves to its caller.
struct llama_load_watch {
    std::vector<llama_late_weight>            weights; // to pack before the model runs
    std::function<void(const void *, size_t)> mapped;  // called with each mapping before it is read
};

// Watches what this thread loads from now on. NULL: all is packed while it is loaded, as upstream does it.
LLAMA_API void llama_watch_load(llama_load_watch * watch);

// A part of a mapping.
struct llama_mapped_part {
    uintptr_t first, last;
};
// What the loader left mapped of a mapping: the pages that the model's weights are in. Of no length: nothing.
LLAMA_API llama_mapped_part llama_part_in_use(const llama_model * model, const std::vector<llama_late_weight> & weights,
                                              llama_mapped_part mapping, size_t page);
