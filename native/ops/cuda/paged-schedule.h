// Schedule: which thread block computes which rows and tokens.
//
// The query heads of a KV head are packed to rows: row j * group + h is head h of query j of the sequence. A work item
// is a tile of such rows, one KV head, and a range of tokens. If a sequence has few queries, its tokens are divided
// into KV splits, so that one sequence occupies the whole GPU. Splits depend on the sequence alone. A split of a shared
// prefix may be computed for several sequences at once, which changes no bit of their results.
#pragma once

#include "paged-params.h"

namespace paged {

// ---- KV splits ----

constexpr int MAX_SPLIT_QUERIES = 16; // a sequence with more queries is not split
constexpr int MAX_SPLITS        = 32;
constexpr int MIN_SPLIT_TOKENS  = 256;
constexpr int SHORT_TOKENS      = 2048; // a sequence with more tokens has splits of twice as many or more
constexpr int SPLIT_ALIGN       = 64;   // tokens; splits begin at multiples of it

struct token_range {
    int begin, end;
};

// Return the first token that any query attends, rounded down to a multiple of SPLIT_ALIGN.
GPU_FN int first_token(const params & p, const sequence & s) {
    return first_visible(p, s.position(0)) / SPLIT_ALIGN * SPLIT_ALIGN;
}

// Return the tokens of a KV split of so many tokens. Short splits occupy the GPU for a few short sequences; for long
// sequences, longer splits cost less. Only sequences with the same size share a prefix, so there are few sizes.
GPU_BOTH int split_size(int64_t tokens) {
    int size = tokens <= SHORT_TOKENS ? MIN_SPLIT_TOKENS : 2 * MIN_SPLIT_TOKENS;
    while (tokens > (int64_t) MAX_SPLITS * size) {
        size *= 2;
    }
    return size;
}

GPU_BOTH int splits_of(int64_t tokens) {
    const int size = split_size(tokens);
    return tokens <= size ? 1 : (int) ((tokens + size - 1) / size);
}

// Return the most KV splits of up to so many tokens: where a larger size begins, there are fewer than just before.
GPU_BOTH int most_splits(int64_t tokens) {
    const int now = splits_of(tokens), before = tokens > SHORT_TOKENS ? SHORT_TOKENS / MIN_SPLIT_TOKENS : 0;
    return tokens > 2 * MAX_SPLITS * MIN_SPLIT_TOKENS ? MAX_SPLITS : now > before ? now : before;
}

GPU_FN int n_splits(const params & p, const sequence & s) {
    return s.n_q == 0 || s.n_q > MAX_SPLIT_QUERIES ? 1 : splits_of(s.length - first_token(p, s));
}

// Return the tokens of each split of a sequence; the last has fewer, and without splits the only one has all.
GPU_FN int split_tokens(const params & p, const sequence & s, int n) {
    const int tokens = s.length - first_token(p, s);
    return n == 1 ? round_up(tokens, SPLIT_ALIGN) : split_size(tokens);
}

GPU_FN token_range split_range(const params & p, const sequence & s, int split, int n) {
    const int each = split_tokens(p, s, n), begin = first_token(p, s) + split * each, end = begin + each;
    return {begin < s.length ? begin : s.length, end < s.length ? end : s.length};
}

GPU_FN int packed_rows(const params & p, const sequence & s) { return s.n_q * p.group; }

// Return the rows of `partial` of a sequence: one for each query, head and split; none without splits.
GPU_FN int n_partials(const params & p, const sequence & s) {
    const int n = n_splits(p, s);
    return n == 1 ? 0 : s.n_q * p.n_head * n;
}

// Return an upper bound of the rows of `partial`, from shapes alone.
inline int64_t max_partials(int64_t n_tokens, int64_t n_rows, int64_t n_head, int64_t width_tokens) {
    const int64_t few    = n_rows * MAX_SPLIT_QUERIES;
    const int64_t tokens = width_tokens + SPLIT_ALIGN; // the first split may begin before the table
    return (n_tokens < few ? n_tokens : few) * n_head * most_splits(tokens);
}

// ---- shared prefixes ----

// Return the number of leading splits that a row of the table shares with the row before: of the same size, in the same
// blocks, and attended by all queries of both.
GPU_FN int shared_splits(const params & p, int row, const sequence & s) {
    if (s.shared <= 0 || row == 0 || p.window_type != WINDOW_NONE) {
        return 0;
    }
    const sequence before = sequence_of(p, row - 1);
    const int      n = n_splits(p, s), n_before = n_splits(p, before);
    if (s.n_q != before.n_q || n == 1 || n_before == 1) {
        return 0;
    }
    const int each   = split_tokens(p, s, n);
    const int seen   = s.length < before.length ? s.position(0) + 1 : before.position(0) + 1;
    const int common = s.shared * p.block_size < seen ? s.shared * p.block_size : seen;
    return each == split_tokens(p, before, n_before) ? common / each : 0;
}

// Return the number of leading splits that are computed together with the row before. Rows of the table are grouped by
// as many as fit into a tile.
GPU_FN int skipped_splits(const params & p, int row, const sequence & s, int tile_rows) {
    if (s.shared <= 0 || s.n_q == 0) {
        return 0;
    }
    const int fit = tile_rows / packed_rows(p, s);
    return fit < 2 || row % fit == 0 ? 0 : shared_splits(p, row, s);
}

// Return how many rows of the table, from this one on, are computed together in a split.
GPU_FN int n_members(const params & p, int row, int split, int tile_rows) {
    int n = 1;
    while (row + n < p.n_rows && skipped_splits(p, row + n, sequence_of(p, row + n), tile_rows) > split) {
        ++n;
    }
    return n;
}

// Return whether sharing saves a wave of thread blocks. An item takes about as long for several sequences as for one.
GPU_FN bool sharing_pays(int items, int saved, int n_blocks) {
    return ceil_div(items - saved, n_blocks) < ceil_div(items, n_blocks);
}

// ---- work items ----

// Numbers of packed rows of the sequences that a kernel computes.
struct row_range {
    int min, max;
};

// Work of a row of the table: its items, its rows of `partial`, and the items that sharing a prefix saves.
struct row_work {
    int items, partials, saved;
};

// In shared memory: the items and rows of `partial` before each row of the table, then their sums. In a long table an
// entry stands for several rows, so that the size is fixed: the size of tiles must not depend on the table's length.
constexpr int MAX_ENTRIES = 256;

struct row_starts {
    int   rows_per_entry, n; // rows of the table for each entry, and entries
    int * items;
    int * partials;
};

constexpr int START_INTS = 2 * (MAX_ENTRIES + 1) + 3 * 32; // with the scratch of scan_rows

GPU_FN row_starts starts_in(const params & p, int * ints) {
    const int rows_per_entry = p.n_rows > MAX_ENTRIES ? ceil_div(p.n_rows, MAX_ENTRIES) : 1;
    return {rows_per_entry, ceil_div(p.n_rows, rows_per_entry), ints, ints + MAX_ENTRIES + 1};
}

template <class Plan> GPU_FN row_work work_of_rows(const params & p, const Plan & plan, int begin, int end) {
    row_work sum = {0, 0, 0};
    for (int row = begin; row < end && row < p.n_rows; ++row) {
        const row_work one = plan(row);
        sum.items += one.items;
        sum.partials += one.partials;
        sum.saved += one.saved;
    }
    return sum;
}

// Write the sums of work before each entry, and return the total. plan(row) is the work of a row. All threads of the
// block (at most 1024) take part.
template <class Plan> GPU_FN row_work scan_rows(const params & p, const Plan & plan, const row_starts & to) {
    int *    scratch = to.partials + MAX_ENTRIES + 1;
    row_work before  = {0, 0, 0};
    for (int base = 0; base < to.n; base += gpu::n_threads()) {
        const int      i   = base + gpu::thread();
        const row_work own = work_of_rows(p, plan, i * to.rows_per_entry, i * to.rows_per_entry + to.rows_per_entry);
        row_work       sum = own; // of this thread and lower threads of the warp
        GPU_UNROLL
        for (int by = 1; by < 32; by *= 2) {
            const row_work up = {gpu::shuffle_up(sum.items, by), gpu::shuffle_up(sum.partials, by),
                                 gpu::shuffle_up(sum.saved, by)};
            sum.items += gpu::lane() >= by ? up.items : 0;
            sum.partials += gpu::lane() >= by ? up.partials : 0;
            sum.saved += gpu::lane() >= by ? up.saved : 0;
        }
        if (gpu::lane() == 31) {
            scratch[gpu::warp()]      = sum.items;
            scratch[32 + gpu::warp()] = sum.partials;
            scratch[64 + gpu::warp()] = sum.saved;
        }
        gpu::sync_block();
        row_work all = {0, 0, 0};
        for (int w = 0; w < gpu::n_threads() / 32; ++w) {
            sum.items += w < gpu::warp() ? scratch[w] : 0;
            sum.partials += w < gpu::warp() ? scratch[32 + w] : 0;
            all.items += scratch[w];
            all.partials += scratch[32 + w];
            all.saved += scratch[64 + w];
        }
        if (i < to.n) {
            to.items[i]    = before.items + sum.items - own.items;
            to.partials[i] = before.partials + sum.partials - own.partials;
        }
        before.items += all.items;
        before.partials += all.partials;
        before.saved += all.saved;
        gpu::sync_block();
    }
    if (gpu::thread() == 0) {
        to.items[to.n]    = before.items;
        to.partials[to.n] = before.partials;
    }
    gpu::sync_block();
    return before;
}

// The row of an item, and the work before this row.
struct row_position {
    int      row;
    row_work before;
};

template <class Plan> GPU_FN row_position find_row(const Plan & plan, const row_starts & starts, int number) {
    int low = 0, high = starts.n - 1; // the last entry that begins at or before the item
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (starts.items[middle] <= number) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    row_position at = {low * starts.rows_per_entry, {starts.items[low], starts.partials[low], 0}};
    for (; at.row < low * starts.rows_per_entry + starts.rows_per_entry - 1; ++at.row) {
        const row_work one = plan(at.row);
        if (number < at.before.items + one.items) {
            break;
        }
        at.before.items += one.items;
        at.before.partials += one.partials;
    }
    return at;
}

// Work of a kernel that computes attention.
struct attend_plan {
    const params & p;
    row_range      of;
    int            tile_rows;
    bool           share_prefixes; // compute shared splits once

