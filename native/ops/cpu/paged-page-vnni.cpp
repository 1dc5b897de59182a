// Pages of codes, multiplied as integers: AVX-512 with VNNI, and with VBMI where present.
//
// Keys: the codes of 16 tokens are transposed until each token has a lane, and the dwords of a query are broadcast to
// them, so no sum ever crosses lanes. Values: a weight times its token's scale becomes an integer of 16 bits,
// relative to the tile's largest; the codes of 4 tokens are interleaved and multiplied by the two bytes of their
// weights. Sums of products are exact; floats come in once for each group of 32 elements.
//
// Two Sapphire Rapids cores, 16/8 heads of 128, one sequence at 4096: q8_0 23 GB/s and q4_0 20 where the memory gives
// 35; where it gives 24, q8_0 20, q4_0 17, iq4_nl 16, q4_1 16, q5_0 15, q5_1 14. Two Cascade Lake cores, without VBMI:
// q8_0 14.2 and q4_0 11.2 where f16 is read at 14.5.
#include "paged-page.h"

#include "paged-codes-vnni.h"

#if defined(PAGED_CODES_VNNI)

namespace paged {

namespace {

using namespace vnni;

// ---- keys ----

template <class C, int rows>
PAGED_INLINE void score_rows(const kv_rows & k, const query_rows & q, int64_t d, float * s, read_ahead & ahead) {
    const int          n_groups = (int) (d / group);
    const row_strides  at(k.stride);
    alignas(64) halves scale, least;
    scale_picker<C::bytes, 0>::all(k.first, at, n_groups, scale);
    if constexpr (C::has_min) {
        scale_picker<C::bytes, 1>::all(k.first, at, n_groups, least);
    }
    for (int half = 0; half < tile_tokens; half += 16) {
        __m512 score[rows];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            score[r] = _mm512_setzero_ps();
        }
        for (int j = 0; j < n_groups; ++j) {
            __m512i w[8];
            C::keys(k.first + half * k.stride + j * C::bytes, at, w);
            ahead.step();
            const __m512 dk = floats_of(scale[j] + half);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const int32_t * codes = (const int32_t *) (q.codes + r * d + j * group);
                const int32_t   sum   = q.sum[r * n_groups + j];
                const float     dq    = q.scale[r * n_groups + j];
                __m512i         dot = _mm512_set1_epi32(-C::key_offset * sum), more = _mm512_setzero_si512();
                PAGED_UNROLL
                for (int i = 0; i < 4; ++i) { // two chains: each product waits for the one before
                    dot  = _mm512_dpbusd_epi32(dot, w[i], _mm512_set1_epi32(codes[i]));
                    more = _mm512_dpbusd_epi32(more, w[4 + i], _mm512_set1_epi32(codes[4 + i]));
                }
                dot      = _mm512_add_epi32(dot, more);
                score[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(dk, _mm512_set1_ps(dq)), score[r]);
                if constexpr (C::has_min) {
                    score[r] = _mm512_fmadd_ps(floats_of(least[j] + half), _mm512_set1_ps(dq * (float) sum), score[r]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            _mm512_storeu_ps(s + r * score_stride + half, score[r]);
        }
    }
}

// ---- values ----

// The weights of a tile times its scales, as integers: for each group and row, 32 low bytes and 32 high ones.
template <int rows> struct integer_weights {
    alignas(64) int32_t bytes[most_groups][rows][16];
    float unit[most_groups][rows];  // what 1 stands for
    float least[most_groups][rows]; // sum of weights times minima
    // what the sums of low bytes begin with, or of high ones: what the offset of the codes adds is taken off
    alignas(32) int32_t begin[(most_groups * rows + 7) / 8 * 8];
};

// The words of 32 tokens, 4 of each half in a quarter as packs leaves them, to low bytes in order and then high ones.
PAGED_INLINE __m512i split_bytes(__m512i words) {
    const __m512i dwords = _mm512_shuffle_epi8(
        words, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), dwords);
}

// The sums of the lanes of 8 vectors.
PAGED_INLINE __m256i sums_of_8(const __m512i * x) {
    __m512i a[4], b[2];
    PAGED_UNROLL
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                                _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    }
    PAGED_UNROLL
    for (int i = 0; i < 2; ++i) {
        b[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]),
                                _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    }
    const __m512i c = _mm512_add_epi32(_mm512_shuffle_i64x2(b[0], b[1], 0x88), _mm512_shuffle_i64x2(b[0], b[1], 0xdd));
    const __m512i d = _mm512_add_epi32(c, _mm512_shuffle_i64x2(c, c, 0xb1)); // quarters 0 and 2 hold both halves
    return _mm256_inserti128_si256(_mm512_castsi512_si256(d), _mm512_extracti32x4_epi32(d, 2), 1);
}

