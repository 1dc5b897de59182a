// Arithmetic on lines of tiles with NEON's dot product of bytes: 4 columns to a vector.
#pragma once

#include <arm_neon.h>
#include <cstdint>
#include <cstring>

namespace tiles {

constexpr int PARTS   = 4; // vectors of a line
constexpr int COLUMNS = 4; // of a vector

using ints   = int32x4_t; // 4 bytes, or 2 words, or one number, of each column
using floats = float32x4_t;

inline int8x16_t  bytes(ints x) { return vreinterpretq_s8_s32(x); }
inline uint8x16_t codes(ints x) { return vreinterpretq_u8_s32(x); }
inline ints       from_codes(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
inline int16x4_t  words(int8x8_t x) { return vget_low_s16(vmovl_s8(x)); }

inline int8x8_t four_bytes(const void * at) {
    int32_t value;
    std::memcpy(&value, at, sizeof(value));
    return vreinterpret_s8_s32(vdup_n_s32(value));
}

inline ints   load(const char * at) { return vreinterpretq_s32_s8(vld1q_s8((const int8_t *) at)); }
inline floats load_floats(const void * at) { return vld1q_f32((const float *) at); }
inline floats load_halves(const char * at) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) at)));
}
inline void   store(float * to, floats x) { vst1q_f32(to, x); }
inline void   store(char * to, ints x) { vst1q_s8((int8_t *) to, vreinterpretq_s8_s32(x)); }
inline ints   add(ints a, ints b) { return vaddq_s32(a, b); }
inline ints   merge(ints a, ints b) { return vorrq_s32(a, b); }
inline floats multiply(floats a, floats b) { return vmulq_f32(a, b); }
inline floats multiply_add(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
inline floats to_floats(ints x) { return vcvtq_f32_s32(x); }
inline ints   splat(int32_t x) { return vdupq_n_s32(x); }
inline floats splat(float x) { return vdupq_n_f32(x); }

// Bits of each byte, shifted to the right, or to the left if `by` is negative.
inline ints bits(ints x, int by, int mask) {
    const uint8x16_t shifted = vshlq_u8(codes(x), vdupq_n_s8(static_cast<int8_t>(-by)));
    return from_codes(vandq_u8(by ? shifted : codes(x), vdupq_n_u8(static_cast<uint8_t>(mask))));
}
inline ints low_nibbles(ints x) { return bits(x, 0, 15); }
inline ints high_nibbles(ints x) { return from_codes(vshrq_n_u8(codes(x), 4)); }

// Replaces codes by the bytes that a table of 16 has for them.
inline ints look_up(const int8_t * table, ints x) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), codes(x)));
}

// Four bytes or two words of a row, for each column.
inline ints word(const void * at) {
    int32_t value;
    std::memcpy(&value, at, sizeof(value));
    return vdupq_n_s32(value);
}

// Words of two groups, as neighbours, from the bytes of each.
inline ints pairs(const char * first, const char * second) {
    const int8x8_t both = vzip1_s8(four_bytes(first), four_bytes(second));
    return vreinterpretq_s32_s16(vmovl_s8(both));
}
inline ints pairs(const char * both) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8((const int8_t *) both))); }

// Adds the products of pairs of words.
inline ints add_pairs(ints sum, ints a, ints b) {
    const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
    return add(sum, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}

constexpr int MIDDLE_OF_BYTES = 0; // codes of 8 bits are signed

inline ints codes_of_bytes(ints x) { return x; }

// Sums of scaled sums of products.
struct int_totals {
    using scale = ints;

    ints x = vdupq_n_s32(0);

    static scale load_scale(const char * at) { return vmovl_s16(words(four_bytes(at))); }
    void         add(ints sum, scale by) { x = vmlaq_s32(x, sum, by); }
    floats       value() const { return to_floats(x); }
};

template <int BITS> struct products {
    static constexpr int  ROOM = 1 << 10; // products that fit into a sum
    static constexpr bool WIDE = true;    // sums are numbers of 32 bits

    using totals = int_totals;

    static ints add(ints sum, ints line, ints row) { return vdotq_s32(sum, bytes(line), bytes(row)); }
    static ints total(ints sum) { return sum; }
};

// ---- rounding of rows ----

// Returns the largest magnitude; not a number if one of the values is none.
template <int N> float largest_of(const float * from) {
    int32x4_t most = vdupq_n_s32(0); // magnitudes are ordered like the integers of their bits
    for (int i = 0; i < N; i += 4) {
        most = vmaxq_s32(most, vandq_s32(vreinterpretq_s32_f32(vld1q_f32(from + i)), vdupq_n_s32(0x7fffffff)));
    }
    const int32_t bits = vmaxvq_s32(most);
    float         value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Rounds 16 values to bytes, to nearest, ties to even, and returns their sum.
inline int32_t round_16(const float * from, float scale, int8_t * to) {
    const int16x8_t low  = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from), scale))),
                                        vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + 4), scale))));
    const int16x8_t high = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + 8), scale))),
                                        vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + 12), scale))));
    const int8x16_t all  = vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
    vst1q_s8(to, all);
    return vaddlvq_s8(all);
}

// The same of 32 values, and returns the sums of 16 each.
inline void round_32(const float * from, float scale, int8_t * to, int32_t (&sums)[2]) {
    sums[0] = round_16(from, scale, to);
    sums[1] = round_16(from + 16, scale, to + 16);
}

} // namespace tiles
