// What the kernels that keep scores in registers share: stages of tokens, softmax weights, the weighted sum of V.
//
// Scores and softmax weights stay in a warp's registers: the result of one product is the operand of the next.
#pragma once

#include "paged-queries.h"

namespace paged {

template <division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
struct attend_tile : query_tile<16 * M_TILES *(BY == BY_ROWS ? N_WARPS : 1), KNumbers> {
    static constexpr int  ROWS    = 16 * M_TILES * (BY == BY_ROWS ? N_WARPS : 1);
    static constexpr bool PRIVATE = BY == BY_TOKENS;
    static constexpr int  T       = PRIVATE ? 1 : 2; // groups of tokens for which a warp has scores at a time
    using tile                    = query_tile<ROWS, KNumbers>;
    using tile::at;
    using tile::item;
    using tile::memory;
    using tile::p;
    using tile::s;

    softmax_state<M_TILES, V_TILES> softmax;

    GPU_FN attend_tile(const params & p, char * memory, const layout & at, const work_item & item)
        : tile(p, memory, at, item) {}

    GPU_FN int    first_row() const { return PRIVATE ? 0 : 16 * M_TILES * gpu::warp(); }
    GPU_FN int    owner() const { return PRIVATE ? gpu::warp() : 0; }
    GPU_FN int    begin_of(int i) const { return item.tokens.begin + i * at.tokens; }
    GPU_FN char * stage_of(int i) const {
        return memory + at.stages + (owner() * N_STAGES + i % N_STAGES) * at.stage_bytes;
    }

    // ---- tokens ----

    // Whether codes are multiplied as they lie in the stage.
    GPU_FN bool k_direct() const { return is_direct<KNumbers>(BY, p.k); }
    GPU_FN bool v_direct() const { return is_direct<VNumbers>(BY, p.v); }

    GPU_FN bool k_ready() const { return raw_is_ready(p.k, p.d_k); }
    GPU_FN bool v_ready() const { return p.v_is_k || raw_is_ready(p.v, p.d_v); }

    GPU_FN char * raw(bool of_v, int g, int i) const {
        return stage_of(i) + (of_v ? at.v_raw : 0) + GROUP * g * (of_v ? p.v : p.k).raw_stride;
    }
    GPU_FN void fetch(bool of_v, const token_group & of, int g, int i) const {
        if (KNumbers::size == 0) { // one piece of code for both
            fetch_group(p, of_v ? p.v : p.k, s, item.head_kv, of, raw(of_v, g, i));
        } else if (of_v) {
            fetch_group(p, p.v, s, item.head_kv, of, raw(true, g, i));
        } else {
            fetch_group(p, p.k, s, item.head_kv, of, raw(false, g, i));
        }
    }

    GPU_FN char * converted(bool of_v) const { return memory + (of_v ? at.v : at.k) + owner() * at.converted_bytes; }

    GPU_FN void convert_k(const token_group & of, int g, int i) const {
        const int stride = number_stride(p.d_k);
        convert_group<KNumbers, PRIVATE>({p, p.k, s, of, item.head_kv, raw(false, g, i)}, p.d_k,
                                         converted(false) + GROUP * g * stride, at.tokens * stride);
    }
    GPU_FN void convert_v(const token_group & of, int g, int i) const {
        const int stride = number_stride(p.d_v);
        convert_group<VNumbers, PRIVATE>({p, p.v, s, of, item.head_kv, raw(true, g, i)}, p.d_v,
                                         converted(true) + GROUP * g * stride, at.tokens * stride);
    }

    GPU_FN operand keys(int i) const {
        if (k_ready()) {
            return {stage_of(i), p.k.raw_stride, 0};
        }
        return {converted(false), number_stride(p.d_k), at.tokens * number_stride(p.d_k)};
    }
    GPU_FN operand values(int i) const {
        if (p.v_is_k) {
            return keys(i);
        }
        if (v_ready()) {
            return {stage_of(i) + at.v_raw, p.v.raw_stride, 0};
        }
        return {converted(true), number_stride(p.d_v), at.tokens * number_stride(p.d_v)};
    }

    // ---- products ----

    // Tokens that all rows of this warp attend, and the end of the tokens that any row attends.
    struct bounds {
        int begin, end, last;
    };

    GPU_FN bounds bounds_of_rows() const {
        const int first = first_row(), n = tile::n_packed(), last = first + 16 * M_TILES < n ? first + 16 * M_TILES : n;
        if (item.members > 1) { // shared splits are attended completely
            return {item.tokens.begin, item.tokens.end, item.tokens.end};
        }
        if (first >= n) {
            return {0, 0, 0};
        }
        const int least = s.position(tile::packed(first) / p.group),
                  most  = s.position(tile::packed(last - 1) / p.group);
        return {first_visible(p, most), least + 1 < item.tokens.end ? least + 1 : item.tokens.end, most + 1};
    }

    // Turn scores into softmax weights. `begin`: position of the first.
    GPU_FN void weigh(const bounds & all, int begin, float (&c)[M_TILES][2 * T][4]) {
        const bool whole = begin >= all.begin && begin + GROUP * T <= all.end, bends = tile::bends();
        const int  column = begin + gpu::lane() % 4 * 2;
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                const int row = first_row() + 16 * m + gpu::lane() / 4 + 8 * h;
                if (PRIVATE && h && tile::n_packed() <= 8) { // only padding
                    GPU_UNROLL
                    for (int n = 0; n < 2 * T; ++n) {
                        c[m][n][2] = c[m][n][3] = 0.0f;
                    }
                    continue;
                }
                if (bends) {
                    tile::bend(row, column, h, c[m]);
                }
                if (!whole) {
                    tile::mask(row, column, h, c[m]);
                }
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
                        a[term][m][r] = VNumbers::pack(x, y);
                        x -= VNumbers::rounded(x);
                        y -= VNumbers::rounded(y);
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

    GPU_FN void zero(float (&c)[M_TILES][2 * T][4]) const {
        GPU_UNROLL
        for (int i = 0; i < M_TILES * 2 * T * 4; ++i) {
            (&c[0][0][0])[i] = 0.0f;
        }
    }

    // Return the column of V that column k of a tile of eight is.
    GPU_FN int column_of(int tile, int k) const {
        return v_direct() ? tile / 4 * CODED_NUMBERS + column_at(p.v.type, tile % 4, k) : 8 * tile + k;
    }

    GPU_FN void write_row(int m, int h, float * to, float factor) const {
        GPU_UNROLL
        for (int n = 0; n < 2 * V_TILES; ++n) {
            GPU_UNROLL
            for (int r = 0; r < 2; ++r) {
                const int column = column_of(n, gpu::lane() % 4 * 2 + r);
                if (VNumbers::size != 0 || column < p.d_v) {
                    to[column] = softmax.sums[m][n / 2][n % 2][2 * h + r] * factor;
                }
            }
        }
    }
};

} // namespace paged
