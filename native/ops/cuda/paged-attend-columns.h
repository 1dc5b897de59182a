// Attention of a tile of sixteen packed query rows whose sums or tokens are too large for the other kernels.
//
// In a tile of tokens, each warp computes the scores of some of the tokens, then the weighted sum of some of V's
// columns. So a warp's registers hold a quarter of the columns.
#pragma once

#include "paged-queries.h"

namespace paged {

template <int V_TILES, class KNumbers, class VNumbers> struct attend_columns : query_tile<16, KNumbers> {
    static constexpr int ROWS = 16;
    using tile                = query_tile<ROWS, KNumbers>;
    using tile::at;
    using tile::item;
    using tile::memory;
    using tile::p;
    using tile::s;

    softmax_state<1, V_TILES> softmax; // sums of columns 16 * (warp + N_WARPS * n)

    GPU_FN attend_columns(const params & p, char * memory, const layout & at, const work_item & item)
        : tile(p, memory, at, item) {}

    GPU_FN int    begin_of(int i) const { return item.tokens.begin + i * at.tokens; }
    GPU_FN char * stage_of(int i) const { return memory + at.stages + i % N_STAGES * at.stage_bytes; }

    GPU_FN void fetch(int i) const { // into its stage; always one group of copies
        if (begin_of(i) < item.tokens.end) {
            for (int g = gpu::warp(); g < at.tokens / GROUP; g += N_WARPS) {
                const token_group of = group_of_tokens(p, s, begin_of(i) + GROUP * g, item.tokens.end);
                fetch_group<KNumbers>(p, p.k, s, item.head_kv, of, stage_of(i) + GROUP * g * p.k.raw_stride);
                if (!p.v_is_k) {
                    fetch_group<VNumbers>(p, p.v, s, item.head_kv, of,
                                          stage_of(i) + at.v_raw + GROUP * g * p.v.raw_stride);
                }
            }
        }
        gpu::copy_commit();
    }

    template <class Numbers>
    GPU_FN operand ready(const pages & x, int d, int i, const char * raw, char * converted) const {
        const int from = x.raw_stride, to = number_stride(d);
        if (raw_is_ready(x, d)) {
            return {raw, from, 0};
        }
        for (int g = gpu::warp(); g < at.tokens / GROUP; g += N_WARPS) {
            const token_group of = group_of_tokens(p, s, begin_of(i) + GROUP * g, item.tokens.end);
            convert_group<Numbers>({p, x, s, of, item.head_kv, raw + GROUP * g * from}, d, converted + GROUP * g * to,
                                   at.tokens * to);
        }
        return {converted, to, at.tokens * to};
    }

    GPU_FN void process_tile(int i) {
        gpu::copy_wait<0>();
        gpu::sync_block(); // the tile has arrived, and no warp reads the one before
        fetch(i + 1);
        const operand k = ready<KNumbers>(p.k, p.d_k, i, stage_of(i), memory + at.k);
        const operand v = p.v_is_k ? k : ready<VNumbers>(p.v, p.d_v, i, stage_of(i) + at.v_raw, memory + at.v);
        gpu::sync_block();
        weigh(k, begin_of(i));
        gpu::sync_block();
        accumulate(v);
    }

    // Compute the scores of this warp's group of tokens, update the rows' maxima, and store the softmax weights.
    GPU_FN void weigh(const operand & k, int begin) {
        const bool    mine       = gpu::warp() < at.tokens / GROUP;
        const int     column     = GROUP * gpu::warp() + gpu::lane() % 4 * 2;
        const operand own        = {k.data + GROUP * gpu::warp() * k.stride, k.stride, k.term};
        float         c[1][2][4] = {}, top[2] = {-INFINITY, -INFINITY};
        if (mine) {
            tile::template multiply<MAX_TERMS, 1, 1>(0, own, c);
        }
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            const int row = gpu::lane() / 4 + 8 * h;
            tile::settle(row, begin + column, h, false, c[0]);
            if (mine) {
                top[h] = fmaxf(fmaxf(c[0][0][2 * h], c[0][0][2 * h + 1]), fmaxf(c[0][1][2 * h], c[0][1][2 * h + 1]));
            }
        }
        reduce_maxima(top);
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            softmax.rescale(0, h, top[h]);
            if (mine) {
                store_weights(c[0], h, column);
            }
        }
    }

    // Reduce each row's maximum over all warps.
    GPU_FN void reduce_maxima(float (&top)[2]) const {
        float *   maxima = (float *) (memory + at.maxima);
        const int g      = gpu::lane() / 4;
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            top[h] = fmaxf(top[h], gpu::shuffle_xor(top[h], 1));
            top[h] = fmaxf(top[h], gpu::shuffle_xor(top[h], 2));
            if (gpu::lane() % 4 == 0) {
                maxima[(g + 8 * h) * N_WARPS + gpu::warp()] = top[h];
            }
        }
        gpu::sync_block();
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            GPU_UNROLL
            for (int w = 0; w < N_WARPS; ++w) {
                top[h] = fmaxf(top[h], maxima[(g + 8 * h) * N_WARPS + w]);
            }
        }
    }

    GPU_FN void store_weights(const float (&c)[2][4], int h, int column) {
        const float base = base_of(softmax.maximum[0][h]);
        char *      row  = memory + at.weights + (gpu::lane() / 4 + 8 * h) * weight_stride(at.tokens);
        GPU_UNROLL
        for (int n = 0; n < 2; ++n) {
            float a = gpu::exp2(c[n][2 * h] - base), b = gpu::exp2(c[n][2 * h + 1] - base);
            softmax.total[0][h] += a + b;
            GPU_UNROLL
            for (int term = 0; term < VNumbers::weight_terms; ++term) {
                *(uint32_t *) (row + term * ROWS * weight_stride(at.tokens) + 2 * (column + 8 * n)) =
                    take_term<VNumbers>(a, b);
            }
        }
    }

    // Add the weighted sum of the tile's V for this warp's columns.
    GPU_FN void accumulate(const operand & v) {
        const int lane = gpu::lane(), stride = weight_stride(at.tokens);
        for (int step = 0; step < at.tokens / 16; ++step) {
            GPU_UNROLL
            for (int w_term = 0; w_term < VNumbers::weight_terms; ++w_term) {
                uint32_t a[4];
                gpu::load_matrices(a, memory + at.weights + (w_term * ROWS + lane % 16) * stride + 32 * step +
                                          lane / 16 * 16);
                GPU_UNROLL
                for (int v_term = 0; v_term < (w_term ? 1 : VNumbers::terms); ++v_term) {
                    GPU_UNROLL
                    for (int n = 0; n < V_TILES; ++n) {
                        const int column = 16 * (gpu::warp() + N_WARPS * n);
                        if (column >= p.d_v) {
                            break;
                        }
                        uint32_t b[4];
                        gpu::load_matrices_transposed(b, v.data + v_term * v.term + (16 * step + lane % 16) * v.stride +
                                                             2 * column + lane / 16 * 16);
                        VNumbers::multiply(softmax.sums[0][n][0], a, b[0], b[1]);
                        VNumbers::multiply(softmax.sums[0][n][1], a, b[2], b[3]);
                    }
                }
            }
        }
    }

    // ---- results ----

    static_assert(N_WARPS == 4, "write adds the totals of four warps");

    GPU_FN void write() const {
        float *   shared = (float *) (memory + at.maxima);
        const int g      = gpu::lane() / 4;
        gpu::sync_block();
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            const float total = softmax.total_of_row(0, h);
            if (gpu::lane() % 4 == 0) {
                shared[(g + 8 * h) * N_WARPS + gpu::warp()] = total;
            }
        }
        gpu::sync_block();
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            const float * of_row = shared + (g + 8 * h) * N_WARPS;
            const float   total  = ((of_row[0] + of_row[1]) + of_row[2]) + of_row[3];
            if (g + 8 * h < tile::n_packed()) {
                write_row(g + 8 * h, h, total);
            }
        }
    }

    GPU_FN void write_row(int row, int h, float total) const {
        const float top    = softmax.maximum[0][h];
        float *     to     = tile::destination(row);
        const float factor = tile::destination_factor(row, top, total);
        GPU_UNROLL
        for (int n = 0; n < 2 * V_TILES; ++n) {
            const int column = 16 * (gpu::warp() + N_WARPS * (n / 2)) + 8 * (n % 2) + gpu::lane() % 4 * 2;
            if (column < p.d_v) {
                to[column]     = softmax.sums[0][n / 2][n % 2][2 * h] * factor;
                to[column + 1] = softmax.sums[0][n / 2][n % 2][2 * h + 1] * factor;
            }
        }
        if (gpu::warp() == 0 && gpu::lane() % 4 == 0) {
            tile::write_state(to, top, total);
        }
    }

    GPU_FN int run(int next) {
        softmax.reset();
        fetch(0);
        tile::load_queries(BY_COLUMNS);
        for (int i = 0; begin_of(i) < item.tokens.end; ++i) {
            process_tile(i);
        }
        gpu::copy_wait<0>();
        write();
        gpu::sync_block(); // before the next item overwrites queries and stages
        return next;
    }
};

} // namespace paged
