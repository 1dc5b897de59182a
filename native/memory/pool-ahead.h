// Prefetching of a pool's memory pages. The system provides a page when it is first written, a large page at a time,
// and all layers reach a new page at about the same token. This step would take far longer than others, most of all in
// a virtual machine. So every step fetches some of the pages that later steps will write.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class pool_ahead {
public:
    // Add a K or V tensor of the pool. Does nothing if it is not in plain host memory.
    void add(const ggml_tensor * pool);

    // Fetch a share of the next pages after a step that wrote `n_slots` slots, up to the slot `highest`. If later steps
    // write as many, every page is fetched before it is written.
    void stored(int64_t highest, int64_t n_slots);

    struct region {
        uintptr_t begin, end;
        size_t    slot_bytes;
        uintptr_t fetched; // whole pages up to here are fetched or written
        size_t    left;    // bytes between the last used slot and `fetched`
    };

private:
    std::vector<region> regions;
};
