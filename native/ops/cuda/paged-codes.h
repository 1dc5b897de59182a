// Operands of products from raw rows of q8_0 and q4_0, without a conversion in shared memory.
//
// A lane loads the codes of its fragments and makes them f16 numbers. Numbers of a product's sum, and its columns, may
// have any order: here one in which a lane's codes are neighbours, so that a load has two or four. Groups have 32
// numbers, which are two steps of the product of queries and keys, and four tiles of eight columns of V.
#pragma once

#include "paged-codec.h"

namespace paged {

GPU_BOTH bool is_direct(int type) { return type == PAGE_Q8_0 || type == PAGE_Q4_0; }

// Return which number of a group is at position n (0 to 15) of a step (0 or 1). Lane c of four has positions 2c, 2c +
// 1, 2c + 8 and 2c + 9.
GPU_BOTH constexpr int number_at(int type, int step, int n) {
    return type == PAGE_Q8_0 ? n % 8 / 2 * 8 + 4 * step + n / 8 * 2 + n % 2
                             : n % 8 / 2 * 4 + 16 * step + n % 2 * 2 + n / 8;
}

// Return which column of a group is column k (0 to 7) of a tile (0 to 3).
GPU_BOTH constexpr int column_at(int type, int tile, int k) {
    return type == PAGE_Q8_0 ? 4 * k + tile : tile / 2 * 16 + 2 * k + tile % 2;
}

// Load four bytes from an even address.
GPU_FN uint32_t load_four(const char * at) { return load_u16(at) | load_u16(at + 2) << 16; }

GPU_FN uint32_t twice(float x) { return gpu::pack_f16(x, x); }

// Convert the low half of bytes 0 and 2, or their high half, to code - 8.
GPU_FN uint32_t low_codes(uint32_t x) { return gpu::add_f16((x & 0x000f000fu) | 0x64006400u, twice(-1024.0f - 8.0f)); }
GPU_FN uint32_t high_codes(uint32_t x) { // 1024 + 16 * code
    return gpu::fma_f16((x & 0x00f000f0u) | 0x64006400u, twice(1.0f / 16.0f), twice(-64.0f - 8.0f));
}

// Set the fragments of both steps for the keys of a group: lane c of a token's four.
template <int TYPE> GPU_FN void unpack_keys(const char * group, int c, uint32_t (&b)[2][2]) {
    const uint32_t d = load_u16(group) * 0x10001u;
    if (TYPE == PAGE_Q8_0) {
        to_halves(load_four(group + 2 + 8 * c) ^ 0x80808080u, 128, b[0][0], b[0][1]);
        to_halves(load_four(group + 6 + 8 * c) ^ 0x80808080u, 128, b[1][0], b[1][1]);
    } else {
        const uint32_t codes = load_four(group + 2 + 4 * c);
        b[0][0]              = low_codes(codes);
        b[0][1]              = low_codes(codes >> 8);
        b[1][0]              = high_codes(codes);
        b[1][1]              = high_codes(codes >> 8);
    }
    GPU_UNROLL
    for (int i = 0; i < 4; ++i) {
        b[i / 2][i % 2] = gpu::mul_f16(b[i / 2][i % 2], d);
    }
}

// Set a register of the fragments of four tiles for V of a group: of two tokens, column `g` of each tile.
template <int TYPE> GPU_FN void unpack_values(const char * first, const char * second, int g, uint32_t (&b)[4]) {
    const uint32_t d = load_u16(first) | load_u16(second) << 16;
    if (TYPE == PAGE_Q8_0) {
        const uint32_t x = load_four(first + 2 + 4 * g) ^ 0x80808080u, y = load_four(second + 2 + 4 * g) ^ 0x80808080u;
        to_halves(gpu::permute(x, y, 0x5140), 128, b[0], b[1]);
        to_halves(gpu::permute(x, y, 0x7362), 128, b[2], b[3]);
    } else {
        const uint32_t codes = load_u16(first + 2 + 2 * g) | load_u16(second + 2 + 2 * g) << 16;
        b[0]                 = low_codes(codes);
        b[1]                 = low_codes(codes >> 8);
        b[2]                 = high_codes(codes);
        b[3]                 = high_codes(codes >> 8);
    }
    GPU_UNROLL
    for (int i = 0; i < 4; ++i) {
        b[i] = gpu::mul_f16(b[i], d);
    }
}

} // namespace paged
