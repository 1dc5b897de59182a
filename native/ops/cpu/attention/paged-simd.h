// The machine's widest vector of floats, and the operations that the kernels need. Operations across lanes have a fixed
// order, so a result depends on the instruction set alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Processors with AVX-512 and without VNNI (Skylake-X) have the kernels for AVX2.
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__) &&              \
    defined(__BMI2__)
#    define PAGED_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define PAGED_AVX2
#endif

#if defined(PAGED_AVX512) || defined(PAGED_AVX2)
#    include <immintrin.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#else
#    include "ggml.h"
#endif

#if defined(__GNUC__)
#    define PAGED_INLINE inline __attribute__((always_inline))
#    define PAGED_UNROLL _Pragma("GCC unroll 16")
#else
#    define PAGED_INLINE inline
#    define PAGED_UNROLL
#endif

namespace paged {

// Always inlined: GCC drops calls of a function that only prefetches, because it has no effect.
PAGED_INLINE void prefetch_line(const char * address) {
#if defined(__GNUC__)
    __builtin_prefetch(address, 0, 2); // to the second level: a tile does not fit the first
#else
    (void) address;
#endif
}

#if defined(PAGED_AVX512)

using f32v          = __m512;
constexpr int lanes = 16;

PAGED_INLINE f32v splat(float x) { return _mm512_set1_ps(x); }
PAGED_INLINE f32v load(const float * p) { return _mm512_loadu_ps(p); }
PAGED_INLINE void store(float * p, f32v x) { _mm512_storeu_ps(p, x); }
PAGED_INLINE f32v add(f32v a, f32v b) { return _mm512_add_ps(a, b); }
PAGED_INLINE f32v sub(f32v a, f32v b) { return _mm512_sub_ps(a, b); }
PAGED_INLINE f32v mul(f32v a, f32v b) { return _mm512_mul_ps(a, b); }
PAGED_INLINE f32v div(f32v a, f32v b) { return _mm512_div_ps(a, b); }
PAGED_INLINE f32v max(f32v a, f32v b) { return _mm512_max_ps(a, b); } // b where either is NaN
PAGED_INLINE f32v fma(f32v a, f32v b, f32v c) { return _mm512_fmadd_ps(a, b, c); }

PAGED_INLINE f32v load_f16(const uint16_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
PAGED_INLINE f32v load_bf16(const uint16_t * p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// Returns lanes from <= l < to of x, and the other lanes of y.
PAGED_INLINE f32v select(f32v x, int from, int to, f32v y) {
    const uint32_t below_to   = to >= 16 ? 0xffff : to <= 0 ? 0 : (1u << to) - 1;
    const uint32_t below_from = from <= 0 ? 0 : from >= 16 ? 0xffff : (1u << from) - 1;
    return _mm512_mask_mov_ps(y, (__mmask16) (below_to & ~below_from), x);
}

PAGED_INLINE f32v iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
PAGED_INLINE f32v round_even(f32v x) { return _mm512_roundscale_ps(x, 8); }

// y * 2^n for whole n in [-126, 127]
PAGED_INLINE f32v times_power(f32v y, f32v n) {
    const __m512i e = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), e));
}
PAGED_INLINE f32v zero_below(f32v x, float limit, f32v y) { // y, 0 where x < limit
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), y);
}

// Stores the sum of each of four vectors.
PAGED_INLINE void sum_of_4(const f32v * a, float * out) {
    const f32v   x = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const f32v   y = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const f32v   z = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(z), _mm512_extractf32x8_ps(z, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}

PAGED_INLINE void transpose(f32v * r) {
    f32v u[16];
    PAGED_UNROLL
    for (int b = 0; b < 16; b += 4) {
        const __m512d a0 = _mm512_castps_pd(_mm512_unpacklo_ps(r[b], r[b + 1]));
        const __m512d a1 = _mm512_castps_pd(_mm512_unpackhi_ps(r[b], r[b + 1]));
        const __m512d a2 = _mm512_castps_pd(_mm512_unpacklo_ps(r[b + 2], r[b + 3]));
        const __m512d a3 = _mm512_castps_pd(_mm512_unpackhi_ps(r[b + 2], r[b + 3]));
        u[b]             = _mm512_castpd_ps(_mm512_unpacklo_pd(a0, a2));
        u[b + 1]         = _mm512_castpd_ps(_mm512_unpackhi_pd(a0, a2));
        u[b + 2]         = _mm512_castpd_ps(_mm512_unpacklo_pd(a1, a3));
        u[b + 3]         = _mm512_castpd_ps(_mm512_unpackhi_pd(a1, a3));
    }
    PAGED_UNROLL
    for (int c = 0; c < 4; ++c) {
        const f32v s0 = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x44);
        const f32v s1 = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xee);
        const f32v s2 = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x44);
        const f32v s3 = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xee);
        r[c]          = _mm512_shuffle_f32x4(s0, s2, 0x88);
        r[4 + c]      = _mm512_shuffle_f32x4(s0, s2, 0xdd);
        r[8 + c]      = _mm512_shuffle_f32x4(s1, s3, 0x88);
        r[12 + c]     = _mm512_shuffle_f32x4(s1, s3, 0xdd);
    }
}

