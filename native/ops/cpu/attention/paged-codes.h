// The codes of half a quantization group: sixteen small integers, and the floats that they stand for.
#pragma once

#include "paged-simd.h"

namespace paged {

#if defined(PAGED_AVX512) || defined(PAGED_AVX2)

using codes16 = __m128i;

PAGED_INLINE codes16 load_codes(const void * p) { return _mm_loadu_si128((const __m128i *) p); }
PAGED_INLINE codes16 low_nibbles(codes16 x) { return _mm_and_si128(x, _mm_set1_epi8(15)); }
PAGED_INLINE codes16 high_nibbles(codes16 x) { return low_nibbles(_mm_srli_epi16(x, 4)); }
PAGED_INLINE codes16 minus(codes16 x, int n) { return _mm_sub_epi8(x, _mm_set1_epi8((char) n)); }
PAGED_INLINE codes16 with_fifth_bits(codes16 x, uint32_t bits) { // bit i of the low 16 belongs to code i
#    if defined(PAGED_AVX512)
    return _mm_or_si128(x, _mm_maskz_set1_epi8((__mmask16) bits, 16));
#    else
    const __m128i pick = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i bit  = _mm_set1_epi64x((int64_t) 0x8040201008040201);
    const __m128i own  = _mm_and_si128(_mm_shuffle_epi8(_mm_set1_epi16((short) bits), pick), bit);
    return _mm_or_si128(x, _mm_and_si128(_mm_cmpeq_epi8(own, bit), _mm_set1_epi8(16)));
#    endif
}
PAGED_INLINE codes16 looked_up(codes16 x, const int8_t * table) { return _mm_shuffle_epi8(load_codes(table), x); }

// 16 floats d*code + m
PAGED_INLINE void put(float * out, codes16 x, float d, float m) {
#    if defined(PAGED_AVX512)
    store(out, fma(splat(d), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)), splat(m)));
#    else
    store(out, fma(splat(d), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), splat(m)));
    store(out + 8, fma(splat(d), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))), splat(m)));
#    endif
}

#else // fixed loops, left to the compiler

struct codes16 {
    int8_t x[16];
};

template <class F> PAGED_INLINE codes16 each(codes16 c, F f) {
    for (int i = 0; i < 16; ++i) {
        c.x[i] = (int8_t) f(c.x[i], i);
    }
    return c;
}

PAGED_INLINE codes16 load_codes(const void * p) {
    codes16 c;
    memcpy(c.x, p, sizeof(c.x));
    return c;
}
PAGED_INLINE codes16 low_nibbles(codes16 c) {
    return each(c, [](int x, int) { return x & 15; });
}
PAGED_INLINE codes16 high_nibbles(codes16 c) {
    return each(c, [](int x, int) { return x >> 4 & 15; });
}
PAGED_INLINE codes16 minus(codes16 c, int n) {
    return each(c, [=](int x, int) { return x - n; });
}
PAGED_INLINE codes16 with_fifth_bits(codes16 c, uint32_t bits) {
    return each(c, [=](int x, int i) { return x | int(bits >> i & 1) << 4; });
}
PAGED_INLINE codes16 looked_up(codes16 c, const int8_t * table) {
    return each(c, [=](int x, int) { return table[x]; });
}
PAGED_INLINE void put(float * out, codes16 c, float d, float m) {
    for (int i = 0; i < 16; ++i) {
        out[i] = d * c.x[i] + m;
    }
}

#endif

} // namespace paged
