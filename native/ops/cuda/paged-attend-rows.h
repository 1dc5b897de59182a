// Prefill: attention of a tile of 64 or 128 packed query rows, by one thread block of four warps.
//
// Each warp computes some of the rows, and all warps read the same tokens.
#pragma once

#include "paged-attend.h"

namespace paged {

template <int M_TILES, int V_TILES, class KNumbers, class VNumbers>
struct attend_rows : attend_tile<BY_ROWS, M_TILES, V_TILES, KNumbers, VNumbers> {
    using tile = attend_tile<BY_ROWS, M_TILES, V_TILES, KNumbers, VNumbers>;
    using tile::at;
    using tile::item;
    using tile::memory;
    using tile::p;
    using tile::s;
    using tile::softmax;
    static constexpr int ROWS = tile::ROWS, T = tile::T;

    GPU_FN attend_rows(const params & p, char * memory, const layout & at, const work_item & item)
        : tile(p, memory, at, item) {}

    // Each warp copies and converts K or V of some groups.
    GPU_FN void fetch_groups(int i) const { // into its stage; always one group of copies
        if (tile::begin_of(i) < item.tokens.end) {
            GPU_ROLLED
            for (int n = gpu::warp(); n < 2 * at.tokens / GROUP; n += N_WARPS) {
                const token_group of = group_of_tokens(p, s, tile::begin_of(i) + n / 2 * GROUP, item.tokens.end);
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
            const token_group of = group_of_tokens(p, s, tile::begin_of(i) + n / 2 * GROUP, item.tokens.end);
            if (n % 2 == 0 && !tile::k_ready()) {
                tile::convert_k(of, n / 2, i);
            } else if (n % 2 && !tile::v_ready()) {
                tile::convert_v(of, n / 2, i);
            }
        }
    }

    GPU_FN int run(int next) {
        softmax.reset();
        const typename tile::bounds all = tile::bounds_of_rows();
        fetch_groups(0);
        tile::load_queries(BY_ROWS);
        gpu::sync_block(); // an item may have no tokens, and then nothing else waits for the output rows
        for (int i = 0; tile::begin_of(i) < item.tokens.end; ++i) {
            gpu::copy_wait<0>();
            gpu::sync_block(); // the tile has arrived, and no warp reads the one before
            fetch_groups(i + 1);
            if (!tile::k_ready() || !tile::v_ready()) {
                convert_groups(i);
                gpu::sync_block();
            }
            for (int t = 0; t < at.tokens && tile::begin_of(i) + t < all.last; t += GROUP * T) {
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
        tile::zero(c);
        tile::template multiply<TERMS, M_TILES, T>(tile::first_row(), k, c);
        tile::weigh(all, tile::begin_of(i) + t, c);
        tile::template accumulate<TERMS>(v, c);
    }

    GPU_FN void write_rows() {
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                const int   row = tile::first_row() + 16 * m + gpu::lane() / 4 + 8 * h;
                const float top = softmax.maximum[m][h], total = softmax.total_of_row(m, h);
                if (row < tile::n_packed()) {
                    float * to = tile::destination(row);
                    tile::write_row(m, h, to, tile::destination_factor(row, top, total));
                    if (gpu::lane() % 4 == 0) {
                        tile::write_state(to, top, total);
                    }
                }
            }
        }
    }
};

} // namespace paged
