// Decode: attention of a tile of sixteen packed query rows, by one thread block of four warps.
//
// Each warp computes some of the tokens, on its own: it waits for no other warp until all add their sums at the end of
// a KV split.
#pragma once

#include "paged-attend.h"

namespace paged {

template <int V_TILES, class KNumbers, class VNumbers>
struct attend_tokens : attend_tile<BY_TOKENS, 1, V_TILES, KNumbers, VNumbers> {
    using tile = attend_tile<BY_TOKENS, 1, V_TILES, KNumbers, VNumbers>;
    using tile::at;
    using tile::item;
    using tile::memory;
    using tile::p;
    using tile::s;
    using tile::softmax;
    static constexpr int ROWS = tile::ROWS, T = tile::T;

    GPU_FN attend_tokens(const params & p, char * memory, const layout & at, const work_item & item)
        : tile(p, memory, at, item) {}

    // Stages take turns, from one item to the next too: items begin at multiples of the tokens of a step.
    static_assert(SPLIT_ALIGN % STEP_TOKENS == 0, "items begin at multiples of SPLIT_ALIGN");
    GPU_FN static int step_of(int begin) { return begin / STEP_TOKENS; }

    // Start to copy this warp's tokens from `begin` on; always one group of copies.
    GPU_FN token_group fetch_own(int begin, int end) const {
        const int   step = step_of(begin);
        token_group of   = {};
        if (begin < end) {
            of = group_of_tokens(p, s, begin, end);
            if (KNumbers::size != 0) {
                tile::fetch(false, of, 0, step);
                tile::fetch(true, group_of_tokens(p, s, begin, end), 0, step); // again, rather than in registers
            } else {                                                           // a loop is shorter code
                GPU_ROLLED
                for (int of_v = 0; of_v < (p.v_is_k ? 1 : 2); ++of_v) {
                    tile::fetch(of_v, of, 0, step);
                }
            }
        }
        gpu::copy_commit();
        return of;
    }

    // Compute the item, and the planned items that continue it, from `next` on; return the first that does not. Copies
    // run ahead over the borders of items.
    GPU_FN int run(int next) {
        typename tile::bounds all   = tile::bounds_of_rows();
        int                   begin = item.tokens.begin + GROUP * gpu::warp();
        token_group           ahead = fetch_own(begin, item.tokens.end);
        tile::load_queries(BY_TOKENS);
        gpu::sync_block();
        while (true) {
            const int end = item.continued ? tile::planned(next).tokens.end : item.tokens.end;
            softmax.reset();
            for (; begin < item.tokens.end; begin += STEP_TOKENS) {
                token_group of = ahead;
                ahead          = fetch_own(begin + STEP_TOKENS, end);
                if (V_TILES > 8 || KNumbers::size != 0) { // too few registers to keep it
                    of = group_of_tokens(p, s, begin, end);
                }
                gpu::copy_wait<1>();
                gpu::sync_warp();
                attend_own(all, of, step_of(begin));
                gpu::sync_warp(); // before the next tokens overwrite these
            }
            join_warps();
            if (!item.continued) {
                gpu::copy_wait<0>();
                gpu::sync_block(); // before the next item overwrites queries and stages
                return next;
            }
            item = tile::planned(next++);
            all  = tile::bounds_of_rows();
        }
    }

    GPU_FN void attend_own(const typename tile::bounds & all, const token_group & of, int step) {
        float c[1][2 * T][4];
        tile::zero(c);
        if (tile::k_direct()) {
            const raw_rows raw(p, p.k, s, of, item.head_kv, tile::raw(false, 0, step));
            p.k.type == PAGE_Q8_0 ? multiply_codes<PAGE_Q8_0>(raw, c[0]) : multiply_codes<PAGE_Q4_0>(raw, c[0]);
        } else {
            if (!tile::k_ready()) {
                tile::convert_k(of, 0, step);
                gpu::sync_warp();
            }
            tile::template multiply<MAX_TERMS, 1, T>(0, tile::keys(step), c);
        }
        tile::weigh(all, of.begin, c);
        if (tile::v_direct()) {
            const raw_rows raw(p, p.v_is_k ? p.k : p.v, s, of, item.head_kv, tile::raw(!p.v_is_k, 0, step));
            p.v.type == PAGE_Q8_0 ? accumulate_codes<PAGE_Q8_0>(raw, c[0]) : accumulate_codes<PAGE_Q4_0>(raw, c[0]);
            return;
        }
        if (!tile::v_ready()) {
            gpu::sync_warp(); // all lanes have read the keys
            tile::convert_v(of, 0, step);
            gpu::sync_warp();
        }
        tile::template accumulate<MAX_TERMS>(tile::values(step), c);
    }

