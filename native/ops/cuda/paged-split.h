// Who computes what. A sequence's query heads of one KV head are packed to rows: row j * group + h is head h of its
// query j. A work item is a tile of such rows, one KV head, and a range of tokens: all of them, or, where a sequence
// has few queries, a part of them, so that a GPU is full with one sequence. All of it follows from the sequence alone,
// but that a part may be computed in company (paged-company.h), which changes no bit of it.
#pragma once

#include "paged-company.h"

namespace paged {

// Of the rows of a table, those whose packed rows number from `least` to `most` belong to a kernel.
struct row_class {
    int least, most;
};

// What a row of the table asks of a kernel: of its items, and of `partial`; and items that company would spare it.
struct demand {
    int items, partials, spared;
};

// In shared memory: how much of each is asked for before a stretch of rows; the last entry has the sums. Stretches are
// rows, or, of a long table, as many that its entries have a fixed size: tiles do not get smaller where it is long.
constexpr int MOST_STRETCHES = 512;

struct row_starts {
    int   stretch, n; // rows of a stretch, and stretches
    int * items;
    int * partials;
};

constexpr int START_INTS = 2 * (MOST_STRETCHES + 1) + 3 * 32; // with find_starts's scratch

GPU_FN row_starts starts_in(const view & p, int * ints) {
    const int stretch = p.n_rows > MOST_STRETCHES ? ceil_div(p.n_rows, MOST_STRETCHES) : 1;
    return {stretch, ceil_div(p.n_rows, stretch), ints, ints + MOST_STRETCHES + 1};
}

template <class Asks> GPU_FN demand demand_of(const view & p, const Asks & asks, int begin, int end) {
    demand sum = {0, 0, 0};
    for (int row = begin; row < end && row < p.n_rows; ++row) {
        const demand one = asks(row);
        sum.items += one.items;
        sum.partials += one.partials;
        sum.spared += one.spared;
    }
    return sum;
}

// By all threads of a block, of which there are at most 1024; returns the sums. `asks` says what a row asks for.
template <class Asks> GPU_FN demand find_starts(const view & p, const Asks & asks, const row_starts & to) {
    int *  scratch = to.partials + MOST_STRETCHES + 1;
    demand before  = {0, 0, 0};
    for (int base = 0; base < to.n; base += gpu::n_threads()) {
        const int    i   = base + gpu::thread();
        const demand own = demand_of(p, asks, i * to.stretch, i * to.stretch + to.stretch);
        demand       sum = own; // of this thread and those before it in the warp
        GPU_UNROLL
        for (int by = 1; by < 32; by *= 2) {
            const demand up = {gpu::shuffle_up(sum.items, by), gpu::shuffle_up(sum.partials, by),
                               gpu::shuffle_up(sum.spared, by)};
            sum.items += gpu::lane() >= by ? up.items : 0;
            sum.partials += gpu::lane() >= by ? up.partials : 0;
            sum.spared += gpu::lane() >= by ? up.spared : 0;
        }
        if (gpu::lane() == 31) {
            scratch[gpu::warp()]      = sum.items;
            scratch[32 + gpu::warp()] = sum.partials;
            scratch[64 + gpu::warp()] = sum.spared;
        }
        gpu::sync_block();
        demand all = {0, 0, 0};
        for (int w = 0; w < gpu::n_threads() / 32; ++w) {
            sum.items += w < gpu::warp() ? scratch[w] : 0;
            sum.partials += w < gpu::warp() ? scratch[32 + w] : 0;
            all.items += scratch[w];
            all.partials += scratch[32 + w];
            all.spared += scratch[64 + w];
        }
        if (i < to.n) {
            to.items[i]    = before.items + sum.items - own.items;
            to.partials[i] = before.partials + sum.partials - own.partials;
        }
        before.items += all.items;
        before.partials += all.partials;
        before.spared += all.spared;
        gpu::sync_block();
    }
    if (gpu::thread() == 0) {
        to.items[to.n]    = before.items;
        to.partials[to.n] = before.partials;
    }
    gpu::sync_block();
    return before;
}

// The row that an item belongs to, and what is before it.
struct row_place {
    int    row;
    demand before;
};

template <class Asks> GPU_FN row_place place_of(const Asks & asks, const row_starts & starts, int number) {
    int low = 0, high = starts.n - 1; // the last stretch that begins at or before it
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (starts.items[middle] <= number) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    row_place at = {low * starts.stretch, {starts.items[low], starts.partials[low], 0}};
    for (; at.row < low * starts.stretch + starts.stretch - 1; ++at.row) {
        const demand one = asks(at.row);
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
    bool         company; // whether parts that sequences have in common are computed once

    GPU_FN int skipped(int row, const sequence & s) const { return skipped_parts(p, row, s, tile_rows); }

    GPU_FN demand operator()(int row) const {
        const sequence s    = sequence_of(p, row);
        const int      rows = packed_rows(p, s), partials = n_partials(p, s);
        if (rows < of.least || rows > of.most) {
            return {0, partials, 0};
        }
        const int of_part = ceil_div(rows, tile_rows) * p.n_head_kv, items = of_part * n_splits(p, s);
        const int spared = of_part * skipped(row, s);
        return {company ? items - spared : items, partials, spared};
    }
};

// By all threads of a block: the items of each row, in company where that is worth it to so many blocks.
GPU_FN void find_items(tiles_asked & asks, int n_blocks, const row_starts & to) {
    const demand alone = find_starts(asks.p, asks, to);
    if (company_wins(alone.items, alone.spared, n_blocks)) {
        asks.company = true;
        find_starts(asks.p, asks, to);
    }
}

// What the merging kernel is asked for: each query and head of sequences whose tokens are split.
struct merges_asked {
    const view & p;

    GPU_FN demand operator()(int row) const {
        const sequence s = sequence_of(p, row);
        const int      n = n_partials(p, s);
        return {n ? s.n_q * p.n_head : 0, n, 0};
    }
};

struct work_item {
    int         row, tile, head_kv, split, n_splits;
    int         members;  // rows of the table from this one on, that have this part in common
    int         partials; // before those of its row
    token_range tokens;
};

// The row of `partial`, or, of a sequence that is not split, of `out`, that the item makes of a query and head of one
// of its members.
GPU_FN int result_row(const view & p, const work_item & item, int member, int q0, int j, int head) {
    if (item.n_splits == 1) {
        return (q0 + j) * p.n_head + head;
    }
    int before = item.partials;
    for (int i = 0; i < member; ++i) {
        before += n_partials(p, sequence_of(p, item.row + i));
    }
    const int n = member ? n_splits(p, sequence_of(p, item.row + member)) : item.n_splits;
    return before + (j * p.n_head + head) * n + item.split;
}

// Of an item's tokens those that any of its packed rows first .. last attends; what members have in common is attended
// whole.
GPU_FN token_range visible_part(const view & p, const sequence & s, const work_item & item, int first, int last) {
    if (item.members > 1) {
        return item.tokens;
    }
    const int grain = first_visible(p, s.position(first / p.group)) / GRAIN * GRAIN;
    const int after = s.position(last / p.group) + 1;
    const int begin = grain > item.tokens.begin ? grain : item.tokens.begin;
    const int end   = after < item.tokens.end ? after : item.tokens.end;
    return {begin, end < begin ? begin : end};
}

// The item of a number; those of one sequence and KV head follow one another.
GPU_FN work_item item_of(const view & p, const tiles_asked & asks, const row_starts & starts, int number) {
    const row_place at      = place_of(asks, starts, number);
    const sequence  s       = sequence_of(p, at.row);
    const int       skipped = asks.company ? asks.skipped(at.row, s) : 0;
    const int       parts = n_splits(p, s), own = parts - skipped, tiles = ceil_div(packed_rows(p, s), asks.tile_rows);
    const int       rest = number - at.before.items;
    work_item       item;
    item.row      = at.row;
    item.n_splits = parts;
    item.partials = at.before.partials;
    item.tile     = rest % tiles;
    item.split    = skipped + rest / tiles % own;
    item.head_kv  = rest / tiles / own;
    item.members  = asks.company ? n_members(p, at.row, item.split, asks.tile_rows) : 1;
    item.tokens   = split_range(p, s, item.split, parts);
    return item;
}

} // namespace paged
