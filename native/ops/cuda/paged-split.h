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

GPU_BOTH int ceil_div(int a, int b) { return (a + b - 1) / b; }

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
GPU_BOTH int partial_floats(const view & p) { return p.d_v + 2; }

// The bound of all rows of `partial`, from shapes alone.
inline int64_t most_partials(int64_t n_tokens, int64_t n_rows, int64_t n_head, int64_t width_tokens) {
    const int64_t few    = n_rows * FEW_QUERIES;
    const int64_t splits = (width_tokens + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
    return (n_tokens < few ? n_tokens : few) * n_head * (splits < MOST_SPLITS ? splits : MOST_SPLITS);
}

// What a row of the table asks of a kernel: of its items, and of `partial`.
struct demand {
    int items, partials;
};

// In shared memory: how much of each is asked for before a stretch of rows; the last entry has the sums. Stretches are
// rows, or, of a long table, as many that its entries have a fixed size: tiles do not get smaller where it is long.
constexpr int MOST_STRETCHES = 512;

struct row_starts {
    int   stretch, n; // rows of a stretch, and stretches
    int * items;
    int * partials;
};

constexpr int START_INTS = 2 * (MOST_STRETCHES + 1) + 2 * 32; // with find_starts's scratch

GPU_FN row_starts starts_in(const view & p, int * ints) {
    const int stretch = p.n_rows > MOST_STRETCHES ? ceil_div(p.n_rows, MOST_STRETCHES) : 1;
    return {stretch, ceil_div(p.n_rows, stretch), ints, ints + MOST_STRETCHES + 1};
}

template <class Asks> GPU_FN demand demand_of(const view & p, const Asks & asks, int begin, int end) {
    demand sum = {0, 0};
    for (int row = begin; row < end && row < p.n_rows; ++row) {
        const demand one = asks(sequence_of(p, row));
        sum.items += one.items;
        sum.partials += one.partials;
    }
    return sum;
}

// By all threads of a block, of which there are at most 1024. `asks` says what a sequence asks for.
template <class Asks> GPU_FN void find_starts(const view & p, const Asks & asks, const row_starts & to) {
    int *  scratch = to.partials + MOST_STRETCHES + 1;
    demand before  = {0, 0};
    for (int base = 0; base < to.n; base += gpu::n_threads()) {
        const int    i   = base + gpu::thread();
        const demand own = demand_of(p, asks, i * to.stretch, i * to.stretch + to.stretch);
        demand       sum = own; // of this thread and those before it in the warp
        GPU_UNROLL
        for (int by = 1; by < 32; by *= 2) {
            const int items = gpu::shuffle_up(sum.items, by), partials = gpu::shuffle_up(sum.partials, by);
            sum.items += gpu::lane() >= by ? items : 0;
            sum.partials += gpu::lane() >= by ? partials : 0;
        }
        if (gpu::lane() == 31) {
            scratch[gpu::warp()]      = sum.items;
            scratch[32 + gpu::warp()] = sum.partials;
        }
        gpu::sync_block();
        demand all = {0, 0};
        for (int w = 0; w < gpu::n_threads() / 32; ++w) {
            sum.items += w < gpu::warp() ? scratch[w] : 0;
            sum.partials += w < gpu::warp() ? scratch[32 + w] : 0;
            all.items += scratch[w];
            all.partials += scratch[32 + w];
        }
        if (i < to.n) {
            to.items[i]    = before.items + sum.items - own.items;
            to.partials[i] = before.partials + sum.partials - own.partials;
        }
        before.items += all.items;
        before.partials += all.partials;
        gpu::sync_block();
    }
    if (gpu::thread() == 0) {
        to.items[to.n]    = before.items;
        to.partials[to.n] = before.partials;
    }
    gpu::sync_block();
}

// The row that an item belongs to, and what is before it.
struct row_place {
    int    row;
    demand before;
};

template <class Asks>
GPU_FN row_place place_of(const view & p, const Asks & asks, const row_starts & starts, int number) {
    int low = 0, high = starts.n - 1; // the last stretch that begins at or before it
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (starts.items[middle] <= number) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    row_place at = {low * starts.stretch, {starts.items[low], starts.partials[low]}};
    for (; at.row < low * starts.stretch + starts.stretch - 1; ++at.row) {
        const demand one = asks(sequence_of(p, at.row));
        if (number < at.before.items + one.items) {
            break;
        }
        at.before.items += one.items;
        at.before.partials += one.partials;
    }
    return at;
}

// What an attending kernel is asked for.
struct tiles_asked {
    const view & p;
    row_class    of;
    int          tile_rows;

    GPU_FN demand operator()(const sequence & s) const { return {n_items(p, s, of, tile_rows), n_partials(p, s)}; }
};

// What the merging kernel is asked for: each query and head of sequences whose tokens are split.
struct merges_asked {
    const view & p;

    GPU_FN demand operator()(const sequence & s) const {
        const int n = n_partials(p, s);
        return {n ? s.n_q * p.n_head : 0, n};
    }
};

struct work_item {
    int         row, tile, head_kv, split, n_splits;
    int         partials; // before those of its row
    token_range tokens;
};

// The item of a number; those of one sequence and KV head follow one another.
GPU_FN work_item item_of(const view & p, const tiles_asked & asks, const row_starts & starts, int number) {
    const row_place at    = place_of(p, asks, starts, number);
    const sequence  s     = sequence_of(p, at.row);
    const int       parts = n_splits(p, s), tiles = ceil_div(packed_rows(p, s), asks.tile_rows);
    const int       rest = number - at.before.items;
    work_item       item;
    item.row      = at.row;
    item.n_splits = parts;
    item.partials = at.before.partials;
    item.tile     = rest % tiles;
    item.split    = rest / tiles % parts;
    item.head_kv  = rest / tiles / parts;
    item.tokens   = split_range(p, s, item.split, parts);
    return item;
}

} // namespace paged
