// Softmax weights of a tile times the scales of its values, as integers for the dot products of AVX-512 VNNI.
#pragma once

#include "paged-codes-vnni.h"

#if defined(PAGED_CODES_VNNI)

namespace paged {

namespace vnni {

// Softmax weights of a tile times its scales, as integers of 16 bits: for each group and row, 16 pairs of words in the
// order of pair_at(), or 32 low bytes and 32 high bytes, all signed.
template <int rows> struct integer_weights {
    alignas(64) int32_t x[most_groups][rows][16];
    alignas(16) float unit[rows][most_groups + 1]; // the weight of 1
    float least[most_groups][rows];                // sum of weights times minima
    // start of the sums of products with low bytes: minus what the offset of the codes adds
    alignas(32) int32_t begin[(most_groups * rows + 7) / 8 * 8];
};

constexpr int pair_at(int pair) { return pair / 2 % 4 * 4 + pair / 8 * 2 + pair % 2; } // as packs leaves them

// Splits the words of 32 tokens, of which each quarter has 4 of each half as packs leaves them, into low bytes in order
// and then high bytes.
PAGED_INLINE __m512i split_bytes(__m512i words) {
    const __m512i next =
        _mm512_add_epi16(words, _mm512_set1_epi16(128)); // low bytes are signed, so high bytes are rounded
    const __m512i bytes  = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, words, next);
    const __m512i dwords = _mm512_shuffle_epi8(
        bytes, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), dwords);
}

// Returns the sum of the lanes of each of 8 vectors.
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

// Returns the largest |scale| of each of four groups. Infinity and NaN stay, and reach the result.
PAGED_INLINE __m128 largest_scales(const uint16_t (*scale)[tile_tokens]) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i       x[4], y[2];
    PAGED_UNROLL
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_and_si512(_mm512_load_si512(scale[i]), magnitude);
    }
    PAGED_UNROLL
    for (int i = 0; i < 2; ++i) { // words of two groups in turns
        y[i] = _mm512_max_epu16(_mm512_unpacklo_epi16(x[2 * i], x[2 * i + 1]),
                                _mm512_unpackhi_epi16(x[2 * i], x[2 * i + 1]));
    }
    const __m512i z = _mm512_max_epu16(_mm512_unpacklo_epi32(y[0], y[1]), _mm512_unpackhi_epi32(y[0], y[1]));
    const __m256i a = _mm256_max_epu16(_mm512_castsi512_si256(z), _mm512_extracti64x4_epi64(z, 1));
    const __m128i b = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return _mm_cvtph_ps(_mm_max_epu16(b, _mm_unpackhi_epi64(b, b)));
}

template <class C, int rows>
PAGED_INLINE void make_weights(const halves & scale, const halves & least, int n_groups, const float * w,
                               int64_t w_stride, integer_weights<rows> & out) {
    constexpr float     most = C::value_words ? 32767.0f : 32639.0f; // with both bytes 127
    constexpr float     tiny = 1e-30f;
    __m512              first[rows], second[rows];
    float               top[rows];
    alignas(64) __m512i totals[C::value_offset ? (most_groups * rows + 7) / 8 * 8 : 1];
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        const __m512 a = _mm512_loadu_ps(w + r * w_stride), b = _mm512_loadu_ps(w + r * w_stride + 16);
        top[r]           = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
        const __m512 all = _mm512_set1_ps(most / (top[r] > tiny ? top[r] : tiny));
        first[r]         = _mm512_mul_ps(a, all);
        second[r]        = _mm512_mul_ps(b, all);
    }
    for (int begin = 0; begin < n_groups; begin += 4) {
        const __m128      largest = largest_scales(scale + begin);
        const __mmask8    none    = _mm_cmp_ps_mask(largest, _mm_setzero_ps(), _CMP_EQ_OQ);
        const __m128      one     = _mm_set1_ps(1.0f);
        alignas(16) float inverse[4];
        _mm_store_ps(inverse, _mm_div_ps(one, _mm_mask_mov_ps(largest, none, one)));
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            _mm_storeu_ps(out.unit[r] + begin, _mm_mul_ps(largest, _mm_set1_ps(top[r] * (1.0f / most))));
        }
        for (int j = begin; j < std::min(begin + 4, n_groups); ++j) {
            const __m512 d0 = _mm512_mul_ps(floats_of(scale[j]), _mm512_set1_ps(inverse[j - begin]));
            const __m512 d1 = _mm512_mul_ps(floats_of(scale[j] + 16), _mm512_set1_ps(inverse[j - begin]));
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const __m512i a     = _mm512_cvtps_epi32(_mm512_mul_ps(d0, first[r]));
                const __m512i b     = _mm512_cvtps_epi32(_mm512_mul_ps(d1, second[r]));
                const __m512i words = _mm512_packs_epi32(a, b);
                _mm512_store_si512(out.x[j][r], C::value_words ? words : split_bytes(words));
                if constexpr (C::value_offset != 0) {
                    totals[j * rows + r] = _mm512_add_epi32(a, b);
                }
                if constexpr (C::has_min) {
                    const __m512 m = _mm512_mul_ps(floats_of(least[j]), first[r]);
                    out.least[j][r] =
                        sum(_mm512_fmadd_ps(floats_of(least[j] + 16), second[r], m)) * (top[r] * (1.0f / most));
                }
            }
        }
    }
    if constexpr (C::value_offset != 0) {
        const int n = n_groups * rows;
        std::fill(totals + n, totals + (n + 7) / 8 * 8, _mm512_setzero_si512());
        for (int i = 0; i < n; i += 8) {
            const __m256i offset = _mm256_set1_epi32(-C::value_offset);
            _mm256_store_si256((__m256i *) (out.begin + i), _mm256_mullo_epi32(sums_of_8(totals + i), offset));
        }
    }
}

} // namespace vnni

} // namespace paged

#endif
