// Operands of products from raw rows of q8_0 and q4_0, without a conversion in shared memory.
//
// A lane loads the codes of its fragments and makes them f16 numbers. Numbers of a product's sum, and its rows, may
// have any order: here one in which a lane's codes are neighbours, in whole words where rows begin at words. A group
// has 32 numbers: two steps of the product with queries, and two tiles of sixteen columns of V.
//
// A group begins with its scale, of two bytes, and has an odd number of pairs of bytes. So in groups 1, 3, ... the
// codes begin at a word. In groups 0, 2, ... the words begin at the third byte of codes, and the last word ends with
// the first two bytes.
#pragma once

#include "paged-codec.h"

namespace paged {

GPU_BOTH constexpr bool is_direct(int type) { return type == PAGE_Q8_0 || type == PAGE_Q4_0; }

constexpr int SCALE_BYTES = 2;

// Return the bytes of codes that come after the words of a group.
GPU_BOTH constexpr int turned(int group) { return group % 2 ? 0 : 2; }

// Return which number of a group is at position n (0 to 15) of a step (0 or 1). Lane c of four has positions 2c, 2c +
// 1, 2c + 8 and 2c + 9.
GPU_BOTH constexpr int number_at(int type, int group, int step, int n) {
    return type == PAGE_Q8_0 ? (16 * step + n % 8 / 2 * 4 + n / 8 * 2 + n % 2 + turned(group)) % 32
                             : 16 * step + (n % 8 / 2 * 4 + n % 2 * 2 + n / 8 + turned(group)) % 16;
}

// Return which column of a group is row k (0 to 7) of half a tile (0 to 3).
GPU_BOTH constexpr int column_at(int type, int group, int half, int k) {
    return type == PAGE_Q8_0 ? (4 * k + half + turned(group)) % 32 : half / 2 * 16 + 2 * k + half % 2;
}

// Load four bytes. WORDS: rows begin at words, and `at` is a word.
template <bool WORDS> GPU_FN uint32_t load_four(const char * at) {
    return WORDS ? *(const uint32_t *) at : load_u16(at) | load_u16(at + 2) << 16;
}

// A group of codes: its scale in the low half, and for groups 0, 2, ... the first two bytes of codes in the high half.
template <bool WORDS> GPU_FN uint32_t load_head(const char * group, int number) {
    return turned(number) ? load_four<WORDS>(group) : load_u16(group);
}

// Load a word of a group's codes in the order above. `last`: it is the last one.
template <bool WORDS> GPU_FN uint32_t load_codes(const char * group, int number, uint32_t head, int word, bool last) {
    const uint32_t codes = load_four<WORDS>(group + SCALE_BYTES + turned(number) + 4 * word);
    return turned(number) && last ? gpu::permute(codes, head, 0x7610) : codes;
}

GPU_FN uint32_t twice(float x) { return gpu::pack_f16(x, x); }

// Convert the low half of bytes 0 and 2, or their high half, to code - 8.
GPU_FN uint32_t low_codes(uint32_t x) { return gpu::add_f16((x & 0x000f000fu) | 0x64006400u, twice(-1024.0f - 8.0f)); }
GPU_FN uint32_t high_codes(uint32_t x) { // 1024 + 16 * code
    return gpu::fma_f16((x & 0x00f000f0u) | 0x64006400u, twice(1.0f / 16.0f), twice(-64.0f - 8.0f));
}

// Set the fragments of both steps for the keys of a group, without its scale: lane c of a token's four. Return the
// scale.
template <int TYPE, bool WORDS> GPU_FN float unpack_keys(const char * group, int number, int c, uint32_t (&to)[2][2]) {
    const uint32_t head = load_head<WORDS>(group, number);
    if (TYPE == PAGE_Q8_0) {
        to_halves(load_codes<WORDS>(group, number, head, c, false) ^ 0x80808080u, 128, to[0][0], to[0][1]);
        to_halves(load_codes<WORDS>(group, number, head, c + 4, c == 3) ^ 0x80808080u, 128, to[1][0], to[1][1]);
    } else {
        const uint32_t codes = load_codes<WORDS>(group, number, head, c, c == 3);
        to[0][0]             = low_codes(codes);
        to[0][1]             = low_codes(codes >> 8);
        to[1][0]             = high_codes(codes);
        to[1][1]             = high_codes(codes >> 8);
    }
    return gpu::f16_to_float((uint16_t) head);
}

// Set a register of the fragments of both tiles for V of a group: of two tokens, row `g` of each half tile.
template <int TYPE, bool WORDS>
GPU_FN void unpack_values(const char * first, const char * second, int number, int g, uint32_t (&to)[4]) {
    uint32_t x, y;
    if (TYPE == PAGE_Q8_0) {
        x                = load_head<WORDS>(first, number);
        y                = load_head<WORDS>(second, number);
        const uint32_t a = load_codes<WORDS>(first, number, x, g, g == 7) ^ 0x80808080u;
        const uint32_t b = load_codes<WORDS>(second, number, y, g, g == 7) ^ 0x80808080u;
        to_halves(gpu::permute(a, b, 0x5140), 128, to[0], to[1]);
        to_halves(gpu::permute(a, b, 0x7362), 128, to[2], to[3]);
    } else {
        x                    = load_u16(first);
        y                    = load_u16(second);
        const uint32_t codes = load_u16(first + SCALE_BYTES + 2 * g) | load_u16(second + SCALE_BYTES + 2 * g) << 16;
        to[0]                = low_codes(codes);
        to[1]                = low_codes(codes >> 8);
        to[2]                = high_codes(codes);
        to[3]                = high_codes(codes >> 8);
    }
    const uint32_t scales = gpu::permute(x, y, 0x5410);
    GPU_UNROLL
    for (int i = 0; i < 4; ++i) {
        to[i] = gpu::mul_f16(to[i], scales);
    }
}

} // namespace paged
