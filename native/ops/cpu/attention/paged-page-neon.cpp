// Pages of codes on NEON: keys are multiplied as integers, 4 tokens in lanes, with the processor's dot product of bytes
// where it has one; values become floats, their scales multiplied into the weights. Checked under emulation; its rate
// was not measured.
#include "paged-page.h"

#if defined(PAGED_CODES_NEON)

#    include <arm_neon.h>

namespace paged {

namespace {

constexpr int group       = code_group;
constexpr int most_groups = most_code_groups;

// The codes of one token's group: elements 0 to 15, and 16 to 31.
struct codes32 {
    int8x16_t half[2];
};

// ---- the types ----

// Each has: the bytes of a group; whether an offset follows the scale; codes() of one token, signed.

struct q8_0_codes {
    static constexpr int  bytes   = 34;
    static constexpr bool has_min = false;

    static PAGED_INLINE codes32 codes(const char * p) {
        return {{vld1q_s8((const int8_t *) p + 2), vld1q_s8((const int8_t *) p + 18)}};
    }
};

// Byte i of the codes holds element i in its low nibble and element i + 16 in its high one.
template <int first_code> PAGED_INLINE codes32 nibbles(const char * p) {
    const uint8x16_t both = vld1q_u8((const uint8_t *) p + first_code);
    return {{vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(both, 4))}};
}

PAGED_INLINE codes32 minus(codes32 x, int8_t n) {
    return {{vsubq_s8(x.half[0], vdupq_n_s8(n)), vsubq_s8(x.half[1], vdupq_n_s8(n))}};
}

// 16 for each of 16 bits that is set
PAGED_INLINE int8x16_t sixteens(const char * bits) {
    const uint8x16_t own = vcombine_u8(vdup_n_u8((uint8_t) bits[0]), vdup_n_u8((uint8_t) bits[1]));
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    return vreinterpretq_s8_u8(vandq_u8(vtstq_u8(own, bit), vdupq_n_u8(16)));
}

// The same with a fifth bit for each element, in 4 bytes before the codes.
template <int first_code> PAGED_INLINE codes32 fifths(const char * p) {
    const codes32 x = nibbles<first_code>(p);
    return {{vorrq_s8(x.half[0], sixteens(p + first_code - 4)), vorrq_s8(x.half[1], sixteens(p + first_code - 2))}};
}

struct q4_0_codes {
    static constexpr int        bytes   = 18;
    static constexpr bool       has_min = false;
    static PAGED_INLINE codes32 codes(const char * p) { return minus(nibbles<2>(p), 8); }
};
struct q4_1_codes {
    static constexpr int        bytes   = 20;
    static constexpr bool       has_min = true;
    static PAGED_INLINE codes32 codes(const char * p) { return nibbles<4>(p); }
};
struct q5_0_codes {
    static constexpr int        bytes   = 22;
    static constexpr bool       has_min = false;
    static PAGED_INLINE codes32 codes(const char * p) { return minus(fifths<6>(p), 16); }
};
struct q5_1_codes {
    static constexpr int        bytes   = 24;
    static constexpr bool       has_min = true;
    static PAGED_INLINE codes32 codes(const char * p) { return fifths<8>(p); }
};
struct iq4_nl_codes {
    static constexpr int  bytes   = 18;
    static constexpr bool has_min = false;

    static PAGED_INLINE codes32 codes(const char * p) {
        static const int8_t numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        const int8x16_t     table       = vld1q_s8(numbers);
        const codes32       x           = nibbles<2>(p);
        return {{vqtbl1q_s8(table, vreinterpretq_u8_s8(x.half[0])), vqtbl1q_s8(table, vreinterpretq_u8_s8(x.half[1]))}};
    }
};

// ---- scales ----

using floats = float[most_groups][tile_tokens];

// one half of each group of 32 tokens, `at` bytes into it
void load_halves(const char * p, size_t stride, int bytes, int at, int n_groups, floats out) {
    for (int j = 0; j < n_groups; ++j) {
        for (int t = 0; t < tile_tokens; t += 4) {
            const char * from = p + t * stride + j * bytes + at;
            uint16_t     h[4];
            for (int i = 0; i < 4; ++i) {
                memcpy(h + i, from + i * stride, 2);
            }
            vst1q_f32(out[j] + t, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h))));
        }
    }
}

