// The kernel for few query rows: K and V are read once, where they lie, and every row of a KV head uses them then.
#pragma once

#include "paged-kernel.h"

namespace paged {

// Head sizes that are whole vectors.
bool decode_fits(const problem & p);

struct decode_work {
    sequence    s;
    chunk_range chunks;
    int64_t     head_begin, head_end; // KV heads
};

size_t decode_scratch(const problem & p, int64_t n_q);
void   decode(const problem & p, const decode_work & w, partial_store partials, char * scratch);

} // namespace paged
