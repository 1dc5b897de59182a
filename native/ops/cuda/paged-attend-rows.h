// Prefill: attention of a tile of 64 or 128 packed query rows, by one thread block of four warps.
//
// Each warp computes some of the rows, and all warps read the same tokens.
#pragma once

#include "paged-attend.h"

namespace paged {

// Groups of tokens for which a warp has scores at a time. The same for all M_TILES: sums depend on it. For Blackwell
// the compiler needs more registers than it has for 128 columns and two groups.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int scored_groups(int v_tiles) { return v_tiles == 8 ? 1 : 2; }
#else
constexpr int scored_groups(int) { return 2; }
#endif

template <int M_TILES, int V_TILES, class KNumbers, class VNumbers>
struct attend_rows : staged_tile<BY_ROWS, 16 * M_TILES * N_WARPS, KNumbers, VNumbers> {
    static constexpr int ROWS = 16 * M_TILES * N_WARPS;
    static constexpr int T    = scored_groups(V_TILES);
    using tile                = staged_tile<BY_ROWS, ROWS, KNumbers, VNumbers>;
    using tile::at;
    using tile::item;
    using tile::memory;
    using tile::p;
    using tile::s;

    softmax_state<M_TILES, V_TILES> softmax;

    GPU_FN attend_rows(const params & p, char * memory, const layout & at, const work_item & item)
        : tile(p, memory, at, item) {}

    GPU_FN int first_row() const { return 16 * M_TILES * gpu::warp(); }
    GPU_FN int begin_of(int i) const { return item.tokens.begin + i * at.tokens; }

    // Each warp copies and converts K or V of some groups.
    GPU_FN void fetch_groups(int i) const { // into its stage; always one group of copies
        if (begin_of(i) < item.tokens.end) {
            GPU_ROLLED
            for (int n = gpu::warp(); n < 2 * at.tokens / GROUP; n += N_WARPS) {
                const token_group of = group_of_tokens(p, s, begin_of(i) + n / 2 * GROUP, item.tokens.end);
                if (n % 2 == 0 || !p.v_is_k) {
                    tile::fetch(n % 2, of, n / 2, i);
                }
            }
        }
        gpu::copy_commit();
    }

    GPU_FN void convert_groups(int i) const {
        GPU_ROLLED
        for (int n = gpu::warp(); n < 2 * at.tokens / GROUP; n += N_WARPS) {
            const token_group of = group_of_tokens(p, s, begin_of(i) + n / 2 * GROUP, item.tokens.end);
            if (n % 2 == 0 && !tile::k_ready()) {
                tile::convert_k(of, n / 2, i);
            } else if (n % 2 && !tile::v_ready()) {
                tile::convert_v(of, n / 2, i);
            }
        }
    }

    GPU_FN int run(int next) {
        softmax.reset();
        const typename tile::bounds all = tile::bounds_of_rows(first_row(), 16 * M_TILES);
        fetch_groups(0);
        tile::load_queries();
        gpu::sync_block(); // an item may have no tokens, and then nothing else waits for the output rows
        for (int i = 0; begin_of(i) < item.tokens.end; ++i) {
            gpu::copy_wait<0>();
            gpu::sync_block(); // the tile has arrived, and no warp reads the one before
            fetch_groups(i + 1);
            if (!tile::k_ready() || !tile::v_ready()) {
                convert_groups(i);
                gpu::sync_block();
            }
            for (int t = 0; t < at.tokens && begin_of(i) + t < all.last; t += GROUP * T) {
                if (is_fast(p, ROWS)) {
                    compute<1>(all, i, t);
                } else {
                    compute<MAX_TERMS>(all, i, t);
                }
            }
        }
        gpu::copy_wait<0>();
        write_rows();
        gpu::sync_block(); // before the next item overwrites queries and stages
        return next;
    }