// ---- keys ----

// lanes of sum + products of 4 bytes
PAGED_INLINE int32x4_t dot_bytes(int32x4_t sum, int8x16_t a, int8x16_t b) {
#    if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, a, b);
#    else
    const int32x4_t low  = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(a), vget_high_s8(b)));
    return vaddq_s32(sum, vpaddq_s32(low, high));
#    endif
}

// 4x4 dwords
PAGED_INLINE void transpose_dwords(const int8x16_t * x, int8x16_t * out) {
    const int32x4_t a = vreinterpretq_s32_s8(x[0]), b = vreinterpretq_s32_s8(x[1]);
    const int32x4_t c = vreinterpretq_s32_s8(x[2]), d = vreinterpretq_s32_s8(x[3]);
    const int64x2_t e = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), f = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
    const int64x2_t g = vreinterpretq_s64_s32(vtrn1q_s32(c, d)), h = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
    out[0] = vreinterpretq_s8_s64(vtrn1q_s64(e, g));
    out[1] = vreinterpretq_s8_s64(vtrn1q_s64(f, h));
    out[2] = vreinterpretq_s8_s64(vtrn2q_s64(e, g));
    out[3] = vreinterpretq_s8_s64(vtrn2q_s64(f, h));
}

PAGED_INLINE int8x16_t query_codes(const int8_t * q, int i) {
    int32_t dword;
    memcpy(&dword, q + 4 * i, sizeof(dword));
    return vreinterpretq_s8_s32(vdupq_n_s32(dword));
}

template <class C, int rows>
PAGED_INLINE void score_rows(const kv_rows & k, const query_rows & q, int64_t d, float * s, read_ahead & ahead) {
    const int n_groups = (int) (d / group);
    floats    scale, least;
    load_halves(k.first, k.stride, C::bytes, 0, n_groups, scale);
    if constexpr (C::has_min) {
        load_halves(k.first, k.stride, C::bytes, 2, n_groups, least);
    }
    for (int t = 0; t < tile_tokens; t += 4) {
        float32x4_t score[rows];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            score[r] = vdupq_n_f32(0.0f);
        }
        for (int j = 0; j < n_groups; ++j) {
            int8x16_t x[2][4], w[8]; // w[i] has bytes 4i.. of each token in a lane
            ahead.step();
            PAGED_UNROLL
            for (int i = 0; i < 4; ++i) {
                const codes32 codes = C::codes(k.first + (t + i) * k.stride + j * C::bytes);
                x[0][i]             = codes.half[0];
                x[1][i]             = codes.half[1];
            }
            transpose_dwords(x[0], w);
            transpose_dwords(x[1], w + 4);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const int8_t * codes = q.codes + r * d + j * group;
                const float    dq    = q.scale[r * n_groups + j];
                int32x4_t      exact = vdupq_n_s32(0);
                PAGED_UNROLL
                for (int i = 0; i < 8; ++i) {
                    exact = dot_bytes(exact, w[i], query_codes(codes, i));
                }
                score[r] = vfmaq_f32(score[r], vcvtq_f32_s32(exact), vmulq_n_f32(vld1q_f32(scale[j] + t), dq));
                if constexpr (C::has_min) {
                    const float all = dq * (float) q.sum[r * n_groups + j];
                    score[r]        = vfmaq_n_f32(score[r], vld1q_f32(least[j] + t), all);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            vst1q_f32(s + r * score_stride + t, score[r]);
        }
    }
}

