// Rounding of rows of activations to bytes, in the formats for packed weights. The bits are upstream's, but a block
// with a value that is not finite has a scale that is none either, so no result of its row looks sound.
#pragma once

#include "ggml-cpu-impl.h"
#include "packed-weights.h"
#include "quants.h"

#include <cmath>
#include <cstdint>

namespace packed {

// Whether one of 32 values is not a number.
inline bool has_nan(const float * values) {
    const __m512 a = _mm512_loadu_ps(values), b = _mm512_loadu_ps(values + 16);
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
}

inline void round_blocks(const float * from, summed_q8_0 * to, int64_t n) {
    const __m256i ones = _mm256_set1_epi8(1);
    for (int64_t i = 0; i < n; ++i) {
        block_q8_0 block;
        quantize_row_q8_0(from + i * QK8_0, &block, QK8_0);
        const __m256i bytes = _mm256_loadu_si256((const __m256i *) block.qs);
        const __m512i fours = _mm512_castsi256_si512(_mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, bytes));
        _mm256_storeu_si256((__m256i *) to[i].qs, bytes);
        to[i].minus_sum = -_mm512_mask_reduce_add_epi32(0xff, fours);
        to[i].d         = has_nan(from + i * QK8_0) ? NAN : GGML_CPU_FP16_TO_FP32(block.d);
    }
}
inline void round_blocks(const float * from, block_q8_1 * to, int64_t n) {
    quantize_row_q8_1(from, to, n * QK8_1);
    for (int64_t i = 0; i < n; ++i) {
        if (has_nan(from + i * QK8_1)) {
            to[i].d = GGML_CPU_FP32_TO_FP16(NAN);
        }
    }
}

// Returns the first of the values furthest from zero; not a number if one of the values is none.
inline float furthest(const float * values) {
    __m512i most = _mm512_setzero_si512(); // magnitudes are ordered like the integers of their bits
    for (int i = 0; i < QK_K; i += 16) {
        most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(values + i))));
    }
    const __m512i largest = _mm512_set1_epi32(_mm512_reduce_max_epi32(most));
    for (int i = 0; i < QK_K; i += 16) {
        const __m512i part = _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(values + i)));
        if (const __mmask16 there = _mm512_cmpeq_epi32_mask(part, largest)) {
            return values[i + __builtin_ctz(there)];
        }
    }
    return 0.0f; // never
}

// Rounds a block's values to `qs`, calls add(i, sum) for the sum of each 16 of them, and returns their scale.
template <class Add> float round_block(const float * from, int8_t * qs, Add add) {
    const float most  = furthest(from);
    const float scale = std::fabs(most) > 1e-36f && std::isfinite(most) ? -127.0f / most : 0.0f; // not infinite
    for (int i = 0; i < QK_K; i += 16) {
        const __m512  scaled = _mm512_mul_ps(_mm512_loadu_ps(from + i), _mm512_set1_ps(scale));
        const __m512i whole  = _mm512_cvtps_epi32(scaled); // to nearest, ties to even
        _mm_storeu_si128((__m128i *) (qs + i), _mm512_cvtsepi32_epi8(whole));
        add(i / 16, _mm512_reduce_add_epi32(whole));
    }
    return scale != 0.0f ? 1.0f / scale : most - most; // 0, or not a number
}

inline void round_blocks(const float * from, block_q8_K * to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        to[i].d = round_block(from + i * QK_K, to[i].qs,
                              [&](int at, int32_t sum) { to[i].bsums[at] = static_cast<int16_t>(sum); });
    }
}

template <int SHIFT, int GROUP> void round_blocks(const float * from, centered_q8_K<SHIFT, GROUP> * to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        for (int32_t & start : to[i].starts) {
            start = 0;
        }
        to[i].d = round_block(from + i * QK_K, to[i].qs, [&](int at, int32_t sum) {
            to[i].starts[at * 16 / GROUP] -= static_cast<int16_t>(sum) * (1 << SHIFT);
        });
    }
}

// Rounds this thread's share of `n_blocks` blocks of activations.
template <class Weights>
void round_part(const ggml_compute_params * params, const float * from, int64_t n_blocks, typename Weights::row * to) {
    const int64_t first = n_blocks * params->ith / params->nth, end = n_blocks * (params->ith + 1) / params->nth;
    round_blocks(from + first * Weights::K, to + first, end - first);
}

} // namespace packed
