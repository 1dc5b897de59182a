// The kernel for few query rows: it reads K and V once, in place, for all query rows of a KV head.
#pragma once

#include "paged-kernel.h"

namespace paged {

// Returns whether the head sizes are whole vectors.
bool decode_fits(const problem & p);

// A sequence, and the memory of its partial results; without one its chunks are merged into its output rows.
struct decode_member {
    sequence      s;
    partial_store partials;
};

// The position at which an item starts to read.
struct first_read {
    const sequence * s = nullptr; // null: unknown
    int64_t          position;
};

// One sequence, or several whose tables have the same blocks in all of these chunks: a shared prefix, read once for
// all. Each sequence is computed as it is alone.
struct decode_work {
    const decode_member * members;
    int64_t               n_members;
    chunk_range           chunks;
    int64_t               head_begin, head_end; // KV heads
    first_read            next;                 // of the item that the thread will likely compute after this one
};

// Returns the bytes of scratch for n_q query rows in all, over the members.
size_t decode_scratch(const problem & p, int64_t n_q);
void   decode(const problem & p, const decode_work & w, char * scratch);

} // namespace paged