// ---- values ----

PAGED_INLINE void floats_of(int8x16_t x, float32x4_t * out) {
    const int16x8_t a = vmovl_s8(vget_low_s8(x)), b = vmovl_s8(vget_high_s8(x));
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(a)));
    out[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(a)));
    out[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(b)));
    out[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(b)));
}

template <class C, int rows>
PAGED_INLINE void add_rows(const kv_rows & v, const float * w, int64_t w_stride, int64_t d, float * sum,
                           read_ahead & ahead) {
    const int n_groups = (int) (d / group);
    floats    scale, least;
    load_halves(v.first, v.stride, C::bytes, 0, n_groups, scale);
    if constexpr (C::has_min) {
        load_halves(v.first, v.stride, C::bytes, 2, n_groups, least);
    }
    for (int j = 0; j < n_groups; ++j) {
        float       weight[rows][tile_tokens]; // times the scale
        float32x4_t a[rows][8];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            float32x4_t minima = vdupq_n_f32(0.0f);
            for (int t = 0; t < tile_tokens; t += 4) {
                const float32x4_t x = vld1q_f32(w + r * w_stride + t);
                vst1q_f32(weight[r] + t, vmulq_f32(x, vld1q_f32(scale[j] + t)));
                if constexpr (C::has_min) {
                    minima = vfmaq_f32(minima, x, vld1q_f32(least[j] + t));
                }
            }
            const float32x4_t all = C::has_min ? vdupq_n_f32(vaddvq_f32(minima)) : minima;
            PAGED_UNROLL
            for (int c = 0; c < 8; ++c) {
                a[r][c] = vaddq_f32(vld1q_f32(sum + r * d + j * group + c * 4), all);
            }
        }
        for (int t = 0; t < tile_tokens; ++t) {
            if (t % 16 == 0) {
                ahead.step();
            }
            const codes32 codes = C::codes(v.first + t * v.stride + j * C::bytes);
            float32x4_t   x[8];
            floats_of(codes.half[0], x);
            floats_of(codes.half[1], x + 4);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                PAGED_UNROLL
                for (int c = 0; c < 8; ++c) {
                    a[r][c] = vfmaq_n_f32(a[r][c], x[c], weight[r][t]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int c = 0; c < 8; ++c) {
                vst1q_f32(sum + r * d + j * group + c * 4, a[r][c]);
            }
        }
    }
}

// ---- any number of rows ----

template <class C>
void score_group(const kv_rows & k, const query_rows & q, int64_t rows, int64_t d, float * s, read_ahead & ahead) {
    in_groups<4>(k, rows, [&](const kv_rows & head, int64_t r, auto n) {
        score_rows<C, n>(head, from_row(q, r, d), d, s + r * score_stride, ahead);
    });
}

template <class C>
void add_group(const kv_rows & v, const float * w, int64_t w_stride, int64_t rows, int64_t d, float * sum,
               read_ahead & ahead) {
    in_groups<2>(v, rows, [&](const kv_rows & head, int64_t r, auto n) { // 16 sums at a time, of 32 registers
        add_rows<C, n>(head, w + r * w_stride, w_stride, d, sum + r * d, ahead);
    });
}

int64_t score_steps(int64_t rows, int64_t d) { return d / group * 8 * ((rows + 3) / 4); }
int64_t add_steps(int64_t rows, int64_t d) { return d / group * 2 * ((rows + 1) / 2); }

template <class C> page_kernel kernel_of() {
    return {page_form::whole, score_group<C>, add_group<C>, score_steps, add_steps};
}

} // namespace

code_kernels kernels_of_codes() {
    return {kernel_of<q8_0_codes>(), kernel_of<q5_1_codes>(), kernel_of<q5_0_codes>(),
            kernel_of<q4_1_codes>(), kernel_of<q4_0_codes>(), kernel_of<iq4_nl_codes>()};
}

} // namespace paged

#endif
