// Online softmax: the state of a tile's rows, and the rows of partial results.
#pragma once

#include "paged-schedule.h"

namespace paged {

// Return what is subtracted from scores with this maximum: it, or 0 if all scores are -inf.
GPU_FN float base_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

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
        const float base = base_of(maximum[m][h]);
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

constexpr int   Q_TILE = 8;    // queries that are the columns of a product
constexpr float MARGIN = 8.0f; // weights are at most 2^8, far below the largest f16

// Softmax state of a warp's tokens so far, if queries are the columns of products. A lane has queries 2c and 2c + 1 of
// each tile, for c = lane % 4.
template <int Q_TILES, int V_TILES> struct query_state {
    float sums[Q_TILES][V_TILES][4]; // weighted sums of V: columns lane / 4 and lane / 4 + 8 of sixteen
    float reference[Q_TILES][2];     // subtracted from a query's scores, base 2: their maximum, or up to MARGIN less
    float total[Q_TILES][2];         // of the weights of this lane's tokens

    GPU_FN void reset() {
        GPU_UNROLL
        for (int n = 0; n < Q_TILES; ++n) {
            GPU_UNROLL
            for (int i = 0; i < 4 * V_TILES; ++i) {
                sums[n][i / 4][i % 4] = 0.0f;
            }
            GPU_UNROLL
            for (int q = 0; q < 2; ++q) {
                reference[n][q] = -INFINITY;
                total[n][q]     = 0.0f;
            }
        }
    }

    // Rescale the sums of a query that has a score far above its reference.
    GPU_FN void rescale(int n, int q, float top) {
        if (top > reference[n][q] + MARGIN) {
            const float factor = gpu::exp2(reference[n][q] - top);
            total[n][q] *= factor;
            GPU_UNROLL
            for (int v = 0; v < V_TILES; ++v) {
                sums[n][v][q] *= factor;
                sums[n][v][q + 2] *= factor;
            }
            reference[n][q] = top;
        }
    }

    // Turn the scores of sixteen tokens into weights: c[n][q] of token lane / 4, c[n][q + 2] of the eighth after it.
    GPU_FN void weigh(float (&c)[Q_TILES][4]) {
        bool more = false;
        GPU_UNROLL
        for (int i = 0; i < 2 * Q_TILES; ++i) {
            more = more || fmaxf(c[i / 2][i % 2], c[i / 2][i % 2 + 2]) > reference[i / 2][i % 2] + MARGIN;
        }
        if (GPU_SELDOM(gpu::any(more))) { // each query alone decides whether it is rescaled
            GPU_UNROLL
            for (int i = 0; i < 2 * Q_TILES; ++i) {
                const float top = fmaxf(c[i / 2][i % 2], c[i / 2][i % 2 + 2]);
                rescale(i / 2, i % 2, of_tokens(top, [](float x, float y) { return fmaxf(x, y); }));
            }
        }
        GPU_UNROLL
        for (int i = 0; i < 2 * Q_TILES; ++i) {
            const float base = base_of(reference[i / 2][i % 2]);
            float &     x = c[i / 2][i % 2], &y = c[i / 2][i % 2 + 2];
            x = gpu::exp2(x - base);
            y = gpu::exp2(y - base);
            total[i / 2][i % 2] += x + y;
        }
    }

    // Return the result of an operation over the lanes that have other tokens of the same queries.
    template <class Operation> GPU_FN static float of_tokens(float x, const Operation & operation) {
        GPU_UNROLL
        for (int mask = 4; mask < 32; mask *= 2) {
            x = operation(x, gpu::shuffle_xor(x, mask));
        }
        return x;
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

// Floats of a row of `partial`: the weighted sum of V, what was subtracted from the scores (base 2), the sum of the
// weights, and two unused, so that all rows can be read sixteen bytes at a time.
GPU_BOTH int partial_floats(const params & p) { return p.d_v + 4; }

struct alignas(16) floats4 { // one load or store
    float x[4];
};

} // namespace paged
