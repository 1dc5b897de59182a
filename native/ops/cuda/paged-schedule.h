// Schedule: which thread block computes which rows and tokens.
//
// The query heads of a KV head are packed to rows: row j * group + h is head h of query j of the sequence. A work item
// is a tile of such rows, one KV head, and a range of tokens. If a sequence has few queries, its tokens are divided
// into KV splits, so that one sequence occupies the whole GPU. Splits depend on the sequence alone. A split of a shared
// prefix may be computed for several sequences at once, which changes no bit of their results.
//
// The host plans once in a step: the rows of the table have the splits of their sequences, and sums from which a thread
// block finds its items (ggml_paged_attn_plan).
#pragma once

#include "paged-params.h"

namespace paged {

// ---- KV splits ----

struct token_range {
    int begin, end;
};

GPU_FN int n_splits(const int32_t * row) {
    return ((row[ROW_LENGTH] - row[ROW_BEGIN] - 1) >> row[ROW_SHIFT]) + 1; // of a row with queries
}

GPU_FN token_range split_range(const int32_t * row, int split) {
    const int begin = row[ROW_BEGIN] + (split << row[ROW_SHIFT]), end = begin + (1 << row[ROW_SHIFT]);
    return {begin, end < row[ROW_LENGTH] ? end : row[ROW_LENGTH]};
}

GPU_FN int packed_rows(const params & p, const sequence & s) { return s.n_q * p.group; }

// Return where the rows of `partial` of a row of the table begin: it has one for each query, head and split.
GPU_FN int64_t partials_before(const params & p, int row) {
    return (int64_t) (sum_before(p, row, ROW_PARTIALS) - sum_before(p, p.first_row, ROW_PARTIALS)) * p.n_head;
}

// ---- the items of a kernel ----

// Numbers of packed rows of the sequences that a kernel computes: up to 8, 9 to 16, more, or several of these.
struct row_range {
    int min, max;
};

// Return whether sharing saves a wave of thread blocks. An item takes about as long for several sequences as for one.
GPU_FN bool sharing_pays(int items, int saved, int n_blocks) {
    return ceil_div(items - saved, n_blocks) < ceil_div(items, n_blocks);
}

// Work of a kernel whose tiles have TILE_ROWS packed rows: 8, 16, 64 or 128.
template <int TILE_ROWS> struct attend_plan {
    static constexpr row_field TILES = TILE_ROWS <= 16 ? ROW_TILES_16 : TILE_ROWS <= 64 ? ROW_TILES_64 : ROW_TILES_128;
    static constexpr row_field SAVED = TILE_ROWS <= 8    ? ROW_SAVED_8
                                       : TILE_ROWS <= 16 ? ROW_SAVED_16
                                       : TILE_ROWS <= 64 ? ROW_SAVED_64
                                                         : ROW_SAVED_128;

    const params & p;
    row_range      of;
    bool           shares; // splits of shared prefixes are computed once

    GPU_FN attend_plan(const params & p, row_range of, int n_blocks) : p(p), of(of), shares(false) {
        if (p.end_row == p.n_rows && p.first_row == 0) { // a part may begin between rows that share
            shares = sharing_pays(items_before(p.n_rows), saved_before(p.n_rows) * p.n_head_kv, n_blocks);
        }
    }

    GPU_FN int items_before(int row) const {
        int n = 0;
        if (of.min <= VERY_FEW_ROWS) {
            n += sum_before(p, row, ROW_VERY_FEW);
        }
        if (of.min <= FEW_ROWS && of.max > VERY_FEW_ROWS) {
            n += sum_before(p, row, ROW_FEW) * ceil_div(FEW_ROWS, TILE_ROWS);
        }
        if (of.max > FEW_ROWS) {
            n += sum_before(p, row, TILES);
        }
        return (shares ? n - saved_before(row) : n) * p.n_head_kv;
    }
    GPU_FN int saved_before(int row) const { // two sequences of 9 rows or more do not fit into a tile of 16
        return TILE_ROWS <= FEW_ROWS && of.min > VERY_FEW_ROWS ? 0 : sum_before(p, row, SAVED);
    }

    // Return the leading splits of a row that are computed with the row before. Rows of the table are grouped by as
    // many as fit into a tile, as in the plan's sums.
    GPU_FN int skipped(int row) const {
        const int32_t * entry = row_at(p, row);
        const int       fit   = entry[ROW_COMMON] ? TILE_ROWS / (entry[ROW_NQ] * p.group) : 0;
        return fit < 2 || row % fit == 0 ? 0 : entry[ROW_COMMON];
    }

    // Return how many rows of the table, from this one on, are computed together in a split.
    GPU_FN int n_members(int row, int split) const {
        int n = 1;
        while (row + n < p.n_rows && skipped(row + n) > split) {
            ++n;
        }
        return n;
    }
};

// ---- work items ----

constexpr int MAX_PLANNED = 32; // items that a thread block knows ahead

struct work_item {
    int         row, tile, head_kv, split, n_splits;
    int         members; // rows of the table, from `row` on, that share this split
    token_range tokens;
    bool        continued; // the next planned item has the same rows, and the tokens after these
};

// Return whether an item has the rows of another, whose tokens are whole steps, and the tokens after it.
GPU_FN bool follows(const work_item & item, const work_item & before, int tokens_of_step) {
    return item.row == before.row && item.tile == before.tile && item.head_kv == before.head_kv &&
           item.members == before.members && item.tokens.begin == before.tokens.end &&
           (before.tokens.end - before.tokens.begin) % tokens_of_step == 0;
}

// Return the row of `out` for a query and head of one of the item's members; with KV splits, the row of `partial` for
// the first split, which the rows of the other splits follow.
GPU_FN int output_row(const params & p, const work_item & item, int member, int q0, int j, int head) {
    if (item.n_splits == 1) {
        return (q0 + j) * p.n_head + head;
    }
    const int row = item.row + member;
    return (int) partials_before(p, row) + (j * p.n_head + head) * n_splits(row_at(p, row));
}

// Return the item's tokens that any of its packed rows first .. last attends. Shared splits are attended completely.
GPU_FN token_range visible_tokens(const params & p, const sequence & s, const work_item & item, int first, int last) {
    if (item.members > 1) {
        return item.tokens;
    }
    const int least = first_visible(p, s.position(first / p.group)) / SPLIT_ALIGN * SPLIT_ALIGN;
    const int after = s.position(last / p.group) + 1;
    const int begin = least > item.tokens.begin ? least : item.tokens.begin;
    const int end   = after < item.tokens.end ? after : item.tokens.end;
    return {begin, end < begin ? begin : end};
}

// Return item `rest` of a row of the table. KV splits of one sequence and KV head have consecutive numbers; without
// splits, the last tile, which attends most tokens, comes first for all KV heads.
template <int TILE_ROWS> GPU_FN work_item item_of(const attend_plan<TILE_ROWS> & plan, int row, int rest) {
    const params & p       = plan.p;
    const sequence s       = sequence_of(p, row);
    const int      skipped = plan.shares ? plan.skipped(row) : 0;
    const int      n = n_splits(row_at(p, row)), own = n - skipped, tiles = ceil_div(packed_rows(p, s), TILE_ROWS);
    work_item      item;
    item.row      = row;
    item.n_splits = n;
    if (n == 1) {
        item.tile    = tiles - 1 - rest / p.n_head_kv;
        item.split   = 0;
        item.head_kv = rest % p.n_head_kv;
    } else {
        item.tile    = rest % tiles;
        item.split   = skipped + rest / tiles % own;
        item.head_kv = rest / tiles / own;
    }
    item.members     = plan.shares ? plan.n_members(row, item.split) : 1;
    item.tokens      = split_range(row_at(p, row), item.split);
    const int packed = item.members * packed_rows(p, s), first = item.tile * TILE_ROWS;
    const int after = packed < first + TILE_ROWS ? packed : first + TILE_ROWS;
    item.tokens     = visible_tokens(p, s, item, first, after - 1);
    item.continued  = false;
    return item;
}

} // namespace paged
