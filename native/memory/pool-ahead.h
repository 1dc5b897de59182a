// The memory of a pool comes when it is first written, a large page at a time, and in all layers at the same token:
// that step takes far longer than its neighbours. So every step fetches a little of what later ones will write.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class pool_ahead {
public:
    // A K or V tensor of the pool, slot after slot; one that is not plain host memory is left out.
    void add(const ggml_tensor * pool);

    // A step has written `n_slots` slots, and none beyond `highest`. Fetches no more than that step took of its own.
    void stored(int64_t highest, int64_t n_slots);

private:
    struct region {
        uintptr_t begin, end;
        size_t    slot_bytes;
        uintptr_t there; // whole pages up to here were fetched, or written
    };
    std::vector<region> regions;
    size_t              slot_bytes = 0; // of all regions
    size_t              next       = 0; // region to look at
};
