// Upstream rotates rows by a Walsh-Hadamard transform before it quantizes K and V to few bits. Its passes over
// neighbours closer than the width of a vector are scalar; here they stay in a register. The bits are the same.
#pragma once

#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#    include <immintrin.h>
#endif

#if defined(__AVX512F__)

// Returns partner + x, and partner - x in the lanes `above`.
static inline __m512 velo_add_or_subtract(__m512 x, __m512 partner, __mmask16 above) {
    return _mm512_mask_sub_ps(_mm512_add_ps(partner, x), above, partner, x);
}

// Does the passes within a register. Returns the distance of the first remaining pass.
static inline int64_t velo_walsh_hadamard(float * row, int64_t n) {
    if (n < 16) {
        return 1;
    }
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = _mm512_loadu_ps(row + i);
        x        = velo_add_or_subtract(x, _mm512_permute_ps(x, 0xb1), 0xaaaa);
        x        = velo_add_or_subtract(x, _mm512_permute_ps(x, 0x4e), 0xcccc);
        x        = velo_add_or_subtract(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0);
        x        = velo_add_or_subtract(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00);
        _mm512_storeu_ps(row + i, x);
    }
    return 16;
}

#elif defined(__AVX2__)

static inline int64_t velo_walsh_hadamard(float * row, int64_t n) {
    if (n < 8) {
        return 1;
    }
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = _mm256_loadu_ps(row + i), partner = _mm256_permute_ps(x, 0xb1);
        x       = _mm256_blend_ps(_mm256_add_ps(partner, x), _mm256_sub_ps(partner, x), 0xaa);
        partner = _mm256_permute_ps(x, 0x4e);
        x       = _mm256_blend_ps(_mm256_add_ps(partner, x), _mm256_sub_ps(partner, x), 0xcc);
        partner = _mm256_permute2f128_ps(x, x, 1);
        x       = _mm256_blend_ps(_mm256_add_ps(partner, x), _mm256_sub_ps(partner, x), 0xf0);
        _mm256_storeu_ps(row + i, x);
    }
    return 8;
}

#else

static inline int64_t velo_walsh_hadamard(float *, int64_t) { return 1; }

#endif
