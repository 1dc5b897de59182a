// Attention of a tile of packed query rows whose sums or tokens are too large for the other kernels.
//
// In a tile of tokens, each warp computes the scores of sixteen rows with some of the tokens, then the weighted sum of
// some of V's columns for all rows. So a warp's registers hold a part of the columns: a quarter for tiles of sixteen
// rows, an eighth for tiles of 64, which eight warps compute.
#pragma once

#include "paged-queries.h"

namespace paged {

template <int M_TILES, int V_TILES, class KNumbers, class VNumbers>
struct attend_columns : query_tile<BY_COLUMNS, 16 * M_TILES, KNumbers> {
    static constexpr int ROWS  = 16 * M_TILES;
    static constexpr int WARPS = n_warps(BY_COLUMNS, ROWS);
    static constexpr int PARTS = WARPS / M_TILES; // warps that have the same rows and other tokens
    using tile                 = query_tile<BY_COLUMNS, ROWS, KNumbers>;
    using tile::at;
    using tile::item;
    using tile::memory;
    using tile::p;
    using tile::s;

    softmax_state<M_TILES, V_TILES> softmax; // sums of columns 16 * (warp + WARPS * n)

    GPU_FN attend_columns(const params & p, char * memory, const layout & at, const work_item & item)
        : tile(p, memory, at, item) {}

    // The rows, and the group of tokens, of which this warp computes scores.
    GPU_FN int own_tile() const { return gpu::warp() % M_TILES; }
    GPU_FN int own_group() const { return gpu::warp() / M_TILES; }

    GPU_FN int    begin_of(int i) const { return item.tokens.begin + i * at.tokens; }
    GPU_FN char * stage_of(int i) const { return memory + at.stages + i % N_STAGES * at.stage_bytes; }

    GPU_FN void fetch(int i) const { // into its stage; always one group of copies
        if (begin_of(i) < item.tokens.end) {
            for (int g = gpu::warp(); g < at.tokens / GROUP; g += WARPS) {
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
        for (int g = gpu::warp(); g < at.tokens / GROUP; g += WARPS) {
            const token_group of = group_of_tokens(p, s, begin_of(i) + GROUP * g, item.tokens.end);
            convert_group<Numbers>({p, x, s, of, item.head_kv, raw + GROUP * g * from}, d, converted + GROUP * g * to,
                                   at.tokens * to);
        }
        return {converted, to, at.tokens * to};
    }

    template <int TERMS> GPU_FN void process_tile(int i) {
        gpu::copy_wait<0>();
        gpu::sync_block(); // the tile has arrived, and no warp reads the one before
        fetch(i + 1);
        const operand k = ready<KNumbers>(p.k, p.d_k, i, stage_of(i), memory + at.k);
        const operand v = p.v_is_k ? k : ready<VNumbers>(p.v, p.d_v, i, stage_of(i) + at.v_raw, memory + at.v);
        gpu::sync_block();
        weigh<TERMS>(k, begin_of(i));
        gpu::sync_block();
        accumulate<TERMS>(v);
    }

    // Compute the scores of this warp's rows and tokens, update the maxima of all rows, and store the softmax weights.
    template <int TERMS> GPU_FN void weigh(const operand & k, int begin) {
        const bool    mine       = own_group() < at.tokens / GROUP;
        const int     column     = GROUP * own_group() + gpu::lane() % 4 * 2;
        const operand own        = {k.data + GROUP * own_group() * k.stride, k.stride, k.term};
        float         c[1][2][4] = {}, top[2] = {-INFINITY, -INFINITY};
        if (mine) {
            tile::template multiply<TERMS, 1, 1>(16 * own_tile(), own, c);
        }
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            tile::settle(16 * own_tile() + gpu::lane() / 4 + 8 * h, begin + column, h, false, c[0]);
            if (mine) {
                top[h] = fmaxf(fmaxf(c[0][0][2 * h], c[0][0][2 * h + 1]), fmaxf(c[0][1][2 * h], c[0][1][2 * h + 1]));
            }
        }
        exchange_maxima(top);
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                softmax.rescale(m, h, maximum_of(16 * m + gpu::lane() / 4 + 8 * h));
                if (mine && m == own_tile()) {
                    softmax.total[m][h] += store_weights<TERMS>(c[0], h, column, base_of(softmax.maximum[m][h]));
                }
            }
        }
    }

    // In shared memory: the maxima of a row's scores with the tokens of each warp that has the row.
    GPU_FN float * maxima(int row) const { return (float *) (memory + at.maxima) + row * PARTS; }

