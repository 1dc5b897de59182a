// Weights that are packed into the layout of their buffer when the model first runs, not when it is loaded: packing
// reads them, and a model should be mapped, not read, before its first step.
#pragma once

#include "llama.h"

#include <vector>

struct llama_late_weight {
    ggml_tensor * tensor; // its buffer is allocated, and nothing was written to it
    const void *  data;   // the bytes for ggml_backend_tensor_set, mapped as long as the model lives
};

// From now on, what this thread loads with LLAMA_LOAD_MODE_ON_DEMAND leaves such weights in `weights`, for whoever
// called to pack before the model runs. NULL: they are packed while they are loaded, as upstream does it.
LLAMA_API void llama_leave_weights(std::vector<llama_late_weight> * weights);
