// Blocks in host memory, where sequences that give way leave theirs. Private to this folder.
#pragma once

#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

struct free_memory {
    void operator()(uint8_t * memory) const { free(memory); }
};

// The memory is laid out as the pools are, one after the other: neighbours there are neighbours here.
struct paged_swap {
    uint32_t                              n_blocks = 0;
    ggml_backend_buffer_ptr               pinned; // where a device can copy to it by itself
    std::unique_ptr<uint8_t, free_memory> plain;  // else; taken as it is used
    uint8_t *                             base = nullptr;

    // a stream of its own for each device that holds pools: what it copies waits for no computation
    struct lane {
        ggml_backend_dev_t device;
        ggml_backend_ptr   stream;
    };
    std::vector<lane> lanes;

    ggml_backend_t stream_of(const ggml_tensor * pool) const; // null: the pool lies in host memory
};