    GPU_FN int skipped(int row, const sequence & s) const { return skipped_splits(p, row, s, tile_rows); }

    GPU_FN row_work operator()(int row) const {
        const sequence s    = sequence_of(p, row);
        const int      rows = packed_rows(p, s), partials = n_partials(p, s);
        if (rows < of.min || rows > of.max) {
            return {0, partials, 0};
        }
        const int per_split = ceil_div(rows, tile_rows) * p.n_head_kv, items = per_split * n_splits(p, s);
        const int saved = per_split * skipped(row, s);
        return {share_prefixes ? items - saved : items, partials, saved};
    }
};

// Write the items before each row, with shared prefixes if that pays for `n_blocks` thread blocks. For all threads.
GPU_FN void plan_items(attend_plan & plan, int n_blocks, const row_starts & to) {
    const row_work alone = scan_rows(plan.p, plan, to);
    if (sharing_pays(alone.items, alone.saved, n_blocks)) {
        plan.share_prefixes = true;
        scan_rows(plan.p, plan, to);
    }
}

constexpr int MAX_PLANNED = 32; // items that a thread block knows ahead

struct work_item {
    int         row, tile, head_kv, split, n_splits;
    int         members;  // rows of the table, from `row` on, that share this split
    int         partials; // rows of `partial` before its row of the table
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
    int before = item.partials;
    for (int i = 0; i < member; ++i) {
        before += n_partials(p, sequence_of(p, item.row + i));
    }
    const int n = member ? n_splits(p, sequence_of(p, item.row + member)) : item.n_splits;
    return before + (j * p.n_head + head) * n;
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

// Return an item by its number. KV splits of one sequence and KV head have consecutive numbers; without splits, the
// last tile, which attends most tokens, comes first for all KV heads.
GPU_FN work_item item_of(const params & p, const attend_plan & plan, const row_starts & starts, int number) {
    const row_position at      = find_row(plan, starts, number);
    const sequence     s       = sequence_of(p, at.row);
    const int          skipped = plan.share_prefixes ? plan.skipped(at.row, s) : 0;
    const int          n = n_splits(p, s), own = n - skipped, tiles = ceil_div(packed_rows(p, s), plan.tile_rows);
    const int          rest = number - at.before.items;
    work_item          item;
    item.row      = at.row;
    item.n_splits = n;
    item.partials = at.before.partials;
    if (n == 1) {
        item.tile    = tiles - 1 - rest / p.n_head_kv;
        item.split   = 0;
        item.head_kv = rest % p.n_head_kv;
    } else {
        item.tile    = rest % tiles;
        item.split   = skipped + rest / tiles % own;
        item.head_kv = rest / tiles / own;
    }
    item.members     = plan.share_prefixes ? n_members(p, at.row, item.split, plan.tile_rows) : 1;
    item.tokens      = split_range(p, s, item.split, n);
    const int packed = item.members * packed_rows(p, s), first = item.tile * plan.tile_rows;
    const int after = packed < first + plan.tile_rows ? packed : first + plan.tile_rows;
    item.tokens     = visible_tokens(p, s, item, first, after - 1);
    item.continued  = false;
    return item;
}

} // namespace paged
