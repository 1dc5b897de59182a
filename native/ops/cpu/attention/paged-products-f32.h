// The tile kernel's products in floats: exact to rounding for pages of any type.
//
// Two Sapphire Rapids cores, 512 rows over 4096 tokens, 16/8 heads of 128: f16 62 ms, q8_0 79, q4_0 77.
#pragma once

#include "paged-ahead.h"
#include "paged-kernel.h"
#include "paged-simd.h"

namespace paged {

class f32_products {
public:
    struct setting {};

    static constexpr int spans_at_once = 1; // tiles of V in one product

    f32_products(const problem & p, const float * q, arena & a) : p_(p), q_(q) {
        row_ = a.take<float>(lanes * padded(p.d_k));
        k_   = a.take<float>(tile_tokens * padded(p.d_k));
        v_   = a.take<float>(tile_tokens * padded(p.d_v));
    }

    static int64_t padded(int64_t d) { return (d + lanes - 1) / lanes * lanes; }
    int64_t        width() const { return padded(p_.d_v); } // of a row of sums

    void set_queries(int64_t) {
        // padding is multiplied and not used, so it must be a number
        std::fill_n(row_, lanes * padded(p_.d_k), 0.0f);
        std::fill_n(v_, tile_tokens * padded(p_.d_v), 0.0f);
    }

    // Lanes after the tile's last token repeat it; their scores are not used.
    void set_keys(int64_t head_kv, const tile & at, rows_ahead & ahead) {
        const row_to_float convert = row_converter(p_.k->type);
        const int64_t      d       = padded(p_.d_k);
        for (int64_t t = 0; t < at.size(); t += lanes) {
            for (int64_t i = 0; i < lanes; ++i) {
                const int64_t slot = at.slot + std::min(t + i, at.size() - 1);
                convert(kv_row(p_.k, head_kv, slot), row_ + i * d, p_.d_k);
                ahead.step();
            }
            for (int64_t i = 0; i < d; i += lanes) {
                f32v block[lanes];
                PAGED_UNROLL
                for (int r = 0; r < lanes; ++r) {
                    block[r] = load(row_ + r * d + i);
                }
                transpose(block);
                PAGED_UNROLL
                for (int r = 0; r < lanes; ++r) {
                    store(k_ + (i + r) * tile_tokens + t, block[r]);
                }
            }
        }
    }

    void set_values(int, int64_t head_kv, const tile & at, rows_ahead & ahead) {
        const row_to_float convert = row_converter(p_.v->type);
        for (int64_t i = 0; i < at.size(); ++i) {
            convert(kv_row(p_.v, head_kv, at.slot + i), v_ + i * padded(p_.d_v), p_.d_v);
            ahead.step();
        }
    }

    // Calls f(first row, number of rows) for whole passes, then for halves down to one row.
    template <class F> static void for_each_block(int64_t rows, F f) {
        int64_t r = 0;
        for (int n = most_rows; n > 0; n /= 2) {
            for (; r + n <= rows; r += n) {
                f(r, n);
            }
        }
    }

    void score(int64_t r, int64_t n, float * s) const {
        const float * q = q_ + r * p_.d_k;
        switch (n) {
        case 8:
            score_pass<8>(q, s);
            break;
        case 4:
            score_pass<4>(q, s);
            break;
        case 2:
            score_pass<2>(q, s);
            break;
        case 1:
            score_pass<1>(q, s);
            break;
        }
    }

    void add(int64_t n, const float * w, const tile_span * spans, int, float * sum) const {
        w += spans->offset;
        switch (n) {
        case 8:
            add_pass<8>(w, spans->n, sum);
            break;
        case 4:
            add_pass<4>(w, spans->n, sum);
            break;
        case 2:
            add_pass<2>(w, spans->n, sum);
            break;
        case 1:
            add_pass<1>(w, spans->n, sum);
            break;
        }
    }

private:
    static constexpr int vectors   = tile_tokens / lanes;
    static constexpr int at_once   = vectors < 2 ? vectors : 2; // in registers beside the sums of a pass
    static constexpr int most_rows = lanes == 16 ? 8 : 4;       // of a pass

    const problem & p_;
    const float *   q_;   // [rows][d_k]
    float *         row_; // [lanes][padded(d_k)]
    float *         k_;   // [padded(d_k)][tile_tokens]: tokens in lanes
    float *         v_;   // [tile_tokens][padded(d_v)]

    // s[rows][32] = q * k
    template <int rows> void score_pass(const float * q, float * s) const {
        const int64_t d = p_.d_k;
        for (int from = 0; from < vectors; from += at_once) {
            f32v dot[rows][at_once];
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                for (int c = 0; c < at_once; ++c) {
                    dot[r][c] = zero();
                }
            }
            for (int64_t i = 0; i < d; ++i) {
                f32v key[at_once];
                PAGED_UNROLL
                for (int c = 0; c < at_once; ++c) {
                    key[c] = load(k_ + i * tile_tokens + (from + c) * lanes);
                }
                PAGED_UNROLL
                for (int r = 0; r < rows; ++r) {
                    const f32v query = splat(q[r * d + i]);
                    PAGED_UNROLL
                    for (int c = 0; c < at_once; ++c) {
                        dot[r][c] = fma(key[c], query, dot[r][c]);
                    }
                }
            }
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                PAGED_UNROLL
                for (int c = 0; c < at_once; ++c) {
                    store(s + r * score_stride + (from + c) * lanes, dot[r][c]);
                }
            }
        }
    }

    // sum[rows][columns from `from`] += w * v
    template <int rows, int columns>
    PAGED_INLINE void add_columns(const float * w, int64_t n, int64_t from, float * sum) const {
        const int64_t d = padded(p_.d_v);
        f32v          a[rows][columns];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int c = 0; c < columns; ++c) {
                a[r][c] = load(sum + r * d + from + c * lanes);
            }
        }
        for (int64_t t = 0; t < n; ++t) {
            f32v x[columns];
            PAGED_UNROLL
            for (int c = 0; c < columns; ++c) {
                x[c] = load(v_ + t * d + from + c * lanes);
            }
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const f32v weight = splat(w[r * score_stride + t]);
                PAGED_UNROLL
                for (int c = 0; c < columns; ++c) {
                    a[r][c] = fma(x[c], weight, a[r][c]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int c = 0; c < columns; ++c) {
                store(sum + r * d + from + c * lanes, a[r][c]);
            }
        }
    }

    template <int rows> void add_pass(const float * w, int64_t n, float * sum) const {
        const int64_t d = padded(p_.d_v);
        int64_t       i = 0;
        for (; i + 2 * lanes <= d; i += 2 * lanes) {
            add_columns<rows, 2>(w, n, i, sum);
        }
        for (; i < d; i += lanes) {
            add_columns<rows, 1>(w, n, i, sum);
        }
    }
};

} // namespace paged