#elif defined(PAGED_AVX2)

using f32v          = __m256;
constexpr int lanes = 8;

PAGED_INLINE f32v splat(float x) { return _mm256_set1_ps(x); }
PAGED_INLINE f32v load(const float * p) { return _mm256_loadu_ps(p); }
PAGED_INLINE void store(float * p, f32v x) { _mm256_storeu_ps(p, x); }
PAGED_INLINE f32v add(f32v a, f32v b) { return _mm256_add_ps(a, b); }
PAGED_INLINE f32v sub(f32v a, f32v b) { return _mm256_sub_ps(a, b); }
PAGED_INLINE f32v mul(f32v a, f32v b) { return _mm256_mul_ps(a, b); }
PAGED_INLINE f32v div(f32v a, f32v b) { return _mm256_div_ps(a, b); }
PAGED_INLINE f32v max(f32v a, f32v b) { return _mm256_max_ps(a, b); }
PAGED_INLINE f32v fma(f32v a, f32v b, f32v c) { return _mm256_fmadd_ps(a, b, c); }

PAGED_INLINE f32v load_f16(const uint16_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
PAGED_INLINE f32v load_bf16(const uint16_t * p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

PAGED_INLINE f32v select(f32v x, int from, int to, f32v y) {
    const __m256i l    = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i keep = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from), l),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32(to), l));
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(keep));
}

PAGED_INLINE f32v iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
PAGED_INLINE f32v round_even(f32v x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PAGED_INLINE f32v times_power(f32v y, f32v n) {
    const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), e));
}
PAGED_INLINE f32v zero_below(f32v x, float limit, f32v y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ), y);
}

PAGED_INLINE void sum_of_4(const f32v * a, float * out) {
    const f32v h = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}

