// Pages of codes on NEON: 4 tokens in lanes; dot products of bytes by SDOT if the build has it. Checked under emulation
// (scripts/check/arm.py); its speed was not measured.
#include "iq4-values.h"
#include "paged-page-codes.h"

#if defined(PAGED_CODES_NEON)

#    include <arm_neon.h>

namespace paged {

namespace {

struct neon {
    using ints = int8x16_t;
    struct codes {
        int8x16_t half[2]; // elements 0 to 15, and 16 to 31
    };

    static PAGED_INLINE int8x16_t load_16(const char * p) { return vld1q_s8((const int8_t *) p); }

    static PAGED_INLINE void transpose(const char * p, size_t stride, ints * out) {
        const int32x4_t a = vreinterpretq_s32_s8(load_16(p)), b = vreinterpretq_s32_s8(load_16(p + stride));
        const int32x4_t c = vreinterpretq_s32_s8(load_16(p + 2 * stride));
        const int32x4_t d = vreinterpretq_s32_s8(load_16(p + 3 * stride));
        const int64x2_t e = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), f = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
        const int64x2_t g = vreinterpretq_s64_s32(vtrn1q_s32(c, d)), h = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
        out[0] = vreinterpretq_s8_s64(vtrn1q_s64(e, g));
        out[1] = vreinterpretq_s8_s64(vtrn1q_s64(f, h));
        out[2] = vreinterpretq_s8_s64(vtrn2q_s64(e, g));
        out[3] = vreinterpretq_s8_s64(vtrn2q_s64(f, h));
    }

    static PAGED_INLINE ints low(ints x) { return vandq_s8(x, vdupq_n_s8(15)); }
    static PAGED_INLINE ints high(ints x) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4)); }
    static PAGED_INLINE ints iq4_values(ints x) {
        static const int8_t values[16] = {VELO_IQ4_VALUES};
        return vqtbl1q_s8(vld1q_s8(values), vreinterpretq_u8_s8(x));
    }
    static PAGED_INLINE codes iq4_values(codes x) { return {{iq4_values(x.half[0]), iq4_values(x.half[1])}}; }

    static PAGED_INLINE codes load(const char * p) { return {{load_16(p), load_16(p + 16)}}; }
    static PAGED_INLINE codes nibbles(const char * p) { return {{low(load_16(p)), high(load_16(p))}}; }
    // 16 in each byte whose bit is set
    static PAGED_INLINE int8x16_t sixteens(const char * bits) {
        const uint8x16_t own = vcombine_u8(vdup_n_u8((uint8_t) bits[0]), vdup_n_u8((uint8_t) bits[1]));
        const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
        return vreinterpretq_s8_u8(vandq_u8(vtstq_u8(own, bit), vdupq_n_u8(16)));
    }
    static PAGED_INLINE codes with_fifth_bits(codes x, const char * bits) {
        return {{vorrq_s8(x.half[0], sixteens(bits)), vorrq_s8(x.half[1], sixteens(bits + 2))}};
    }
    static PAGED_INLINE codes minus(codes x, int n) {
        return {{vsubq_s8(x.half[0], vdupq_n_s8((int8_t) n)), vsubq_s8(x.half[1], vdupq_n_s8((int8_t) n))}};
    }
    static PAGED_INLINE void store(char * p, codes x) {
        vst1q_s8((int8_t *) p, x.half[0]);
        vst1q_s8((int8_t *) p + 16, x.half[1]);
    }

    static constexpr int     raise = 0;
    static PAGED_INLINE ints raised(ints x) { return x; }

    // lanes of sum + products of 4 bytes
    static PAGED_INLINE int32x4_t dot_bytes(int32x4_t sum, int8x16_t a, int8x16_t b) {
#    if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32(sum, a, b);
#    else
        const int32x4_t low  = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
        const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(a), vget_high_s8(b)));
        return vaddq_s32(sum, vpaddq_s32(low, high));
#    endif
    }
    template <class C> static PAGED_INLINE ints dot(int32_t start, const ints * keys, const int8_t * query) {
        int32x4_t sum = vdupq_n_s32(start);
        PAGED_UNROLL
        for (int i = 0; i < 8; ++i) {
            int32_t dword;
            memcpy(&dword, query + 4 * i, sizeof(dword));
            sum = dot_bytes(sum, keys[i], vreinterpretq_s8_s32(vdupq_n_s32(dword)));
        }
        return vreinterpretq_s8_s32(sum);
    }

#    if defined(__ARM_FEATURE_DOTPROD)
    template <class C> static constexpr bool multiplies_faster = true;
#    else
    template <class C> static constexpr bool multiplies_faster = false;
#    endif

    static PAGED_INLINE f32v floats(ints x) { return (f32v) vcvtq_f32_s32(vreinterpretq_s32_s8(x)); }
    static PAGED_INLINE f32v floats(codes x, int i) {
        const int16x8_t wide = i / 2 % 2 ? vmovl_s8(vget_high_s8(x.half[i / 4])) : vmovl_s8(vget_low_s8(x.half[i / 4]));
        return (f32v) vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(wide) : vget_low_s16(wide)));
    }
    static PAGED_INLINE f32v halves(const char * p, size_t stride) {
        uint16_t h[4];
        for (int i = 0; i < 4; ++i) {
            memcpy(h + i, p + i * stride, 2);
        }
        return (f32v) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h)));
    }
};

} // namespace

code_kernels kernels_of_codes() { return code_kernels_of<neon>(); }

} // namespace paged

#endif