    template <int TERMS> GPU_FN void compute(const typename tile::bounds & all, int i, int t) {
        operand k = tile::keys(i), v = tile::values(i);
        k.data += t * k.stride;
        v.data += t * v.stride;
        float c[M_TILES][2 * T][4];
        GPU_UNROLL
        for (int n = 0; n < M_TILES * 2 * T * 4; ++n) {
            (&c[0][0][0])[n] = 0.0f;
        }
        tile::template multiply<TERMS, M_TILES, T>(first_row(), k, c);
        weigh(all, begin_of(i) + t, c);
        accumulate<TERMS>(v, c);
    }

    // Turn scores into softmax weights. `begin`: position of the first.
    GPU_FN void weigh(const typename tile::bounds & all, int begin, float (&c)[M_TILES][2 * T][4]) {
        const bool whole  = begin >= all.begin && begin + GROUP * T <= all.end;
        const int  column = begin + gpu::lane() % 4 * 2;
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                tile::settle(first_row() + 16 * m + gpu::lane() / 4 + 8 * h, column, h, whole, c[m]);
                softmax.weigh(m, h, c[m]);
            }
        }
    }

    // Add the weighted sum of V of the groups that begin at `v`.
    template <int TERMS> GPU_FN void accumulate(const operand & v, const float (&c)[M_TILES][2 * T][4]) {
        constexpr int WEIGHT_TERMS = VNumbers::weight_terms < TERMS ? VNumbers::weight_terms : TERMS;
        constexpr int V_TERMS      = VNumbers::terms < TERMS ? VNumbers::terms : TERMS;
        const char *  rows         = v.data + gpu::lane() % 16 * v.stride + gpu::lane() / 16 * 16;
        GPU_UNROLL
        for (int t = 0; t < T; ++t) {
            uint32_t a[WEIGHT_TERMS][M_TILES][4];
            GPU_UNROLL
            for (int m = 0; m < M_TILES; ++m) {
                GPU_UNROLL
                for (int r = 0; r < 4; ++r) { // a result has the layout of an operand
                    float x = c[m][2 * t + r / 2][r % 2 * 2], y = c[m][2 * t + r / 2][r % 2 * 2 + 1];
                    GPU_UNROLL
                    for (int term = 0; term < WEIGHT_TERMS; ++term) {
                        a[term][m][r] = take_term<VNumbers>(x, y);
                    }
                }
            }
            GPU_UNROLL
            for (int n = 0; n < V_TILES; ++n) {
                if (16 * n >= p.d_v) {
                    break;
                }
                GPU_UNROLL
                for (int v_term = 0; v_term < V_TERMS; ++v_term) {
                    uint32_t b[4];
                    gpu::load_matrices_transposed(b, rows + v_term * v.term + GROUP * t * v.stride + 32 * n);
                    GPU_UNROLL
                    for (int term = 0; term < WEIGHT_TERMS && term + v_term < TERMS; ++term) {
                        GPU_UNROLL
                        for (int m = 0; m < M_TILES; ++m) {
                            VNumbers::multiply(softmax.sums[m][n][0], a[term][m], b[0], b[1]);
                            VNumbers::multiply(softmax.sums[m][n][1], a[term][m], b[2], b[3]);
                        }
                    }
                }
            }
        }
    }

    GPU_FN void write_rows() {
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                const int   row = first_row() + 16 * m + gpu::lane() / 4 + 8 * h;
                const float top = softmax.maximum[m][h], total = softmax.total_of_row(m, h);
                if (row < tile::n_packed()) {
                    float * to = tile::destination(row);
                    write_row(m, h, to, tile::destination_factor(row, top, total));
                    if (gpu::lane() % 4 == 0) {
                        tile::write_state(to, top, total);
                    }
                }
            }
        }
    }

    GPU_FN void write_row(int m, int h, float * to, float factor) const {
        GPU_UNROLL
        for (int n = 0; n < 2 * V_TILES; ++n) {
            const int column = 8 * n + gpu::lane() % 4 * 2;
            if (VNumbers::size != 0 || column < p.d_v) {
                to[column]     = softmax.sums[m][n / 2][n % 2][2 * h] * factor;
                to[column + 1] = softmax.sums[m][n / 2][n % 2][2 * h + 1] * factor;
            }
        }
    }
};

} // namespace paged
