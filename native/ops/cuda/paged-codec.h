// Codecs: numbers of K and V rows of every type as 16-bit numbers for tensor cores.
//
// A row in shared memory (2-byte aligned) is converted sixteen numbers at a time. Quantized numbers become f16 by
// integer operations and operations on pairs of f16, which round once, as a float would.
#pragma once

#include "../iq4-values.h"
#include "paged-params.h"

namespace paged {

constexpr int UNIT = 16; // numbers; half a group of a quantized type

GPU_BOTH bool is_quantized(int type) { return type != PAGE_F32 && type != PAGE_F16 && type != PAGE_BF16; }

GPU_BOTH int group_bytes(int type) { // of 32 numbers
    switch (type) {
    case PAGE_Q8_0:
        return 34;
    case PAGE_Q5_1:
        return 24;
    case PAGE_Q5_0:
        return 22;
    case PAGE_Q4_1:
        return 20;
    case PAGE_Q4_0:
    case PAGE_IQ4_NL:
        return 18;
    default:
        return type == PAGE_F32 ? 128 : 64;
    }
}

GPU_FN uint32_t load_u16(const char * at) { return *(const uint16_t *) at; }

// Load sixteen bytes from an even address. If it is not a multiple of four, two more bytes are read and ignored.
GPU_FN void load_bytes(const char * at, uint32_t (&to)[4]) {
    const int        shift = (int) ((uint64_t) at & 2) * 8;
    const uint32_t * words = (const uint32_t *) (at - shift / 8);
    uint32_t         low   = words[0];
    GPU_UNROLL
    for (int i = 0; i < 4; ++i) {
        const uint32_t high = i < 3 || shift ? words[i + 1] : 0;
        to[i]               = gpu::funnel(low, high, shift);
        low                 = high;
    }
}

// Move four bits to the fifth bits of four bytes.
GPU_FN uint32_t fifth_bits(uint32_t four) { return ((four & 15) * 0x00204081u & 0x01010101u) << 4; }

constexpr int IQ4_VALUES[16] = {VELO_IQ4_VALUES};

// Return values first .. first + 3 of iq4_nl, plus 128, in the bytes of a word.
constexpr uint32_t iq4_bytes(int first) {
    return (uint32_t) (IQ4_VALUES[first] + 128) | (uint32_t) (IQ4_VALUES[first + 1] + 128) << 8 |
           (uint32_t) (IQ4_VALUES[first + 2] + 128) << 16 | (uint32_t) (IQ4_VALUES[first + 3] + 128) << 24;
}
constexpr uint32_t IQ4_BYTES_0 = iq4_bytes(0), IQ4_BYTES_4 = iq4_bytes(4);
constexpr uint32_t IQ4_BYTES_8 = iq4_bytes(8), IQ4_BYTES_12 = iq4_bytes(12);

// Return the values of iq4_nl for the codes in four bytes, plus 128.
GPU_FN uint32_t iq4_values(uint32_t codes) {
    const uint32_t pairs  = codes | codes >> 4; // in bytes 0 and 2
    const uint32_t picked = gpu::permute(pairs, 0, 0x4420) & 0x7777;
    const uint32_t low    = gpu::permute(IQ4_BYTES_0, IQ4_BYTES_4, picked);
    const uint32_t high   = gpu::permute(IQ4_BYTES_8, IQ4_BYTES_12, picked);
    const uint32_t mask   = (codes >> 3 & 0x01010101u) * 255;
    return (low & ~mask) | (high & mask);
}

// Convert four codes, one in each byte, to two pairs of f16: code - bias.
GPU_FN void to_halves(uint32_t codes, int bias, uint32_t & first, uint32_t & second) {
    const uint32_t thousand = 0x64646464; // 0x6400 + code is 1024 + code
    const uint32_t minus    = gpu::pack_f16((float) -(1024 + bias), (float) -(1024 + bias));
    first                   = gpu::add_f16(gpu::permute(codes, thousand, 0x4140), minus);
    second                  = gpu::add_f16(gpu::permute(codes, thousand, 0x4342), minus);
}

// Convert numbers 16*unit to 16*unit + 15 of a quantized row to pairs of f16.
GPU_FN void unpack_halves(int type, const char * row, int unit, uint32_t (&to)[UNIT / 2]) {
    const char *   group = row + unit / 2 * group_bytes(type);
    const int      half  = unit % 2;
    const bool     five = type == PAGE_Q5_0 || type == PAGE_Q5_1, with_least = type == PAGE_Q4_1 || type == PAGE_Q5_1;
    const int      head = with_least ? 4 : 2; // bytes of scale and least value
    const uint32_t d = load_u16(group) * 0x10001u, least = with_least ? load_u16(group + 2) * 0x10001u : 0;
    const uint32_t fifth = five ? load_u16(group + head + 2 * half) : 0; // one bit for each number, in order
    uint32_t       codes[4];
    load_bytes(group + head + (five ? 4 : 0) + (type == PAGE_Q8_0 ? UNIT * half : 0), codes);
    const int bias = type == PAGE_Q8_0 || type == PAGE_IQ4_NL ? 128
                     : type == PAGE_Q4_0                      ? 8
                     : type == PAGE_Q5_0                      ? 16
                                                              : 0;
    GPU_UNROLL
    for (int i = 0; i < 4; ++i) {
        if (type == PAGE_Q8_0) {
            codes[i] ^= 0x80808080u;
        } else { // the low halves of 16 bytes are numbers 0 to 15 of a group, the high halves 16 to 31
            codes[i] = (codes[i] >> 4 * half & 0x0f0f0f0fu) | fifth_bits(fifth >> 4 * i);
        }
        if (type == PAGE_IQ4_NL) {
            codes[i] = iq4_values(codes[i]);
        }
        to_halves(codes[i], bias, to[2 * i], to[2 * i + 1]);
        to[2 * i]     = with_least ? gpu::fma_f16(to[2 * i], d, least) : gpu::mul_f16(to[2 * i], d);
        to[2 * i + 1] = with_least ? gpu::fma_f16(to[2 * i + 1], d, least) : gpu::mul_f16(to[2 * i + 1], d);
    }
}

// Convert numbers 16*unit to 16*unit + 15 of a row of f32, f16 or bf16 to floats.
GPU_FN void unpack_floats(int type, const char * row, int unit, float (&to)[UNIT]) {
    const uint16_t * halves = (const uint16_t *) row + UNIT * unit * (type == PAGE_F32 ? 2 : 1);
    GPU_UNROLL
    for (int i = 0; i < UNIT; ++i) {
        if (type == PAGE_F32) {
            const uint32_t bits = halves[2 * i] | (uint32_t) halves[2 * i + 1] << 16;
            memcpy(&to[i], &bits, sizeof(float));
        } else {
            to[i] = type == PAGE_F16 ? gpu::f16_to_float(halves[i]) : gpu::bf16_to_float(halves[i]);
        }
    }
}

// Types of 16-bit numbers for the tensor cores. f16, bf16 and quantized values are one term; an f32 is the sum of two
// bf16 terms, exact to 16 bits.
struct half_numbers { // f16 and all quantized types
    static constexpr bool  quantized = true;
    static constexpr int   terms = 1, weight_terms = 1;
    GPU_FN static uint32_t pack(float a, float b) { return gpu::pack_f16(a, b); }
    GPU_FN static float    rounded(float a) { return gpu::f16_to_float((uint16_t) gpu::pack_f16(a, 0.0f)); }
    GPU_FN static void     multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        gpu::mma_f16(c, a, b0, b1);
    }
};

struct bfloat_numbers { // bf16; a softmax weight needs two terms
    static constexpr bool  quantized = false;
    static constexpr int   terms = 1, weight_terms = 2;
    GPU_FN static uint32_t pack(float a, float b) { return gpu::pack_bf16(a, b); }
    GPU_FN static float    rounded(float a) { return gpu::bf16_to_float((uint16_t) gpu::pack_bf16(a, 0.0f)); }
    GPU_FN static void     multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        gpu::mma_bf16(c, a, b0, b1);
    }
};

struct float_numbers : bfloat_numbers { // f32
    static constexpr int terms = 2;
};

} // namespace paged
