// The memory of a pool comes when it is first written, a large page at a time, and in all layers at about the same
// token: that step would take far longer than its neighbours, most of all where the system itself is a guest and has to
// ask its host. So every step fetches a little of what later ones will write.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class pool_ahead {
public:
    // A K or V tensor of the pool, slot after slot; one that is not plain host memory is left out.
    void add(const ggml_tensor * pool);

    // A step has written `n_slots` slots, and none beyond `highest`. Fetches a share of the pages that are next, such
    // that steps like this one have them all in time.
    void stored(int64_t highest, int64_t n_slots);

    struct region {
        uintptr_t begin, end;
        size_t    slot_bytes;
        uintptr_t there; // whole pages up to here were fetched, or written
        size_t    left;  // bytes from what is stored to there
    };

private:
    std::vector<region> regions;
};
