// Swapped blocks in host memory, with the K and V of preempted sequences. Private to this folder.
#pragma once

#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

// Return the device of a pool.
ggml_backend_dev_t pool_device(const ggml_tensor * pool);

struct free_memory {
    void operator()(uint8_t * memory) const { free(memory); }
};

// The memory has the layout of the pools, one after the other. Neighbouring blocks can be copied at once.
struct paged_swap {
    uint32_t                              n_blocks = 0;
    ggml_backend_buffer_ptr               pinned; // null if no device has pinned memory
    std::unique_ptr<uint8_t, free_memory> plain;  // used instead
    uint8_t *                             base = nullptr;

    // one stream for each device with pools; its copies do not wait for computations
    struct lane {
        ggml_backend_dev_t device;
        ggml_backend_ptr   stream;
    };
    std::vector<lane> lanes;

    ggml_backend_t stream_of(const ggml_tensor * pool) const; // null: copy synchronously
};
