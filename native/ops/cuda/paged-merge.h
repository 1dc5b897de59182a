// Merge of KV splits: partial results to output rows.
#pragma once

#include "paged-softmax.h"

namespace paged {

constexpr int MERGED_COLUMNS = 32; // of a row, by one warp: eight lanes have the columns of a split, four of each

GPU_BOTH int merged_pieces(const params & p) { return ceil_div(p.d_v, MERGED_COLUMNS); }

// Work of the merge: an item for each piece of an output row with KV splits.
struct merge_plan {
    const params & p;

    GPU_FN row_work operator()(int row) const {
        const sequence s = sequence_of(p, row);
        const int      n = n_partials(p, s);
        return {n ? s.n_q * p.n_head * merged_pieces(p) : 0, n, 0};
    }
};

static_assert(MAX_SPLITS <= 32, "each lane has the weight of a split, and the columns of every fourth one");

// Merge the partial results of some columns of an output row, by one warp. Lanes 8k to 8k + 7 have splits k, k + 4, ...
GPU_FN void merge_piece(const params & p, const float * partial, int n, int head, int first, float * out) {
    const int     lane = gpu::lane(), own = lane / 8, column = first + lane % 8 * 4, stride = partial_floats(p);
    const float * state   = partial + lane * stride + p.d_v;
    const float * from    = partial + (column < p.d_v ? column : 0);
    const float   maximum = lane < n ? state[0] : -INFINITY;
    float         top     = maximum;
    floats4       each[MAX_SPLITS / 4]; // loaded before their weights are known
    GPU_UNROLL
    for (int i = 0; i < MAX_SPLITS / 4; ++i) {
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
    for (int i = 0; i < MAX_SPLITS / 4; ++i) {
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

// Return the sum over all threads of the block.
GPU_FN int sum_of_block(int x, int * scratch) {
    GPU_UNROLL
    for (int mask = 16; mask; mask /= 2) {
        x += gpu::shuffle_xor(x, mask);
    }
    gpu::sync_block(); // all threads have read the scratch of the last sum
    if (gpu::lane() == 0) {
        scratch[gpu::warp()] = x;
    }
    gpu::sync_block();
    x = 0;
    for (int w = 0; w < gpu::n_threads() / 32; ++w) {
        x += scratch[w];
    }
    return x;
}

// Zero the output rows that belong to no sequence.
GPU_FN void clear_uncovered(const params & p, int * scratch) {
    int covered = 0;
    for (int row = gpu::thread(); row < p.n_whole; row += gpu::n_threads()) {
        covered += sequence_in(p, p.whole_table, row).n_q;
    }
    if (sum_of_block(covered, scratch) == p.n_tokens) {
        return;
    }
    for (int token = gpu::block(); token < p.n_tokens; token += gpu::n_blocks()) {
        int found = 0;
        for (int row = gpu::thread(); row < p.n_whole; row += gpu::n_threads()) {
            const sequence s = sequence_in(p, p.whole_table, row);
            found += token >= s.q0 && token - s.q0 < s.n_q;
        }
        if (sum_of_block(found, scratch) == 0) {
            for (int i = gpu::thread(); i < p.n_head * p.d_v; i += gpu::n_threads()) {
                p.out[(int64_t) token * p.n_head * p.d_v + i] = 0.0f;
            }
        }
    }
}

// Merge all output rows with KV splits, and zero rows without a sequence.
GPU_FN void merge_block(const params & p, char * memory) {
    const row_starts starts = starts_in(p, (int *) memory);
    const merge_plan plan   = {p};
    if (p.whole_table != nullptr) { // before the wait: these rows have no other writer
        clear_uncovered(p, (int *) memory);
        gpu::sync_block();
    }
    scan_rows(p, plan, starts);
    const int n_warps = gpu::n_threads() / 32, pieces = merged_pieces(p);
    bool      waited = false;
    for (int number = gpu::block() * n_warps + gpu::warp(); number < starts.items[starts.n];
         number += gpu::n_blocks() * n_warps) {
        const row_position at = find_row(plan, starts, number);
        const sequence     s  = sequence_of(p, at.row);
        const int          i = (number - at.before.items) / pieces, piece = (number - at.before.items) % pieces;
        const int          n = n_splits(p, s);
        if (!waited) { // as late as possible
            gpu::wait_for_last_kernel();
            waited = true;
        }
        merge_piece(p, p.partial + ((int64_t) at.before.partials + (int64_t) i * n) * partial_floats(p), n,
                    i % p.n_head, MERGED_COLUMNS * piece, p.out + ((int64_t) s.q0 * p.n_head + i) * p.d_v);
    }
    if (!waited) { // a kernel ends after the one before it
        gpu::wait_for_last_kernel();
    }
}

} // namespace paged
