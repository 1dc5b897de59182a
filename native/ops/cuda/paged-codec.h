// Numbers of a page: sixteen at a time, out of the bytes of a row in shared memory (2-byte aligned).
#pragma once

#include "paged-view.h"

namespace paged {

constexpr int UNIT = 16; // numbers: half a group of a quantized type

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
GPU_FN float    load_f16(const char * at) { return gpu::f16_to_float(*(const uint16_t *) at); }

// Codes of 4 bits: the low halves of 16 bytes are numbers 0 to 15 of a group, the high ones 16 to 31.
template <class Number> GPU_FN void unpack_nibbles(const char * codes, int half, float (&to)[UNIT], Number number) {
    GPU_UNROLL
    for (int i = 0; i < 8; ++i) {
        const uint32_t two = load_u16(codes + 2 * i) >> 4 * half;
        to[2 * i]          = number(two & 15, 2 * i);
        to[2 * i + 1]      = number(two >> 8 & 15, 2 * i + 1);
    }
}

GPU_FN uint32_t high_bits(const char * at, int half) { return load_u16(at + 2 * half); } // bit i: of number i

GPU_FN int iq4_value(uint32_t code) {
    // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, eight to a word
    const uint64_t word = code < 8 ? 0xf6eaddcfbfad9881ull : 0x7159453526190d01ull;
    return (int8_t) (word >> 8 * (code & 7));
}

// Numbers 16*unit to 16*unit + 15 of a row.
GPU_FN void unpack_unit(int type, const char * row, int unit, float (&to)[UNIT]) {
    if (type == PAGE_F32) {
        const uint16_t * words = (const uint16_t *) (row + 4 * UNIT * unit);
        GPU_UNROLL
        for (int i = 0; i < UNIT; ++i) {
            const uint32_t bits = words[2 * i] | (uint32_t) words[2 * i + 1] << 16;
            memcpy(&to[i], &bits, sizeof(float));
        }
        return;
    }
    if (type == PAGE_F16 || type == PAGE_BF16) {
        const uint16_t * halves = (const uint16_t *) (row + 2 * UNIT * unit);
        GPU_UNROLL
        for (int i = 0; i < UNIT; ++i) {
            to[i] = type == PAGE_F16 ? gpu::f16_to_float(halves[i]) : gpu::bf16_to_float(halves[i]);
        }
        return;
    }
    const char * group = row + unit / 2 * group_bytes(type);
    const int    half  = unit % 2;
    const float  d     = load_f16(group);
    switch (type) {
    case PAGE_Q8_0:
        GPU_UNROLL
        for (int i = 0; i < 8; ++i) {
            const uint32_t two = load_u16(group + 2 + UNIT * half + 2 * i);
            to[2 * i]          = d * (int8_t) (two & 255);
            to[2 * i + 1]      = d * (int8_t) (two >> 8);
        }
        break;
    case PAGE_Q4_0:
        unpack_nibbles(group + 2, half, to, [=](uint32_t x, int) { return d * ((int) x - 8); });
        break;
    case PAGE_Q4_1: {
        const float m = load_f16(group + 2);
        unpack_nibbles(group + 4, half, to, [=](uint32_t x, int) { return d * (int) x + m; });
        break;
    }
    case PAGE_Q5_0: {
        const uint32_t high = high_bits(group + 2, half);
        unpack_nibbles(group + 6, half, to,
                       [=](uint32_t x, int i) { return d * ((int) (x | (high >> i & 1) << 4) - 16); });
        break;
    }
    case PAGE_Q5_1: {
        const float    m    = load_f16(group + 2);
        const uint32_t high = high_bits(group + 4, half);
        unpack_nibbles(group + 8, half, to,
                       [=](uint32_t x, int i) { return d * (int) (x | (high >> i & 1) << 4) + m; });
        break;
    }
    default:
        unpack_nibbles(group + 2, half, to, [=](uint32_t x, int) { return d * iq4_value(x); });
        break;
    }
}

} // namespace paged
