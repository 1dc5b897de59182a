// Online softmax: the state of a tile's rows, and the merge of KV splits.
#pragma once

#include "paged-schedule.h"

namespace paged {

// Softmax state of a thread's rows over the tokens so far.
template <int M_TILES, int V_PAIRS> struct softmax_state {
    float sums[M_TILES][V_PAIRS][2][4]; // weighted sums of V, for this warp's columns
    float maximum[M_TILES][2];          // of a row's scores, base 2
    float total[M_TILES][2];            // of the weights of this thread's columns

    GPU_FN void reset() {
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                maximum[m][h] = -INFINITY;
                total[m][h]   = 0.0f;
            }
            GPU_UNROLL
            for (int n = 0; n < V_PAIRS; ++n) {
                GPU_UNROLL
                for (int r = 0; r < 4; ++r) {
                    sums[m][n][0][r] = sums[m][n][1][r] = 0.0f;
                }
            }
        }
    }

    // Rescale a row's sums if a tile has a larger maximum.
    GPU_FN void rescale(int m, int h, float top) {
        top = fmaxf(top, maximum[m][h]);
        if (top > maximum[m][h]) {
            const float factor = gpu::exp2(maximum[m][h] - top);
            total[m][h] *= factor;
            GPU_UNROLL
            for (int n = 0; n < V_PAIRS; ++n) {
                GPU_UNROLL
                for (int r = 0; r < 2; ++r) {
                    sums[m][n][0][2 * h + r] *= factor;
                    sums[m][n][1][2 * h + r] *= factor;
                }
            }
            maximum[m][h] = top;
        }
    }
};

// Return the factor of a row's weighted sum: 1 / (sum of weights), including the sink's weight.
GPU_FN float final_factor(const params & p, int head, float maximum, float total) {
    if (p.sinks == nullptr) {
        return 1.0f / total;
    }
    const float sink = p.sinks[head] * LOG2E, top = fmaxf(maximum, sink);
    const float own = gpu::exp2(maximum - top);
    return own / (total * own + gpu::exp2(sink - top));
}

// Floats of a row of `partial`: the weighted sum of V, the maximum of the scores (base 2), the sum of the weights.
GPU_BOTH int partial_floats(const params & p) { return p.d_v + 2; }

// Merge the partial results of an output row, in the order of positions.
GPU_FN void merge_row(const params & p, const float * partial, int n, int head, float * out) {
    const int stride = partial_floats(p);
    float     top = -INFINITY, total = 0.0f;
    for (int k = 0; k < n; ++k) {
        top = fmaxf(top, partial[k * stride + p.d_v]);
    }
    for (int k = 0; k < n; ++k) {
        total += partial[k * stride + p.d_v + 1] * gpu::exp2(partial[k * stride + p.d_v] - top);
    }
    const float factor = final_factor(p, head, top, total);
    for (int column = gpu::thread(); column < p.d_v; column += gpu::n_threads()) {
        float sum = 0.0f;
        for (int k = 0; k < n; ++k) {
            sum += partial[k * stride + column] * gpu::exp2(partial[k * stride + p.d_v] - top);
        }
        out[column] = sum * factor;
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
    for (int row = gpu::thread(); row < p.n_rows; row += gpu::n_threads()) {
        covered += sequence_of(p, row).n_q;
    }
    if (sum_of_block(covered, scratch) == p.n_tokens) {
        return;
    }
    for (int token = gpu::block(); token < p.n_tokens; token += gpu::n_blocks()) {
        int found = 0;
        for (int row = gpu::thread(); row < p.n_rows; row += gpu::n_threads()) {
            const sequence s = sequence_of(p, row);
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
    scan_rows(p, plan, starts);
    for (int number = gpu::block(); number < starts.items[starts.n]; number += gpu::n_blocks()) {
        const row_position at = find_row(plan, starts, number);
        const sequence     s  = sequence_of(p, at.row);
        const int          i = number - at.before.items, n = n_splits(p, s);
        merge_row(p, p.partial + ((int64_t) at.before.partials + (int64_t) i * n) * partial_floats(p), n, i % p.n_head,
                  p.out + ((int64_t) s.q0 * p.n_head + i) * p.d_v);
    }
    clear_uncovered(p, (int *) memory);
}

} // namespace paged
