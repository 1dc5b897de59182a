// Who computes what. A sequence's query heads of one KV head are packed to rows: row j * group + h is head h of its
// query j. A work item is a tile of such rows, one KV head, and a range of tokens: all of them, or, where a sequence
// has few queries, a part of them, so that a GPU is full with one sequence. All of it follows from the sequence alone.
#pragma once

#include "paged-view.h"

namespace paged {

constexpr int FEW_QUERIES  = 16;  // of a sequence, up to which its tokens are split
constexpr int SPLIT_TOKENS = 256; // of a part, at least
constexpr int MOST_SPLITS  = 32;
constexpr int GRAIN        = 64; // tokens; parts begin at multiples of it

// Of the rows of a table, those whose packed rows number from `least` to `most` belong to a kernel.
struct row_class {
    int least, most;
};

struct token_range {
    int begin, end;
};

GPU_FN int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The first token that any query attends, down to a multiple of the grain.
GPU_FN int first_token(const view & p, const sequence & s) { return first_visible(p, s.position(0)) / GRAIN * GRAIN; }

GPU_FN int n_splits(const view & p, const sequence & s) {
    if (s.n_q == 0 || s.n_q > FEW_QUERIES) {
        return 1;
    }
    const int n = ceil_div(s.length - first_token(p, s), SPLIT_TOKENS);
    return n < 1 ? 1 : n < MOST_SPLITS ? n : MOST_SPLITS;
}

GPU_FN token_range split_range(const view & p, const sequence & s, int split, int n) {
    const int first = first_token(p, s), each = ceil_div(ceil_div(s.length - first, n), GRAIN) * GRAIN;
    const int begin = first + split * each, end = begin + each;
    return {begin < s.length ? begin : s.length, end < s.length ? end : s.length};
}

GPU_FN int packed_rows(const view & p, const sequence & s) { return s.n_q * p.group; }

GPU_FN int n_items(const view & p, const sequence & s, row_class of, int tile_rows) {
    const int rows = packed_rows(p, s);
    return rows < of.least || rows > of.most ? 0 : ceil_div(rows, tile_rows) * p.n_head_kv * n_splits(p, s);
}

// Rows of `partial` that a sequence takes: for each query and head as many as it has parts.
GPU_FN int n_partials(const view & p, const sequence & s) {
    const int n = n_splits(p, s);
    return n == 1 ? 0 : s.n_q * p.n_head * n;
}

// A row of `partial`: the weighted sum of V, the largest score (base 2), and the sum of the weights.
GPU_FN int partial_floats(const view & p) { return p.d_v + 2; }

// The bound of all rows of `partial`, from shapes alone.
inline int64_t most_partials(int64_t n_tokens, int64_t n_rows, int64_t n_head, int64_t width_tokens) {
    const int64_t few    = n_rows * FEW_QUERIES;
    const int64_t splits = (width_tokens + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
    return (n_tokens < few ? n_tokens : few) * n_head * (splits < MOST_SPLITS ? splits : MOST_SPLITS);
}

// In shared memory: where each row's items and partials begin; entry n_rows holds their numbers.
struct row_starts {
    int * items;
    int * partials;
};

// By all threads of a block, of which there are at most 1024; `scratch` holds 2 x 32 integers.
GPU_FN void find_starts(const view & p, row_class of, int tile_rows, row_starts starts, int * scratch) {
    int items_before = 0, partials_before = 0;
    for (int base = 0; base < p.n_rows; base += gpu::n_threads()) {
        const int row   = base + gpu::thread();
        int       items = 0, partials = 0;
        if (row < p.n_rows) {
            const sequence s = sequence_of(p, row);
            items            = n_items(p, s, of, tile_rows);
            partials         = n_partials(p, s);
        }
        int items_here = items, partials_here = partials; // of this thread and those before it in the warp
        for (int by = 1; by < 32; by *= 2) {
            const int more_items = gpu::shuffle_up(items_here, by), more_partials = gpu::shuffle_up(partials_here, by);
            items_here += gpu::lane() >= by ? more_items : 0;
            partials_here += gpu::lane() >= by ? more_partials : 0;
        }
        if (gpu::lane() == 31) {
            scratch[gpu::warp()]      = items_here;
            scratch[32 + gpu::warp()] = partials_here;
        }
        gpu::sync_block();
        int all_items = 0, all_partials = 0;
        for (int w = 0; w < gpu::n_threads() / 32; ++w) {
            items_here += w < gpu::warp() ? scratch[w] : 0;
            partials_here += w < gpu::warp() ? scratch[32 + w] : 0;
            all_items += scratch[w];
            all_partials += scratch[32 + w];
        }
        if (row < p.n_rows) {
            starts.items[row]    = items_before + items_here - items;
            starts.partials[row] = partials_before + partials_here - partials;
        }
        items_before += all_items;
        partials_before += all_partials;
        gpu::sync_block();
    }
    if (gpu::thread() == 0) {
        starts.items[p.n_rows]    = items_before;
        starts.partials[p.n_rows] = partials_before;
    }
    gpu::sync_block();
}

struct work_item {
    int         row, tile, head_kv, split, n_splits;
    token_range tokens;
};

// The item of a number; those of one sequence and KV head follow one another.
GPU_FN work_item item_of(const view & p, row_starts starts, int tile_rows, int number) {
    int low = 0, high = p.n_rows - 1; // the last row that begins at or before it
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (starts.items[middle] <= number) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const sequence s     = sequence_of(p, low);
    const int      parts = n_splits(p, s), tiles = ceil_div(packed_rows(p, s), tile_rows);
    const int      rest = number - starts.items[low];
    work_item      item;
    item.row      = low;
    item.n_splits = parts;
    item.tile     = rest % tiles;
    item.split    = rest / tiles % parts;
    item.head_kv  = rest / tiles / parts;
    item.tokens   = split_range(p, s, item.split, parts);
    return item;
}

} // namespace paged