// The largest |scale| of a tile; infinity or NaN where there is one, which then reaches the result.
PAGED_INLINE float largest_scale(const uint16_t * scale) {
    const __m512i magnitude = _mm512_and_si512(_mm512_load_si512(scale), _mm512_set1_epi16(0x7fff));
    const __m256i a = _mm256_max_epu16(_mm512_castsi512_si256(magnitude), _mm512_extracti64x4_epi64(magnitude, 1));
    const __m128i b = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    // the least of the complements is the one horizontal minimum there is
    const __m128i c = _mm_minpos_epu16(_mm_xor_si128(b, _mm_set1_epi16(-1)));
    return _cvtsh_ss((uint16_t) ~_mm_extract_epi16(c, 0));
}

template <class C, int rows>
PAGED_INLINE void make_weights(const halves & scale, const halves & least, int n_groups, const float * w,
                               int64_t w_stride, integer_weights<rows> & out) {
    constexpr float     most = C::signed_scale ? 32767.0f : 65535.0f;
    constexpr float     tiny = 1e-30f;
    __m512              first[rows], second[rows];
    float               top[rows];
    alignas(64) __m512i totals[C::signed_scale ? (most_groups * rows + 7) / 8 * 8 : 1];
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        const __m512 a = _mm512_loadu_ps(w + r * w_stride), b = _mm512_loadu_ps(w + r * w_stride + 16);
        top[r]           = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
        const __m512 all = _mm512_set1_ps(most / (top[r] > tiny ? top[r] : tiny));
        first[r]         = _mm512_mul_ps(a, all);
        second[r]        = _mm512_mul_ps(b, all);
    }
    for (int j = 0; j < n_groups; ++j) {
        const float  largest = largest_scale(scale[j]);
        const __m512 inverse = _mm512_set1_ps(1.0f / (largest == 0.0f ? 1.0f : largest));
        const __m512 d0      = _mm512_mul_ps(floats_of(scale[j]), inverse);
        const __m512 d1      = _mm512_mul_ps(floats_of(scale[j] + 16), inverse);
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            const __m512i a     = _mm512_cvtps_epi32(_mm512_mul_ps(d0, first[r]));
            const __m512i b     = _mm512_cvtps_epi32(_mm512_mul_ps(d1, second[r]));
            const __m512i words = C::signed_scale ? _mm512_packs_epi32(a, b) : _mm512_packus_epi32(a, b);
            _mm512_store_si512(out.bytes[j][r], split_bytes(words));
            out.unit[j][r] = largest * (top[r] * (1.0f / most));
            if constexpr (C::signed_scale && !C::wide_values) {
                totals[j * rows + r] = _mm512_add_epi32(a, b);
            } else if constexpr (C::signed_scale) { // only the high bytes meet codes with an offset
                totals[j * rows + r] = _mm512_add_epi32(_mm512_srai_epi32(a, 8), _mm512_srai_epi32(b, 8));
            }
            if constexpr (C::has_min) {
                const __m512 m =
                    _mm512_fmadd_ps(floats_of(least[j] + 16), second[r], _mm512_mul_ps(floats_of(least[j]), first[r]));
                out.least[j][r] = sum(m) * (top[r] * (1.0f / most));
            }
        }
    }
    if constexpr (C::signed_scale) {
        constexpr int offset = C::wide_values ? 128 : C::value_offset;
        const int     n      = n_groups * rows;
        std::fill(totals + n, totals + (n + 7) / 8 * 8, _mm512_setzero_si512());
        for (int i = 0; i < n; i += 8) {
            const __m256i begin = _mm256_mullo_epi32(sums_of_8(totals + i), _mm256_set1_epi32(-offset));
            _mm256_store_si256((__m256i *) (out.begin + i), begin);
        }
    }
}

