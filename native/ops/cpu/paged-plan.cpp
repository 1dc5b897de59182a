#include "paged-plan.h"

namespace paged {

namespace {

constexpr int64_t few_rows = 8; // query rows of a KV head up to which K is better read than unpacked

// A thread's share is cut in this many items at least, as far as chunks and heads allow.
constexpr int64_t items_per_thread = 2;

// A sequence is cut into chunks where one of its items would be more than this part of a thread's share.
constexpr int64_t fine_share = 8;

// Rows of an item of the tile kernel at least.
constexpr int64_t fewest_rows = 4;

constexpr size_t most_partials = size_t(64) << 20; // bytes, but one token's whole context always fits

int64_t chunks_of(int64_t tokens) { return (tokens + chunk_tokens - 1) / chunk_tokens; }

void cut_rows(const problem & p, task & t, int64_t rows) {
    t.rows      = rows;
    t.row_tiles = (t.s.n_q * p.group + rows - 1) / rows;
}

task make_task(const problem & p, const sequence & s) {
    task t      = {};
    t.s         = s;
    t.by        = kernel_for(p, s.n_q);
    t.chunks    = {partial_store::first_chunk(p, s), chunks_of(s.length)};
    t.pieces    = 1;
    t.parts     = t.by == kernel::tile ? p.n_head_kv : 1;
    t.row_tiles = 1;
    if (t.by == kernel::tile) {
        cut_rows(p, t, tile_rows);
    }
    return t;
}

// pairs of a query row and a token, about
int64_t cost(const task & t) { return t.s.n_q * (t.s.length - t.chunks.first * chunk_tokens); }

void cut_into_chunks(const problem & p, plan & made, int64_t n_threads, char * partials, size_t room) {
    int64_t total = 0;
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        total += cost(made.tasks[i]);
    }
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        task &        t        = made.tasks[i];
        const int64_t n_chunks = t.chunks.last - t.chunks.first;
        const size_t  stride   = partial_store::bytes(p.d_v);
        const size_t  bytes    = n_chunks * t.s.n_q * p.n_head * stride;
        if (n_chunks > 1 && cost(t) * fine_share * n_threads > total * t.items() && bytes <= room) {
            t.pieces   = n_chunks;
            t.partials = {partials, stride};
            partials += bytes;
            room -= bytes;
            made.joins = true;
        }
    }
}

int64_t items_of(const plan & made) {
    int64_t items = 0;
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        items += made.tasks[i].items();
    }
    return items;
}

// Fewer items than threads: smaller ones, though each unpacks K and V for itself.
void cut_into_rows(const problem & p, plan & made, int64_t n_threads) {
    for (int64_t rows = tile_rows / 2; rows >= fewest_rows && items_of(made) < n_threads; rows /= 2) {
        for (int64_t i = 0; i < made.n_tasks; ++i) {
            if (made.tasks[i].by == kernel::tile) {
                cut_rows(p, made.tasks[i], rows);
            }
        }
    }
}

// Few items for the threads: decode tasks share out their heads too.
void cut_into_heads(const problem & p, plan & made, int64_t n_threads) {
    const int64_t items = items_of(made);
    int64_t       parts = 1;
    while (items * parts < items_per_thread * n_threads && parts < p.n_head_kv) {
        parts *= 2;
    }
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        if (made.tasks[i].by == kernel::decode) {
            made.tasks[i].parts = std::min(parts, p.n_head_kv);
        }
    }
}

} // namespace

int64_t decode_rows(const problem & p) { return p.deterministic() || !decode_fits(p) ? 0 : few_rows / p.group; }

kernel kernel_for(const problem & p, int64_t n_q) { return n_q <= decode_rows(p) ? kernel::decode : kernel::tile; }

size_t partial_bytes(const problem & p, int64_t n_threads) {
    const int64_t chunks = chunks_of((p.table->ne[0] - GGML_PAGED_ATTN_HEADER) * p.params.block_size);
    if (chunks == 1 || n_threads == 1) {
        return 0;
    }
    const size_t token = chunks * p.n_head * partial_store::bytes(p.d_v);
    const size_t many  = token * std::min(p.n_tokens, 2 * fine_share * n_threads);
    return std::max(token, std::min(many, most_partials));
}

plan make_plan(const problem & p, int64_t n_threads, task * tasks, char * partials, size_t partials_size) {
    plan    made    = {tasks, 0, 0, false, false};
    int64_t covered = 0;
    for (int64_t row = 0; row < p.n_rows; ++row) {
        const sequence s = sequence_of(p, row);
        if (s.n_q > 0) {
            tasks[made.n_tasks++] = make_task(p, s);
            covered += s.n_q;
        }
    }
    made.covers_all = covered == p.n_tokens;
    if (n_threads > 1) {
        cut_into_chunks(p, made, n_threads, partials, partials_size);
        cut_into_rows(p, made, n_threads);
        cut_into_heads(p, made, n_threads);
    }
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        tasks[i].first_item = made.n_items;
        made.n_items += tasks[i].items();
    }
    return made;
}

void run_item(const problem & p, const task & t, int64_t item, char * scratch) {
    const int64_t     piece = item % t.pieces;
    const chunk_range chunks =
        t.pieces == 1 ? t.chunks : chunk_range{t.chunks.first + piece, t.chunks.first + piece + 1};
    item /= t.pieces;
    if (t.by == kernel::decode) {
        const decode_work w = {t.s, chunks, p.n_head_kv * item / t.parts, p.n_head_kv * (item + 1) / t.parts};
        decode(p, w, t.partials, scratch);
        return;
    }
    // the last rows see most: first come the long items, last the short ones that even out the threads
    const int64_t   row_tile = t.row_tiles - 1 - item % t.row_tiles;
    const int64_t   rows     = t.s.n_q * p.group;
    const tile_work w = {t.s, chunks, item / t.row_tiles, row_tile * t.rows, std::min(rows, (row_tile + 1) * t.rows)};
    attend_tile(p, w, t.partials, scratch);
}

} // namespace paged
