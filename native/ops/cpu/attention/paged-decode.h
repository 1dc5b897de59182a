// The kernel for few query rows: K and V are read once, where they lie, and every row of a KV head uses them then.
#pragma once

#include "paged-kernel.h"

namespace paged {

// Head sizes that are whole vectors.
bool decode_fits(const problem & p);

// Where a sequence's result goes: its chunks to the partial results, or, without those, joined to its output rows.
struct decode_member {
    sequence      s;
    partial_store partials;
};

// Where an item begins to read.
struct first_read {
    const sequence * s = nullptr; // null: not known
    int64_t          position;
};

// Sequences whose tables name the same blocks in all of these chunks, read once for all; or one sequence. Each is
// computed as it is alone.
struct decode_work {
    const decode_member * members;
    int64_t               n_members;
    chunk_range           chunks;
    int64_t               head_begin, head_end; // KV heads
    first_read            next;                 // of the item that the thread will likely compute after this one
};

// For n_q query rows, all members' together.
size_t decode_scratch(const problem & p, int64_t n_q);
void   decode(const problem & p, const decode_work & w, char * scratch);

} // namespace paged
