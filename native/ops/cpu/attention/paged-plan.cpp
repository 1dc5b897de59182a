#include "paged-plan.h"

namespace paged {

namespace {

constexpr int64_t few_rows = 32; // query rows of a KV head up to which reading K is faster than unpacking it

// Items of a thread's share at least, as far as chunks and heads allow.
constexpr int64_t items_per_thread = 2;

// A sequence is split into chunks if one of its items would be more than 1/fine_share of a thread's share.
constexpr int64_t fine_share = 8;

// Fewest query rows of an item of the tile kernel.
constexpr int64_t fewest_rows = 4;

// Query rows of sequences with a shared prefix in one item.
constexpr int64_t rows_together = 16;

// Most sequences of one item: each has at least one query row.
constexpr int64_t most_members = 32;
static_assert(few_rows <= most_members && rows_together <= most_members,
              "each row of an item may be of another sequence");

constexpr size_t most_partials = size_t(64) << 20; // bytes; one token's whole context always fits

int64_t chunks_of(int64_t tokens) { return (tokens + chunk_tokens - 1) / chunk_tokens; }

void set_row_tiles(const problem & p, task & t, int64_t rows) {
    t.rows      = rows;
    t.row_tiles = (t.s.n_q * p.group + rows - 1) / rows;
}

task make_task(const problem & p, const sequence & s) {
    task t        = {};
    t.s           = s;
    t.by          = kernel_for(p, s.n_q);
    t.chunks      = {partial_store::first_chunk(p, s), chunks_of(s.length)};
    t.splits      = 1;
    t.members     = 1;
    t.head_shares = t.by == kernel::tile ? p.n_head_kv : 1;
    t.row_tiles   = 1;
    if (t.by == kernel::tile) {
        set_row_tiles(p, t, tile_rows);
    }
    return t;
}

// Returns about the number of pairs of a query row and a token.
int64_t cost(const task & t) { return t.s.n_q * (t.s.length - t.chunks.first * chunk_tokens); }

// Free memory for partial results.
struct partial_room {
    char * next;
    size_t bytes;
};

size_t bytes_of_partials(const problem & p, const task & t) {
    return (t.chunks.last - t.chunks.first) * t.s.n_q * p.n_head * partial_store::bytes(p.d_v);
}

void split_into_chunks(const problem & p, plan & made, task & t, partial_room & room) {
    const size_t bytes = bytes_of_partials(p, t);
    t.splits           = t.chunks.last - t.chunks.first;
    t.partials         = {room.next, partial_store::bytes(p.d_v)};
    room.next += bytes;
    room.bytes -= bytes;
    made.merges = true;
}

// Splits long tasks while there is room.
void split_into_chunks(const problem & p, plan & made, int64_t n_threads, partial_room & room) {
    int64_t total = 0;
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        total += cost(made.tasks[i]);
    }
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        task &     t       = made.tasks[i];
        const bool is_long = cost(t) * fine_share * n_threads > total * t.items();
        if (t.splits == 1 && t.chunks.last - t.chunks.first > 1 && is_long && bytes_of_partials(p, t) <= room.bytes) {
            split_into_chunks(p, made, t, room);
        }
    }
}

// ---- shared prefixes ----

// Returns the number of chunks that every query row of the task sees whole.
int64_t whole_chunks(const task & t) { return (t.s.position(0) + 1) / chunk_tokens; }

// Returns the number of leading chunks in the same blocks, `most` at most.
int64_t common_chunks(const problem & p, const task & a, const task & b, int64_t most) {
    int64_t n = 0;
    for (int64_t block = 0; n < most; ++n) {
        for (; block * p.params.block_size < (n + 1) * chunk_tokens; ++block) {
            if (a.s.blocks[block] != b.s.blocks[block]) {
                return n;
            }
        }
    }
    return n;
}

// Finds the tasks from `first` on that share chunks with it, and the number of these chunks. Another task is added only
// if at least half of the chunks stay shared.
void find_members(const problem & p, const plan & made, int64_t first, int64_t & members, int64_t & shared) {
    const task & leader = made.tasks[first];
    int64_t      rows   = leader.s.n_q;
    members             = 1;
    shared              = whole_chunks(leader);
    for (int64_t i = first + 1; i < made.n_tasks; ++i) {
        const task & t = made.tasks[i];
        rows += t.s.n_q;
        if (t.by != kernel::decode || rows > decode_rows_together(p) || members == most_members) {
            return;
        }
        const int64_t common = common_chunks(p, leader, t, std::min(shared, whole_chunks(t)));
        if (common == 0 || (members > 1 && 2 * common < shared)) {
            return;
        }
        shared = common;
        ++members;
    }
}

