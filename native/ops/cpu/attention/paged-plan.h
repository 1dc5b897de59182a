// How a call's work is split into items. Every thread makes the same plan from the table, so none waits for it. The
// plan decides which thread computes an item, but no bit of a result: chunks are merged in position order, whichever
// thread computed them.
#pragma once

#include "paged-decode.h"
#include "paged-tile.h"

namespace paged {

enum class kernel { decode, tile };

// The work on one row of the table.
struct task {
    sequence      s;
    kernel        by;
    chunk_range   chunks;
    int64_t       splits;      // KV splits: 1 if an item merges all chunks, else one for each chunk, merged afterwards
    int64_t       head_shares; // decode: shares of the KV heads; tile: the KV heads
    int64_t       members;     // decode: tasks from this one on with a shared prefix; 1: this one alone
    int64_t       shared;      // chunks that the items of this task compute for all members
    int64_t       skipped;     // chunks that the first member computes for this task
    int64_t       rows;        // tile: query rows of an item, at most tile_rows
    int64_t       row_tiles;   // tile: items of `rows` rows; decode: 1
    int64_t       first_item;
    partial_store partials; // with a base: results of all chunks, merged afterwards

    int64_t items() const { return (splits - skipped) * head_shares * row_tiles; }
};

struct plan {
    task *  tasks; // of the sequences with query rows
    int64_t n_tasks;
    int64_t n_items;
    bool    covers_all; // every output row belongs to a sequence
    bool    merges;     // some chunks are merged afterwards
};

// Returns the kernel for a sequence: its own number of query rows decides. In deterministic mode it is always the same.
kernel kernel_for(const problem & p, int64_t n_q);

// Return the most query rows of one sequence for the decode kernel, and of all sequences of an item.
int64_t decode_rows(const problem & p);
int64_t decode_rows_together(const problem & p);

// Returns the bytes for the partial results of all threads together.
size_t partial_bytes(const problem & p, int64_t n_threads);

// `tasks` has room for every row of the table; `partials_size` is partial_bytes().
plan make_plan(const problem & p, int64_t n_threads, task * tasks, char * partials, size_t partials_size);

// Returns the position at which item `item` of the plan starts to read. It belongs to task `from` or a later one.
first_read first_read_of(const problem & p, const plan & made, const task * from, int64_t item);

// `next`: what the thread will likely read after this item, to prefetch it
void run_item(const problem & p, const task & t, int64_t item, first_read next, char * scratch);

} // namespace paged
