// The tile kernel's products in bfloat16, summed in floats, on AVX-512, with tiles of AMX if the processor has them and
// the system permits them. With one part a number is rounded to 8 bits. With two parts it is the sum of two bfloat16,
// and a product of two numbers is three products of parts: as exact as floats, and with tiles several times as fast.
//
// Two Sapphire Rapids cores, 512 rows over 4096 tokens, 16/8 heads of 128, AMX: f16 37 ms in two parts and 26 in one,
// q8_0 34, q4_0 33.
#pragma once

#include "amx-tiles.h"
#include "paged-ahead.h"
#include "paged-kernel.h"
#include "paged-simd.h"

#if defined(PAGED_AVX512) && defined(__AVX512BF16__)
#    define PAGED_BF16
#endif

#if defined(PAGED_BF16)

namespace paged {

// a[rows][2 * pairs], rows of elements, times b[pairs][columns], pairs of elements
struct bf16_factors {
    const uint16_t * a;
    const uint32_t * b;
};

// Sets out[rows][columns] to the sum of `n` products of factors of one shape, or adds the sum to it if `more`. Columns
// and pairs are multiples of 16. Rows after the last one, up to a multiple of 16, are overwritten.
void multiply_bf16(const bf16_factors * factors, int n, int64_t rows, int64_t a_stride, int64_t b_stride, int64_t pairs,
                   int64_t columns, float * out, int64_t stride, bool more);

template <int parts> class bf16_products {
public:
    using setting = amx::tile_configuration; // lives while products are computed

    static constexpr int spans_at_once = 4; // tiles of V in one product

    bf16_products(const problem & p, const float * q, arena & a) : from_(q), p_(p) {
        for (int i = 0; i < parts; ++i) {
            q_[i]    = a.take<uint16_t>(tile_rows * d_k());
            k_[i]    = a.take<uint32_t>(tile_tokens * d_k() / 2);
            v_[i]    = a.take<uint32_t>(spans_at_once * tile_tokens / 2 * d_v());
            w_[i]    = a.take<uint16_t>(tile_rows * w_stride);
            wide_[i] = a.take<uint16_t>(16 * d_k());
        }
        row_ = a.take<float>(2 * std::max(d_k(), d_v()));
    }

    static int64_t padded(int64_t d) { return (d + 15) / 16 * 16; }

    void set_queries(int64_t rows) {
        for (int64_t r = 0; r < (rows + 15) / 16 * 16; ++r) {
            std::fill_n(row_, d_k(), 0.0f);
            if (r < rows) {
                std::copy_n(from_ + r * p_.d_k, p_.d_k, row_);
            }
            put_row(row_, q_, r * d_k());
        }
        std::fill_n(row_, 2 * std::max(d_k(), d_v()), 0.0f);
    }

    // Pairs of elements become dwords, and 16 tokens their lanes. Tokens after the last one are zero.
    void set_keys(int64_t head_kv, const tile & at, rows_ahead & ahead) {
        const row_to_float convert = row_converter(p_.k->type);
        for (int64_t t = 0; t < tile_tokens; t += 16) {
            for (int64_t i = 0; i < 16; ++i) {
                ahead.step();
                if (t + i < at.size()) {
                    convert(kv_row(p_.k, head_kv, at.slot + t + i), row_, p_.d_k);
                    put_row(row_, wide_, i * d_k());
                    continue;
                }
                for (int part = 0; part < parts; ++part) {
                    std::fill_n(wide_[part] + i * d_k(), d_k(), 0);
                }
            }
            for (int part = 0; part < parts; ++part) {
                transpose_dwords(wide_[part], k_[part] + t);
            }
        }
    }

    // Pairs of tokens become dwords, zero for tokens outside the tile. A token's row follows from its position alone,
    // and so does the order of a sum.
    void set_values(int span, int64_t head_kv, const tile & at, rows_ahead & ahead) {
        const int64_t lead   = at.begin % tile_tokens;
        int64_t       to     = span * (tile_tokens / 2) * d_v();
        float *       row[2] = {row_, row_ + d_v()};
        for (int64_t t = -lead; t < tile_tokens - lead; t += 2, to += d_v()) {
            for (int i = 0; i < 2; ++i) {
                ahead.step();
                if (t + i >= 0 && t + i < at.size()) {
                    row_converter(p_.v->type)(kv_row(p_.v, head_kv, at.slot + t + i), row[i], p_.d_v);
                } else {
                    std::fill_n(row[i], p_.d_v, 0.0f);
                }
            }
            for (int64_t i = 0; i < d_v(); i += 16) {
                const __m512i  pairs = _mm512_load_si512(amx::paired_words.x);
                const two_rows both  = split(load(row[0] + i), load(row[1] + i));
                for (int part = 0; part < parts; ++part) {
                    _mm512_storeu_si512(v_[part] + to + i, _mm512_permutexvar_epi16(pairs, both.part[part]));
                }
            }
        }
    }

    template <class F> static void for_each_block(int64_t rows, F f) {
        for (int64_t r = 0; r < rows; r += 32) {
            f(r, std::min<int64_t>(32, rows - r));
        }
    }

    void score(int64_t r, int64_t n, float * s) const {
        const int64_t      at        = r * d_k();
        const bf16_factors factors[] = {{q_[0] + at, k_[0]}, {q_[0] + at, k_[parts - 1]}, {q_[parts - 1] + at, k_[0]}};
        multiply_bf16(factors, n_products, n, d_k(), tile_tokens, d_k() / 2, tile_tokens, s, score_stride, false);
    }

    void add(int64_t n, const float * w, const tile_span * spans, int n_spans, float * sum) const {
        for (int64_t r = 0; r < n; ++r) {
            for (int i = 0; i < n_spans; ++i) {
                const int      lead = (int) (spans[i].offset % tile_tokens), end = lead + (int) spans[i].n;
                const float *  from = w + r * score_stride + spans[i].offset - lead;
                const two_rows both =
                    split(select(load(from), lead, end, zero()), select(load(from + 16), lead - 16, end - 16, zero()));
                for (int part = 0; part < parts; ++part) {
                    _mm512_storeu_si512(w_[part] + r * w_stride + i * tile_tokens, both.part[part]);
                }
            }
        }
        const bf16_factors factors[] = {{w_[0], v_[0]}, {w_[0], v_[parts - 1]}, {w_[parts - 1], v_[0]}};
        multiply_bf16(factors, n_products, n, w_stride, d_v(), n_spans * tile_tokens / 2, d_v(), sum, d_v(), true);
    }

private:
    static constexpr int     n_products = parts == 2 ? 3 : 1;
    static constexpr int64_t w_stride   = spans_at_once * tile_tokens;

    const float *   from_; // [rows][p.d_k]
    const problem & p_;
    uint16_t *      q_[parts];    // [tile_rows][d_k], zero past the last element and up to whole tiles of rows
    uint32_t *      k_[parts];    // [d_k / 2][tile_tokens]
    uint32_t *      v_[parts];    // [spans * tile_tokens / 2][d_v]
    uint16_t *      w_[parts];    // [tile_rows][spans * tile_tokens]
    uint16_t *      wide_[parts]; // [16][d_k]
    float *         row_;         // two rows as floats, zero past their last element

    int64_t d_k() const { return (p_.d_k + 31) / 32 * 32; }
    int64_t d_v() const { return padded(p_.d_v); }

    struct two_rows {
        __m512i part[parts]; // 16 elements of the first, then of the second
    };

    static PAGED_INLINE two_rows split(f32v first, f32v second) {
        two_rows out;
        out.part[0] = (__m512i) _mm512_cvtne2ps_pbh(second, first);
        if constexpr (parts == 2) {
            const f32v a = sub(first, widened(_mm512_castsi512_si256(out.part[0])));
            const f32v b = sub(second, widened(_mm512_extracti64x4_epi64(out.part[0], 1)));
            out.part[1]  = (__m512i) _mm512_cvtne2ps_pbh(b, a);
        }
        return out;
    }
    static PAGED_INLINE f32v widened(__m256i x) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    }

    void put_row(const float * x, uint16_t * const * out, int64_t at) const {
        for (int64_t i = 0; i < d_k(); i += 32) {
            const two_rows halves = split(load(x + i), load(x + i + 16));
            for (int part = 0; part < parts; ++part) {
                _mm512_storeu_si512(out[part] + at + i, halves.part[part]);
            }
        }
    }

    // 16 rows of dwords to columns
    void transpose_dwords(const uint16_t * rows, uint32_t * out) const {
        for (int64_t i = 0; i < d_k() / 2; i += 16) {
            f32v block[16];
            PAGED_UNROLL
            for (int r = 0; r < 16; ++r) {
                block[r] = load((const float *) (rows + r * d_k() + 2 * i));
            }
            transpose(block);
            PAGED_UNROLL
            for (int r = 0; r < 16; ++r) {
                store((float *) (out + (i + r) * tile_tokens), block[r]);
            }
        }
    }
};

} // namespace paged

#endif