template <class C, int rows>
PAGED_INLINE void add_rows(const kv_rows & v, const float * w, int64_t w_stride, int64_t d, float * sum,
                           read_ahead & ahead) {
    const int          n_groups = (int) (d / group);
    const row_strides  at(v.stride);
    alignas(64) halves scale, least;
    scale_picker<C::bytes, 0>::all(v.first, at, n_groups, scale);
    if constexpr (C::has_min) {
        scale_picker<C::bytes, 1>::all(v.first, at, n_groups, least);
    }
    integer_weights<rows> weights; // all of them first: no product waits for its weight
    make_weights<C, rows>(scale, least, n_groups, w, w_stride, weights);
    for (int j = 0; j < n_groups; ++j) {
        __m512i low[rows][2], high[rows][2];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            const __m512i begin =
                C::signed_scale ? _mm512_set1_epi32(weights.begin[j * rows + r]) : _mm512_setzero_si512();
            low[r][0] = low[r][1] = C::wide_values ? _mm512_setzero_si512() : begin;
            high[r][0] = high[r][1] = C::wide_values ? begin : _mm512_setzero_si512();
        }
        PAGED_UNROLL
        for (int c = 0; c < 8; ++c) {
            if (c % 4 == 0) {
                ahead.step();
            }
            __m512i x[2];
            C::values(v.first + 4 * c * v.stride + j * C::bytes, at, x);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const __m512i wl = _mm512_set1_epi32(weights.bytes[j][r][c]);
                const __m512i wh = _mm512_set1_epi32(weights.bytes[j][r][8 + c]);
                PAGED_UNROLL
                for (int i = 0; i < 2; ++i) {
                    low[r][i] = _mm512_dpbusd_epi32(low[r][i], wl, x[i]);
                    if constexpr (!C::signed_scale) {
                        high[r][i] = _mm512_dpbusd_epi32(high[r][i], wh, x[i]);
                    } else if constexpr (!C::wide_values) {
                        high[r][i] = _mm512_dpbusd_epi32(high[r][i], x[i], wh);
                    } else {
                        const __m512i positive = _mm512_xor_si512(x[i], _mm512_set1_epi8((char) 0x80));
                        high[r][i]             = _mm512_dpbusd_epi32(high[r][i], positive, wh);
                    }
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int i = 0; i < 2; ++i) {
                float *       to    = sum + r * d + j * group + i * 16;
                const __m512i exact = _mm512_add_epi32(low[r][i], _mm512_slli_epi32(high[r][i], 8));
                __m512        all   = _mm512_loadu_ps(to);
                if constexpr (C::has_min) {
                    all = _mm512_add_ps(all, _mm512_set1_ps(weights.least[j][r]));
                }
                all = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(weights.unit[j][r]), all);
                _mm512_storeu_ps(to, all);
            }
        }
    }
}

// ---- any number of rows ----

template <class C>
void score_group(const kv_rows & k, const query_rows & q, int64_t rows, int64_t d, float * s, read_ahead & ahead) {
    in_groups<8>(k, rows, [&](const kv_rows & head, int64_t r, auto n) {
        score_rows<C, n>(head, from_row(q, r, d), d, s + r * score_stride, ahead);
    });
}

template <class C>
void add_group(const kv_rows & v, const float * w, int64_t w_stride, int64_t rows, int64_t d, float * sum,
               read_ahead & ahead) {
    in_groups<4>(v, rows, [&](const kv_rows & head, int64_t r, auto n) {
        add_rows<C, n>(head, w + r * w_stride, w_stride, d, sum + r * d, ahead);
    });
}

int64_t score_steps(int64_t rows, int64_t d) { return d / group * 2 * (rows <= 4 ? 1 : (rows + 7) / 8); }
int64_t add_steps(int64_t rows, int64_t d) { return d / group * 2 * ((rows + 3) / 4); }

template <class C> page_kernel kernel_of() {
    return {page_form::whole, score_group<C>, add_group<C>, score_steps, add_steps};
}

} // namespace

void quantize_query(const float * x, int64_t d, int8_t * codes, float * scale, int32_t * sum) {
    for (int64_t j = 0; j < d / group; ++j) {
        const __m512  a = _mm512_loadu_ps(x + j * group), b = _mm512_loadu_ps(x + j * group + 16);
        const float   top     = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        const __m512  inverse = _mm512_set1_ps(top > 0.0f ? 127.0f / top : 0.0f);
        const __m512i m       = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)),
                      n       = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        _mm_storeu_si128((__m128i *) (codes + j * group), _mm512_cvtsepi32_epi8(m));
        _mm_storeu_si128((__m128i *) (codes + j * group + 16), _mm512_cvtsepi32_epi8(n));
        scale[j] = top / 127.0f;
        sum[j]   = _mm512_reduce_add_epi32(_mm512_add_epi32(m, n));
    }
}

code_kernels kernels_of_codes() {
    return {kernel_of<q8_0_codes>(), kernel_of<q5_1_codes>(), kernel_of<q5_0_codes>(),
            kernel_of<q4_1_codes>(), kernel_of<q4_0_codes>(), kernel_of<iq4_nl_codes>()};
}

} // namespace paged

#endif