void share_prefixes(const problem & p, plan & made, partial_room & room) {
    if (p.params.window_type != GGML_PAGED_ATTN_WINDOW_NONE) {
        return;
    }
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        int64_t members = 1, shared = 0;
        if (made.tasks[i].by == kernel::decode) {
            find_members(p, made, i, members, shared);
        }
        size_t bytes = 0;
        for (int64_t m = i; m < i + members; ++m) {
            bytes += bytes_of_partials(p, made.tasks[m]);
        }
        if (members == 1 || bytes > room.bytes) {
            continue;
        }
        for (int64_t m = i; m < i + members; ++m) {
            split_into_chunks(p, made, made.tasks[m], room);
            made.tasks[m].skipped = m == i ? 0 : shared;
        }
        made.tasks[i].members = members;
        made.tasks[i].shared  = shared;
        i += members - 1;
    }
}

int64_t items_of(const plan & made) {
    int64_t items = 0;
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        items += made.tasks[i].items();
    }
    return items;
}

// Makes items smaller if there are fewer than threads, although each unpacks K and V again.
void split_into_rows(const problem & p, plan & made, int64_t n_threads) {
    for (int64_t rows = tile_rows / 2; rows >= fewest_rows && items_of(made) < n_threads; rows /= 2) {
        for (int64_t i = 0; i < made.n_tasks; ++i) {
            if (made.tasks[i].by == kernel::tile) {
                set_row_tiles(p, made.tasks[i], rows);
            }
        }
    }
}

// Splits decode tasks by KV heads if there are few items for the threads.
void split_into_heads(const problem & p, plan & made, int64_t n_threads) {
    const int64_t items  = items_of(made);
    int64_t       shares = 1;
    while (items * shares < items_per_thread * n_threads && shares < p.n_head_kv) {
        shares *= 2;
    }
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        if (made.tasks[i].by == kernel::decode) {
            made.tasks[i].head_shares = std::min(shares, p.n_head_kv);
        }
    }
}

} // namespace

int64_t decode_rows(const problem & p) { return p.deterministic() || !decode_fits(p) ? 0 : few_rows / p.group; }

int64_t decode_rows_together(const problem & p) {
    const int64_t alone = decode_rows(p);
    return alone == 0 ? 0 : std::max(alone, std::min(p.n_tokens, rows_together));
}

kernel kernel_for(const problem & p, int64_t n_q) { return n_q <= decode_rows(p) ? kernel::decode : kernel::tile; }

size_t partial_bytes(const problem & p, int64_t n_threads) {
    const bool    windowed = p.params.window_type != GGML_PAGED_ATTN_WINDOW_NONE; // its tables may begin within a chunk
    const int64_t chunks   = chunks_of((p.table->ne[0] - GGML_PAGED_ATTN_HEADER) * p.params.block_size) + windowed;
    if (chunks == 1 || (n_threads == 1 && p.n_rows == 1)) {
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
    made.covers_all   = covered == p.n_tokens;
    partial_room room = {partials, partials_size};
    share_prefixes(p, made, room);
    if (n_threads > 1) {
        split_into_chunks(p, made, n_threads, room);
        split_into_rows(p, made, n_threads);
        split_into_heads(p, made, n_threads);
    }
    for (int64_t i = 0; i < made.n_tasks; ++i) {
        tasks[i].first_item = made.n_items;
        made.n_items += tasks[i].items();
    }
    return made;
}

first_read first_read_of(const problem & p, const plan & made, const task * from, int64_t item) {
    const task * end = made.tasks + made.n_tasks;
    while (from != end && item >= from->first_item + from->items()) {
        ++from;
    }
    if (from == end || from->by != kernel::decode) {
        return {};
    }
    const int64_t split = from->skipped + (item - from->first_item) % (from->splits - from->skipped);
    const int64_t chunk = from->chunks.first + (from->splits == 1 ? 0 : split);
    return {&from->s, std::max(chunk * chunk_tokens, first_visible(p, from->s.position(0)))};
}

void run_item(const problem & p, const task & t, int64_t item, first_read next, char * scratch) {
    const int64_t     split = t.skipped + item % (t.splits - t.skipped);
    const chunk_range chunks =
        t.splits == 1 ? t.chunks : chunk_range{t.chunks.first + split, t.chunks.first + split + 1};
    item /= t.splits - t.skipped;
    if (t.by == kernel::decode) {
        decode_member members[most_members];
        const int64_t n_members = split < t.shared ? t.members : 1;
        for (int64_t i = 0; i < n_members; ++i) {
            members[i] = {(&t)[i].s, (&t)[i].partials};
        }
        const int64_t begin = p.n_head_kv * item / t.head_shares, end = p.n_head_kv * (item + 1) / t.head_shares;
        decode(p, {members, n_members, chunks, begin, end, next}, scratch);
        return;
    }
    // the last rows see most: long items come first, and the short ones at the end even out the threads
    const int64_t   row_tile = t.row_tiles - 1 - item % t.row_tiles;
    const int64_t   rows     = t.s.n_q * p.group;
    const tile_work w = {t.s, chunks, item / t.row_tiles, row_tile * t.rows, std::min(rows, (row_tile + 1) * t.rows)};
    attend_tile(p, w, t.partials, scratch);
}

} // namespace paged