    // Add the products of the queries, which lie in the order of the codes, with the keys of a group of tokens.
    template <int TYPE> GPU_FN void multiply_codes(const raw_rows & raw, float (&c)[2 * T][4]) const {
        const int    lane = gpu::lane(), stride = number_stride(p.d_k);
        const char * first  = raw.row(lane / 4);
        const char * second = raw.row(lane / 4 + 8);
        const char * rows   = memory + at.q + lane % 16 * stride + lane / 16 * 16;
        GPU_UNROLL_2
        for (int n = 0; n < p.d_k / CODED_NUMBERS; ++n) {
            uint32_t b[2][2][2];
            unpack_keys<TYPE>(first + n * group_bytes(TYPE), lane % 4, b[0]);
            unpack_keys<TYPE>(second + n * group_bytes(TYPE), lane % 4, b[1]);
            GPU_UNROLL
            for (int i = 0; i < 2; ++i) {
                uint32_t a[4];
                gpu::load_matrices(a, rows + 32 * (2 * n + i));
                GPU_UNROLL
                for (int t = 0; t < 2; ++t) {
                    KNumbers::multiply(c[t], a, b[t][i][0], b[t][i][1]);
                }
            }
        }
    }

    // Add the weighted sum of V of a group of tokens; column k of tile n is column_of(n, k).
    template <int TYPE> GPU_FN void accumulate_codes(const raw_rows & raw, const float (&c)[2 * T][4]) {
        const int    lane = gpu::lane();
        const char * of[4];
        uint32_t     a[4];
        GPU_UNROLL
        for (int i = 0; i < 4; ++i) {
            of[i] = raw.row(lane % 4 * 2 + i % 2 + i / 2 * 8);
            a[i]  = VNumbers::pack(c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]);
        }
        GPU_UNROLL
        for (int n = 0; n < V_TILES / 2; ++n) {
            if (n * CODED_NUMBERS >= p.d_v) {
                break;
            }
            uint32_t b[2][4];
            unpack_values<TYPE>(of[0] + n * group_bytes(TYPE), of[1] + n * group_bytes(TYPE), lane / 4, b[0]);
            unpack_values<TYPE>(of[2] + n * group_bytes(TYPE), of[3] + n * group_bytes(TYPE), lane / 4, b[1]);
            GPU_UNROLL
            for (int j = 0; j < 4; ++j) {
                VNumbers::multiply(softmax.sums[0][2 * n + j / 2][j % 2], a, b[0][j], b[1][j]);
            }
        }
    }

    // In shared memory: maxima and totals of each row and warp, and each warp's sums of eight rows in place of
    // converted numbers.
    GPU_FN float * maxima() const { return (float *) (memory + at.maxima); }
    GPU_FN float * totals() const { return maxima() + ROWS * N_WARPS; }
    GPU_FN float * sums(int warp, int row) const {
        return (float *) (memory + at.k + warp * at.converted_bytes) + row % 8 * sum_stride(p.d_v);
    }

    GPU_FN float largest(int row) const {
        const float * of = maxima() + row * N_WARPS;
        return fmaxf(fmaxf(of[0], of[1]), fmaxf(of[2], of[3]));
    }
    // Return the factor of a warp's sums, whose weights are relative to its own maximum.
    GPU_FN float factor_of(int row, int warp, float top) const {
        const float own = maxima()[row * N_WARPS + warp];
        return own == -INFINITY ? 0.0f : gpu::exp2(own - top);
    }

    GPU_FN void join_warps() {
        const int n = tile::n_packed() < ROWS ? tile::n_packed() : ROWS, g = gpu::lane() / 4;
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            const float total = softmax.total_of_row(0, h);
            if (gpu::lane() % 4 == 0) {
                maxima()[(g + 8 * h) * N_WARPS + gpu::warp()] = softmax.maximum[0][h];
                totals()[(g + 8 * h) * N_WARPS + gpu::warp()] = total;
            }
        }
        GPU_UNROLL
        for (int h = 0; h < 2; ++h) {
            if (8 * h >= n) {
                break;
            }
            gpu::sync_block(); // all maxima are stored, and no warp reads the sums of the rows before
            if (g + 8 * h < n) {
                tile::write_row(0, h, sums(gpu::warp(), g), factor_of(g + 8 * h, gpu::warp(), largest(g + 8 * h)));
            }
            gpu::sync_block();
            for (int row = 8 * h + gpu::warp(); row < n && row < 8 * h + 8; row += N_WARPS) {
                join_row(row);
            }
        }
        gpu::sync_block(); // before a warp overwrites sums and maxima
    }

    GPU_FN void join_row(int row) const { // by one warp
        const float top   = largest(row);
        float       total = 0.0f;
        GPU_UNROLL
        for (int w = 0; w < N_WARPS; ++w) {
            total += totals()[row * N_WARPS + w] * factor_of(row, w, top);
        }
        const float factor = tile::destination_factor(row, top, total);
        float *     to     = tile::destination(row);
        for (int column = 4 * gpu::lane(); column < p.d_v; column += 128) {
            floats4 sum = {};
            GPU_UNROLL
            for (int w = 0; w < N_WARPS; ++w) {
                const floats4 one = *(const floats4 *) (sums(w, row) + column);
                GPU_UNROLL
                for (int i = 0; i < 4; ++i) {
                    sum.x[i] += one.x[i];
                }
            }
            GPU_UNROLL
            for (int i = 0; i < 4; ++i) {
                sum.x[i] *= factor;
            }
            *(floats4 *) (to + column) = sum;
        }
        if (gpu::lane() == 0) {
            tile::write_state(to, top, total);
        }
    }
};

} // namespace paged