PAGED_INLINE void transpose(f32v * r) {
    f32v u[8];
    PAGED_UNROLL
    for (int b = 0; b < 8; b += 4) {
        const f32v a0 = _mm256_unpacklo_ps(r[b], r[b + 1]), a1 = _mm256_unpackhi_ps(r[b], r[b + 1]);
        const f32v a2 = _mm256_unpacklo_ps(r[b + 2], r[b + 3]), a3 = _mm256_unpackhi_ps(r[b + 2], r[b + 3]);
        u[b]     = _mm256_shuffle_ps(a0, a2, 0x44);
        u[b + 1] = _mm256_shuffle_ps(a0, a2, 0xee);
        u[b + 2] = _mm256_shuffle_ps(a1, a3, 0x44);
        u[b + 3] = _mm256_shuffle_ps(a1, a3, 0xee);
    }
    PAGED_UNROLL
    for (int c = 0; c < 4; ++c) {
        r[c]     = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
        r[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
    }
}

#else // four lanes of the compiler's vectors: SSE2, NEON, VSX, LSX

typedef float   f32v __attribute__((vector_size(16)));
typedef int32_t i32v __attribute__((vector_size(16)));
constexpr int   lanes = 4;

PAGED_INLINE f32v splat(float x) { return f32v{x, x, x, x}; }
PAGED_INLINE f32v load(const float * p) {
    f32v x;
    memcpy(&x, p, sizeof(x));
    return x;
}
PAGED_INLINE void store(float * p, f32v x) { memcpy(p, &x, sizeof(x)); }
PAGED_INLINE f32v add(f32v a, f32v b) { return a + b; }
PAGED_INLINE f32v sub(f32v a, f32v b) { return a - b; }
PAGED_INLINE f32v mul(f32v a, f32v b) { return a * b; }
PAGED_INLINE f32v div(f32v a, f32v b) { return a / b; }
PAGED_INLINE f32v pick(i32v mask, f32v a, f32v b) { return (f32v) ((mask & (i32v) a) | (~mask & (i32v) b)); }
PAGED_INLINE f32v max(f32v a, f32v b) { return pick((i32v) (a > b), a, b); }

#    if defined(__aarch64__)
PAGED_INLINE f32v fma(f32v a, f32v b, f32v c) {
    return (f32v) vfmaq_f32((float32x4_t) c, (float32x4_t) a, (float32x4_t) b);
}
PAGED_INLINE f32v load_f16(const uint16_t * p) { return (f32v) vcvt_f32_f16(vld1_f16((const float16_t *) p)); }
#    else
PAGED_INLINE f32v fma(f32v a, f32v b, f32v c) { return a * b + c; }
PAGED_INLINE f32v load_f16(const uint16_t * p) {
    return f32v{ggml_fp16_to_fp32(p[0]), ggml_fp16_to_fp32(p[1]), ggml_fp16_to_fp32(p[2]), ggml_fp16_to_fp32(p[3])};
}
#    endif

PAGED_INLINE f32v load_bf16(const uint16_t * p) {
    return (f32v) (i32v{(int32_t) p[0], (int32_t) p[1], (int32_t) p[2], (int32_t) p[3]} << 16);
}

PAGED_INLINE f32v select(f32v x, int from, int to, f32v y) {
    const i32v l = {0, 1, 2, 3};
    return pick((i32v) (l >= from) & (i32v) (l < to), x, y);
}

PAGED_INLINE f32v iota() { return f32v{0, 1, 2, 3}; }
PAGED_INLINE f32v round_even(f32v x) { return (x + 12582912.0f) - 12582912.0f; } // |x| < 2^22
PAGED_INLINE f32v times_power(f32v y, f32v n) { return (f32v) ((i32v) y + (__builtin_convertvector(n, i32v) << 23)); }
PAGED_INLINE f32v zero_below(f32v x, float limit, f32v y) { return (f32v) (~(i32v) (x < limit) & (i32v) y); }

PAGED_INLINE void sum_of_4(const f32v * a, float * out) {
    for (int i = 0; i < 4; ++i) {
        out[i] = (a[i][0] + a[i][1]) + (a[i][2] + a[i][3]);
    }
}

PAGED_INLINE void transpose(f32v * r) {
    const f32v a = r[0], b = r[1], c = r[2], d = r[3];
    for (int i = 0; i < 4; ++i) {
        r[i] = f32v{a[i], b[i], c[i], d[i]};
    }
}

#endif

PAGED_INLINE f32v zero() { return splat(0.0f); }

// The sum and the largest of the lanes, in the same order everywhere: halves, then quarters, ...
#if defined(PAGED_AVX2)
PAGED_INLINE float sum(f32v x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two  = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
PAGED_INLINE float sum(f32v x) {
    float l[lanes];
    store(l, x);
    for (int n = lanes / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) {
            l[i] += l[i + n];
        }
    }
    return l[0];
}
#endif
PAGED_INLINE float largest(f32v x) {
    float l[lanes];
    store(l, x);
    float m = l[0];
    for (int i = 1; i < lanes; ++i) {
        m = l[i] > m ? l[i] : m;
    }
    return m;
}

// 2^x for x <= 0 to 2e-7; 0 below 2^-126, NaN stays NaN
PAGED_INLINE f32v exp2_of(f32v x) {
    const f32v bounded = max(splat(-126.0f), x);
    const f32v n = round_even(bounded), r = sub(bounded, n);
    f32v       p = splat(1.5403530e-4f);
    p            = fma(p, r, splat(1.3333558e-3f));
    p            = fma(p, r, splat(9.6181291e-3f));
    p            = fma(p, r, splat(5.5504109e-2f));
    p            = fma(p, r, splat(2.4022651e-1f));
    p            = fma(p, r, splat(6.9314718e-1f));
    p            = fma(p, r, splat(1.0f));
    return zero_below(x, -126.0f, times_power(p, n));
}

// tanh(x) to 2e-7 of 1
PAGED_INLINE f32v tanh_of(f32v x) {
    const f32v magnitude = max(x, sub(zero(), x));
    const f32v e         = exp2_of(mul(magnitude, splat(-2.885390082f))); // exp(-2|x|)
    const f32v t         = div(sub(splat(1.0f), e), add(splat(1.0f), e));
    const f32v negative  = sub(zero(), t);
    return fma(zero_below(x, 0.0f, splat(1.0f)), sub(t, negative), negative);
}

} // namespace paged
