// How a call's work is cut into items. Every thread makes the same plan from the table, so none waits for it. The cut
// decides who computes what, never a bit of a result: chunks are joined in position order wherever they come from.
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
    int64_t       pieces;    // 1: an item joins all chunks; else an item for each chunk, joined afterwards
    int64_t       parts;     // decode: shares of the KV heads; tile: the KV heads
    int64_t       members;   // decode: tasks from this one on that begin with the same blocks; 1: none but this
    int64_t       shared;    // chunks that this task's items compute for all of them
    int64_t       skipped;   // chunks that another task computes for this one
    int64_t       rows;      // tile: query rows of an item, at most tile_rows
    int64_t       row_tiles; // tile: items of so many rows; decode: 1
    int64_t       first_item;
    partial_store partials; // with a base: every chunk goes there, to be joined afterwards

    int64_t items() const { return (pieces - skipped) * parts * row_tiles; }
};

struct plan {
    task *  tasks; // those with query rows
    int64_t n_tasks;
    int64_t n_items;
    bool    covers_all; // every output row belongs to a sequence
    bool    joins;      // some chunks have to be joined afterwards
};

// The kernel that serves a sequence: its own number of query rows decides, in deterministic mode nothing does.
kernel kernel_for(const problem & p, int64_t n_q);

// Query rows of one sequence that the decode kernel takes at most, and of all in an item.
int64_t decode_rows(const problem & p);
int64_t decode_rows_together(const problem & p);

// Bytes for the partial results of all threads together.
size_t partial_bytes(const problem & p, int64_t n_threads);

// `tasks` has room for every row of the table, `partials` for partial_bytes.
plan make_plan(const problem & p, int64_t n_threads, task * tasks, char * partials, size_t partials_size);

// Where item `item` of the plan begins to read, looked for from task `from` on.
first_read first_read_of(const problem & p, const plan & made, const task * from, int64_t item);

// `next`: what the thread will likely read after this item
void run_item(const problem & p, const task & t, int64_t item, first_read next, char * scratch);

} // namespace paged
