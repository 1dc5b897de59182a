// The kernel for many query rows: it unpacks a tile of K or V once, and multiplies it with all rows as matrices. A
// row's arithmetic does not depend on the other rows.
#pragma once

#include "paged-kernel.h"

namespace paged {

// Rows [row_begin, row_end) of one KV head; row j*group + g is query row j of the group's head g.
struct tile_work {
    sequence    s;
    chunk_range chunks;
    int64_t     head_kv;
    int64_t     row_begin, row_end;
};

size_t tile_scratch(const problem & p);
void   attend_tile(const problem & p, const tile_work & w, partial_store partials, char * scratch);

} // namespace paged