    GPU_FN void exchange_maxima(float (&top)[2]) const {
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            top[h] = fmaxf(top[h], gpu::shuffle_xor(top[h], 1));
            top[h] = fmaxf(top[h], gpu::shuffle_xor(top[h], 2));
            if (gpu::lane() % 4 == 0) {
                maxima(16 * own_tile() + gpu::lane() / 4 + 8 * h)[own_group()] = top[h];
            }
        }
        gpu::sync_block();
    }

    GPU_FN float maximum_of(int row) const {
        float top = maxima(row)[0];
        GPU_UNROLL
        for (int i = 1; i < PARTS; ++i) {
            top = fmaxf(top, maxima(row)[i]);
        }
        return top;
    }

    // Store the weights of a row of this warp, and return the sum of this lane's.
    template <int TERMS> GPU_FN float store_weights(const float (&c)[2][4], int h, int column, float base) const {
        constexpr int WEIGHT_TERMS = VNumbers::weight_terms < TERMS ? VNumbers::weight_terms : TERMS;
        const int     own          = 16 * own_tile() + gpu::lane() / 4 + 8 * h;
        char *        row          = memory + at.weights + own * weight_stride(at.tokens);
        float         sum          = 0.0f;
        GPU_UNROLL
        for (int n = 0; n < 2; ++n) {
            float a = gpu::exp2(c[n][2 * h] - base), b = gpu::exp2(c[n][2 * h + 1] - base);
            sum += a + b;
            GPU_UNROLL
            for (int term = 0; term < WEIGHT_TERMS; ++term) {
                *(uint32_t *) (row + term * ROWS * weight_stride(at.tokens) + 2 * (column + 8 * n)) =
                    take_term<VNumbers>(a, b);
            }
        }
        return sum;
    }

    // Add the weighted sum of the tile's V for this warp's columns.
    template <int TERMS> GPU_FN void accumulate(const operand & v) {
        constexpr int WEIGHT_TERMS = VNumbers::weight_terms < TERMS ? VNumbers::weight_terms : TERMS;
        const int     lane = gpu::lane(), stride = weight_stride(at.tokens);
        for (int step = 0; step < at.tokens / 16; ++step) {
            GPU_UNROLL
            for (int w_term = 0; w_term < WEIGHT_TERMS; ++w_term) {
                uint32_t a[M_TILES][4];
                GPU_UNROLL
                for (int m = 0; m < M_TILES; ++m) {
                    gpu::load_matrices(a[m], memory + at.weights + (w_term * ROWS + 16 * m + lane % 16) * stride +
                                                 32 * step + lane / 16 * 16);
                }
                GPU_UNROLL
                for (int v_term = 0; v_term < VNumbers::terms && w_term + v_term < TERMS; ++v_term) {
                    GPU_UNROLL
                    for (int n = 0; n < V_TILES; ++n) {
                        const int column = 16 * (gpu::warp() + WARPS * n);
                        if (column >= p.d_v) {
                            break;
                        }
                        uint32_t b[4];
                        gpu::load_matrices_transposed(b, v.data + v_term * v.term + (16 * step + lane % 16) * v.stride +
                                                             2 * column + lane / 16 * 16);
                        GPU_UNROLL
                        for (int m = 0; m < M_TILES; ++m) {
                            VNumbers::multiply(softmax.sums[m][n][0], a[m], b[0], b[1]);
                            VNumbers::multiply(softmax.sums[m][n][1], a[m], b[2], b[3]);
                        }
                    }
                }
            }
        }
    }

    // ---- results ----

    // In shared memory: the sums of a row's weights that each warp has.
    GPU_FN float * totals(int row) const { return (float *) (memory + at.maxima) + row * WARPS; }

    GPU_FN void write() const {
        gpu::sync_block();
        GPU_UNROLL
        for (int i = 0; i < 2 * M_TILES; ++i) {
            const float total = softmax.total_of_row(i / 2, i % 2);
            if (gpu::lane() % 4 == 0) {
                totals(8 * i + gpu::lane() / 4)[gpu::warp()] = total;
            }
        }
        gpu::sync_block();
        GPU_UNROLL
        for (int i = 0; i < 2 * M_TILES; ++i) {
            const int row = 8 * i + gpu::lane() / 4;
            if (row < tile::n_packed()) {
                write_row(row, i / 2, i % 2);
            }
        }
    }

    GPU_FN void write_row(int row, int m, int h) const {
        const float top   = softmax.maximum[m][h];
        float       total = totals(row)[0];
        GPU_UNROLL
        for (int w = 1; w < WARPS; ++w) {
            total += totals(row)[w];
        }
        float *     to     = tile::destination(row);
        const float factor = tile::destination_factor(row, top, total);
        GPU_UNROLL
        for (int n = 0; n < 2 * V_TILES; ++n) {
            const int column = 16 * (gpu::warp() + WARPS * (n / 2)) + 8 * (n % 2) + gpu::lane() % 4 * 2;
            if (column < p.d_v) {
                to[column]     = softmax.sums[m][n / 2][n % 2][2 * h] * factor;
                to[column + 1] = softmax.sums[m][n / 2][n % 2][2 * h + 1] * factor;
            }
        }
        if (gpu::warp() == 0 && gpu::lane() % 4 == 0) {
            tile::write_state(to, top, total);
        }
    }

    GPU_FN int run(int next) {
        softmax.reset();
        fetch(0);
        tile::load_queries();
        for (int i = 0; begin_of(i) < item.tokens.end; ++i) {
            if (is_fast(p, ROWS)) {
                process_tile<1>(i);
            } else {
                process_tile<MAX_TERMS>(i);
            }
        }
        gpu::copy_wait<0>();
        write();
        gpu::sync_block(); // before the next item overwrites queries and stages
        return next;
    }
};

} // namespace paged
