// Online softmax: the state of a tile's rows, and the merge of KV splits.
#pragma once

#include "paged-schedule.h"

namespace paged {

// Softmax state of a thread's rows over the tokens so far: rows lane / 4 and lane / 4 + 8 of each tile of sixteen.
template <int M_TILES, int V_TILES> struct softmax_state {
    float sums[M_TILES][V_TILES][2][4]; // weighted sums of V, sixteen columns each
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
            for (int n = 0; n < V_TILES; ++n) {
                GPU_UNROLL
                for (int r = 0; r < 4; ++r) {
                    sums[m][n][0][r] = sums[m][n][1][r] = 0.0f;
                }
            }
        }
    }

    // Rescale a row's sums if a tile has a larger maximum.
    GPU_FN void rescale(int m, int h, float top) {
        if (top > maximum[m][h]) {
            const float factor = gpu::exp2(maximum[m][h] - top);
            total[m][h] *= factor;
            GPU_UNROLL
            for (int n = 0; n < V_TILES; ++n) {
                GPU_UNROLL
                for (int r = 0; r < 2; ++r) {
                    sums[m][n][0][2 * h + r] *= factor;
                    sums[m][n][1][2 * h + r] *= factor;
                }
            }
            maximum[m][h] = top;
        }
    }

    // Return what is subtracted from a row's scores: the maximum, or 0 if all scores are -inf.
    GPU_FN float base_of(int m, int h) const { return maximum[m][h] == -INFINITY ? 0.0f : maximum[m][h]; }

    // Turn a row's scores, of which its four lanes have all, into weights.
    template <int N> GPU_FN void weigh(int m, int h, float (&scores)[N][4]) {
        float top = -INFINITY;
        GPU_UNROLL
        for (int n = 0; n < N; ++n) {
            top = fmaxf(top, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
        }
        top = fmaxf(top, gpu::shuffle_xor(top, 1));
        top = fmaxf(top, gpu::shuffle_xor(top, 2));
        rescale(m, h, top);
        const float base = base_of(m, h);
        GPU_UNROLL
        for (int n = 0; n < N; ++n) {
            GPU_UNROLL
            for (int r = 0; r < 2; ++r) {
                float & x = scores[n][2 * h + r];
                x         = gpu::exp2(x - base);
                total[m][h] += x;
            }
        }
    }

    // Return the sum of a row's weights over its four lanes.
    GPU_FN float total_of_row(int m, int h) const {
        const float sum = total[m][h] + gpu::shuffle_xor(total[m][h], 1);
        return sum + gpu::shuffle_xor(sum, 2);
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

// Floats of a row of `partial`: the weighted sum of V, the maximum of the scores (base 2), the sum of the weights, and
// two unused, so that all rows can be read sixteen bytes at a time.
GPU_BOTH int partial_floats(const params & p) { return p.d_v + 4; }

struct alignas(16) floats4 { // one load or store
    float x[4];
};

static_assert(MAX_SPLITS <= 32, "each lane has the weight of a split");

// Merge the partial results of an output row, by one warp.
GPU_FN void merge_row(const params & p, const float * partial, int n, int head, float * out) {
    const int     stride = partial_floats(p), lane = gpu::lane();
    const float * of_split = partial + lane * stride + p.d_v;
    const float   maximum  = lane < n ? of_split[0] : -INFINITY;
    float         top      = maximum;
    GPU_UNROLL
    for (int by = 16; by; by /= 2) {
        top = fmaxf(top, gpu::shuffle_xor(top, by));
    }
    const float weight = maximum == -INFINITY ? 0.0f : gpu::exp2(maximum - top);
    float       total  = lane < n ? of_split[1] * weight : 0.0f;
    GPU_UNROLL
    for (int by = 16; by; by /= 2) {
        total += gpu::shuffle_xor(total, by);
    }
    const float factor = final_factor(p, head, top, total);
    for (int first = 0; first < p.d_v; first += 128) { // all lanes, for the shuffles
        const int     column = first + 4 * lane < p.d_v ? first + 4 * lane : 0;
        const float * from   = partial + column;
        floats4       sum    = {};
        for (int k = 0; k < n; k += 4) {
            floats4 four[4]; // loaded before their sums
            GPU_UNROLL
            for (int i = 0; i < 4; ++i) {
                four[i] = *(const floats4 *) (from + (k + i < n ? k + i : n - 1) * stride);
            }
            GPU_UNROLL
            for (int i = 0; i < 4; ++i) {
                const float own = gpu::shuffle(weight, (k + i) % 32);
                GPU_UNROLL
                for (int c = 0; c < 4; ++c) {
                    sum.x[c] += k + i < n ? own * four[i].x[c] : 0.0f;
                }
            }
        }
        if (first + 4 * lane < p.d_v) {
            GPU_UNROLL
            for (int i = 0; i < 4; ++i) {
                sum.x[i] *= factor;
            }
            *(floats4 *) (out + column) = sum;
        }
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
    scan_rows(p, plan, starts);
    gpu::wait_for_last_kernel();
    const int n_warps = gpu::n_threads() / 32;
    for (int number = gpu::block() * n_warps + gpu::warp(); number < starts.items[starts.n];
         number += gpu::n_blocks() * n_warps) {
        const row_position at = find_row(plan, starts, number);
        const sequence     s  = sequence_of(p, at.row);
        const int          i = number - at.before.items, n = n_splits(p, s);
        merge_row(p, p.partial + ((int64_t) at.before.partials + (int64_t) i * n) * partial_floats(p), n, i % p.n_head,
                  p.out + ((int64_t) s.q0 * p.n_head + i) * p.d_v);
    }
    if (p.whole_table != nullptr) {
        clear_uncovered(p, (int *) memory);
    }
}

} // namespace paged
