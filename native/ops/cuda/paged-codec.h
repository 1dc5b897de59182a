// Codecs: numbers of K and V rows of every type as 16-bit numbers for tensor cores.
//
// A row in shared memory (2-byte aligned) is converted sixteen numbers at a time. Quantized numbers become f16 by
// integer operations and operations on pairs of f16, which round once, as a float would.
#pragma once

#include "../iq4-values.h"
#include "paged-params.h"

namespace paged {

constexpr int UNIT          = 16; // numbers of f32, f16 or bf16 that are converted at a time
constexpr int CODED_NUMBERS = 32; // of a group of a quantized type

GPU_BOTH bool is_quantized(int type) { return type != PAGE_F32 && type != PAGE_F16 && type != PAGE_BF16; }

GPU_BOTH constexpr int group_bytes(int type) { // of 32 numbers
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

// Load words from an even address. Two more bytes may be read and ignored.
template <int N> GPU_FN void load_words(const char * at, uint32_t (&to)[N]) {
    const int        shift = (int) ((uint64_t) at & 2) * 8;
    const uint32_t * words = (const uint32_t *) (at - shift / 8);
    uint32_t         low   = words[0];
    GPU_UNROLL
    for (int i = 0; i < N; ++i) {
        const uint32_t high = i + 1 < N || shift ? words[i + 1] : 0;
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

// Convert four codes, one in each byte, to two pairs of f16.
template <int TYPE> GPU_FN void unpack_codes(uint32_t codes, uint32_t d, uint32_t least, uint32_t * to) {
    constexpr int bias = TYPE == PAGE_Q8_0 || TYPE == PAGE_IQ4_NL ? 128
                         : TYPE == PAGE_Q4_0                      ? 8
                         : TYPE == PAGE_Q5_0                      ? 16
                                                                  : 0;
    to_halves(TYPE == PAGE_IQ4_NL ? iq4_values(codes) : codes, bias, to[0], to[1]);
    GPU_UNROLL
    for (int i = 0; i < 2; ++i) {
        const bool with_least = TYPE == PAGE_Q4_1 || TYPE == PAGE_Q5_1;
        to[i]                 = with_least ? gpu::fma_f16(to[i], d, least) : gpu::mul_f16(to[i], d);
    }
}

// Convert a group of a quantized type to pairs of f16.
template <int TYPE> GPU_FN void unpack_group(const char * group, uint32_t (&to)[CODED_NUMBERS / 2]) {
    constexpr bool five = TYPE == PAGE_Q5_0 || TYPE == PAGE_Q5_1, with_least = TYPE == PAGE_Q4_1 || TYPE == PAGE_Q5_1;
    constexpr int  head  = with_least ? 4 : 2; // bytes of scale and least value
    const uint32_t d     = load_u16(group) * 0x10001u;
    const uint32_t least = with_least ? load_u16(group + 2) * 0x10001u : 0;
    if (TYPE == PAGE_Q8_0) {
        uint32_t codes[8];
        load_words(group + head, codes);
        GPU_UNROLL
        for (int i = 0; i < 8; ++i) {
            unpack_codes<TYPE>(codes[i] ^ 0x80808080u, d, least, to + 2 * i);
        }
        return;
    }
    uint32_t codes[4], fifth = 0; // one bit for each number, in order
    if (five) {
        fifth = load_u16(group + head) | load_u16(group + head + 2) << 16;
    }
    load_words(group + head + (five ? 4 : 0), codes);
    GPU_UNROLL
    for (int i = 0; i < 8; ++i) { // the low halves of sixteen bytes are numbers 0 to 15, the high halves 16 to 31
        const uint32_t four = codes[i % 4] >> i / 4 * 4 & 0x0f0f0f0fu;
        unpack_codes<TYPE>(five ? four | fifth_bits(fifth >> 4 * i) : four, d, least, to + 2 * i);
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
struct half_numbers {                           // f16 and all quantized types
    static constexpr int   type = -1, size = 0; // any
    static constexpr bool  quantized = true;
    static constexpr int   terms = 1, weight_terms = 1;
    GPU_FN static uint32_t pack(float a, float b) { return gpu::pack_f16(a, b); }
    GPU_FN static float    rounded(float a) { return gpu::f16_to_float((uint16_t) gpu::pack_f16(a, 0.0f)); }
    GPU_FN static void     multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        gpu::mma_f16(c, a, b0, b1);
    }
};

struct bfloat_numbers { // bf16; a softmax weight needs two terms
    static constexpr int   type = -1, size = 0;
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

// Return two numbers as a pair of 16-bit terms, and leave what they lack.
template <class Numbers> GPU_FN uint32_t take_term(float & x, float & y) {
    const uint32_t pair = Numbers::pack(x, y);
    x -= Numbers::rounded(x);
    y -= Numbers::rounded(y);
    return pair;
}

// A type and a head size that a kernel is compiled for.
template <int TYPE, int SIZE> struct known_numbers : half_numbers {
    static constexpr int type = TYPE, size = SIZE;
};

// Return the alignment of rows that such a kernel needs: what rows have that follow one another.
GPU_BOTH constexpr int known_alignment(int row_bytes) { return row_bytes % PIECE ? row_bytes & -row_bytes : PIECE; }

GPU_BOTH constexpr int known_row_bytes(int type, int size) { return size / CODED_NUMBERS * group_bytes(type); }
GPU_BOTH constexpr int known_before(int type, int size) { return PIECE - known_alignment(known_row_bytes(type, size)); }
GPU_BOTH constexpr int known_pieces(int type, int size) {
    return pieces_of(known_row_bytes(type, size), known_before(type, size));
}

// Return the parameters with constants for all that the kernel is compiled for.
template <class Numbers> GPU_FN params with_constants(const params & p) {
    constexpr int row_bytes = known_row_bytes(Numbers::type, Numbers::size);
    constexpr int before    = known_before(Numbers::type, Numbers::size);
    params        q         = p;
    q.d_k = q.d_v  = Numbers::size;
    const auto set = [&](pages & x) {
        x.type          = Numbers::type;
        x.row_bytes     = row_bytes;
        x.aligned       = before == 0;
        x.steps_aligned = 1;
        x.raw_stride    = raw_stride_of(row_bytes, before);
        x.pieces        = known_pieces(Numbers::type, Numbers::size);
    };
    set(q.k);
    set(q.v);
    q.v_is_k       = 0;
    q.groups_whole = 1;
    return q;
}

} // namespace paged
