// Merge of KV splits: partial results to output rows.
#pragma once

#include "paged-softmax.h"

namespace paged {

constexpr int MERGE_WARPS    = 4;
constexpr int MERGED_COLUMNS = 32; // of a row, by one warp: eight lanes have the columns of a split, four of each

GPU_BOTH int merged_pieces(const params & p) { return ceil_div(p.d_v, MERGED_COLUMNS); }

static_assert(MAX_KV_SPLITS <= 32, "each lane has the weight of a split, and the columns of every fourth one");

// Merge the partial results of some columns of an output row, by one warp. Lanes 8k to 8k + 7 have splits k, k + 4, ...
GPU_FN void merge_piece(const params & p, const float * partial, int n, int head, int first, float * out) {
    const int     lane = gpu::lane(), own = lane / 8, column = first + lane % 8 * 4, stride = partial_floats(p);
    const float * state   = partial + lane * stride + p.d_v;
    const float * from    = partial + (column < p.d_v ? column : 0);
    const float   maximum = lane < n ? state[0] : -INFINITY;
    float         top     = maximum;
    floats4       each[MAX_KV_SPLITS / 4]; // loaded before their weights are known
    GPU_UNROLL
    for (int i = 0; i < MAX_KV_SPLITS / 4; ++i) {
        if (4 * i < n) {
            const int split = 4 * i + own;
            each[i]         = *(const floats4 *) (from + (split < n ? split : n - 1) * stride);
        }
    }
    GPU_UNROLL
    for (int by = 16; by; by /= 2) {
        top = fmaxf(top, gpu::shuffle_xor(top, by));
    }
    const float weight = maximum == -INFINITY ? 0.0f : gpu::exp2(maximum - top);
    float       total  = lane < n ? state[1] * weight : 0.0f;
    GPU_UNROLL
    for (int by = 16; by; by /= 2) {
        total += gpu::shuffle_xor(total, by);
    }
    floats4 sum = {};
    GPU_UNROLL
    for (int i = 0; i < MAX_KV_SPLITS / 4; ++i) {
        if (4 * i < n) {
            const float of_split = gpu::shuffle(weight, 4 * i + own); // 0 after the last
            GPU_UNROLL
            for (int c = 0; c < 4; ++c) {
                sum.x[c] += of_split * each[i].x[c];
            }
        }
    }
    const float factor = final_factor(p, head, top, total);
    GPU_UNROLL
    for (int c = 0; c < 4; ++c) {
        sum.x[c] += gpu::shuffle_xor(sum.x[c], 8);
        sum.x[c] += gpu::shuffle_xor(sum.x[c], 16);
        sum.x[c] *= factor;
    }
    if (own == 0 && column < p.d_v) {
        *(floats4 *) (out + column) = sum;
    }
}

// Return the row of the table, from `row` on, that has a query row with KV splits, counted from 0; a row after the
// table if there is none. For all lanes of a warp.
GPU_FN int row_of_merged(const params & p, int row, int query) {
    for (; row < p.n_rows; row += 32) {
        const int  own   = row + gpu::lane();
        const bool later = own < p.n_rows && row_at(p, own)[ROW_MERGED] > query;
        if (gpu::any(later)) {
            return row + gpu::first_lane(later);
        }
    }
    return p.n_rows;
}

// Zero the output rows that belong to no sequence.
GPU_FN void clear_uncovered(const params & p) {
    if (sum_before(p, p.n_rows, ROW_QUERIES) == p.n_tokens) {
        return;
    }
    for (int token = gpu::block() * MERGE_WARPS + gpu::warp(); token < p.n_tokens;
         token += gpu::n_blocks() * MERGE_WARPS) {
        bool found = false;
        for (int row = gpu::lane(); row < p.n_rows; row += 32) {
            const sequence s = sequence_of(p, row);
            found            = found || (token >= s.q0 && token - s.q0 < s.n_q);
        }
        if (!gpu::any(found)) {
            for (int i = gpu::lane(); i < p.n_head * p.d_v; i += 32) {
                p.out[(int64_t) token * p.n_head * p.d_v + i] = 0.0f;
            }
        }
    }
}

// Merge all output rows with KV splits, and zero rows without a sequence. A warp merges a piece of an output row.
GPU_FN void merge_block(const params & p) {
    if (p.first_row == 0) { // before the wait: these rows have no other writer, and nothing reads them any more
        clear_uncovered(p);
    }
    const int pieces = merged_pieces(p), pieces_of_query = p.n_head * pieces;
    const int before = sum_before(p, p.first_row, ROW_MERGED), end = sum_before(p, p.end_row, ROW_MERGED);
    int       row    = p.first_row;
    bool      waited = false;
    for (int number = gpu::block() * MERGE_WARPS + gpu::warp(); number < (end - before) * pieces_of_query;
         number += gpu::n_blocks() * MERGE_WARPS) {
        const int query  = before + number / pieces_of_query;
        row              = row_of_merged(p, row, query);
        const int j      = query - sum_before(p, row, ROW_MERGED);
        const int n      = n_splits(row_at(p, row));
        const int i      = j * p.n_head + number % pieces_of_query / pieces;
        const int column = number % pieces * MERGED_COLUMNS;
        if (!waited) { // as late as possible
            gpu::wait_for_last_kernel();
            gpu::let_next_kernel_begin();
            waited = true;
        }
        merge_piece(p, p.partial + (partials_before(p, row) + (int64_t) i * n) * partial_floats(p), n, i % p.n_head,
                    column, p.out + ((int64_t) row_at(p, row)[ROW_Q0] * p.n_head + i) * p.d_v);
    }
    if (!waited) { // a kernel ends after the one before it
        gpu::wait_for_last_kernel();
    }
}

} // namespace paged
