// A tile of tokens on its way from the pool to the tensor cores: raw bytes of K and V rows arrive in a ring of stages,
// and become rows of 16-bit numbers there is a product for. What is exact in float16 or bfloat16 is one number; a
// float is two bfloat16 whose sum it is, to 16 bits.
#pragma once

#include "paged-codec.h"
#include "paged-split.h"

namespace paged {

struct half_numbers { // f16 and all quantized types
    static constexpr bool  quantized = true;
    static constexpr int   parts = 1, weight_parts = 1;
    GPU_FN static uint32_t pack(float a, float b) { return gpu::pack_f16(a, b); }
    GPU_FN static float    rounded(float a) { return gpu::f16_to_float((uint16_t) gpu::pack_f16(a, 0.0f)); }
    GPU_FN static void     multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        gpu::mma_f16(c, a, b0, b1);
    }
};

struct bfloat_numbers { // bf16, which is too coarse for a weight
    static constexpr bool  quantized = false;
    static constexpr int   parts = 1, weight_parts = 2;
    GPU_FN static uint32_t pack(float a, float b) { return gpu::pack_bf16(a, b); }
    GPU_FN static float    rounded(float a) { return gpu::bf16_to_float((uint16_t) gpu::pack_bf16(a, 0.0f)); }
    GPU_FN static void     multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        gpu::mma_bf16(c, a, b0, b1);
    }
};

struct float_numbers : bfloat_numbers { // f32
    static constexpr int parts = 2;
};

constexpr int PAD = 16; // bytes behind a row of 16-bit numbers, so that eight rows lie in different banks

GPU_BOTH int round_up(int n, int to) { return (n + to - 1) / to * to; }
GPU_BOTH int raw_stride(int row_bytes) { return round_up(row_bytes, 16) + PAD; } // a row may begin within 16 bytes
GPU_BOTH int number_stride(int d) { return 2 * round_up(d, UNIT) + PAD; }

// Whether raw rows are the rows of numbers.
GPU_BOTH bool raw_is_ready(const pages & x, int d) {
    const bool aligned = ((uint64_t) x.data | x.head_stride | x.slot_stride) % 16 == 0;
    return (x.type == PAGE_F16 || x.type == PAGE_BF16) && aligned && d % UNIT == 0;
}

GPU_FN const char * row_of(const view & p, const pages & x, const sequence & s, int head_kv, int token) {
    int64_t slot;
    if (p.block_shift >= 0) { // a division costs more than all the rest
        slot = ((int64_t) s.blocks[token >> p.block_shift] << p.block_shift) + (token & (p.block_size - 1));
    } else {
        slot = (int64_t) s.blocks[token / p.block_size] * p.block_size + token % p.block_size;
    }
    return x.data + head_kv * x.head_stride + slot * x.slot_stride;
}

// How threads share rows of `n` equal pieces: as many neighbours to a row as a power of two is enough for.
struct row_share {
    int row, rows, piece, pieces; // this thread's first row and piece, and how far it is to the next
};

GPU_FN row_share share_of_rows(int n) {
    int shift = 0;
    while (shift < 5 && 1 << shift < n) {
        ++shift;
    }
    const int pieces = 1 << shift;
    return {gpu::thread() >> shift, gpu::n_threads() >> shift, gpu::thread() & (pieces - 1), pieces};
}

struct alignas(16) quad { // one store or load
    uint32_t words[4];
};

// Begins to copy the rows of tokens begin .. begin + n_tokens, 16 bytes at a time; those from `end` on become zeros.
GPU_FN void fetch_rows(const view & p, const pages & x, const sequence & s, int head_kv, int begin, int end,
                       int n_tokens, char * to) {
    const int       stride = raw_stride(x.row_bytes), chunks = stride / 16;
    const row_share share = share_of_rows(ceil_div(x.row_bytes, 16));
    for (int t = share.row; t < n_tokens; t += share.rows) {
        char * at = to + t * stride;
        if (begin + t >= end) {
            for (int chunk = share.piece; chunk < chunks; chunk += share.pieces) {
                *(quad *) (at + 16 * chunk) = {};
            }
            continue;
        }
        const char * row   = row_of(p, x, s, head_kv, begin + t);
        const char * first = (const char *) ((uint64_t) row & ~(uint64_t) 15);
        for (int chunk = share.piece; first + 16 * chunk < row + x.row_bytes; chunk += share.pieces) {
            gpu::copy_async<16>(at + 16 * chunk, first + 16 * chunk);
        }
    }
}

GPU_FN void put_words(const uint32_t (&words)[UNIT / 2], char * to) {
    ((quad *) to)[0] = {{words[0], words[1], words[2], words[3]}};
    ((quad *) to)[1] = {{words[4], words[5], words[6], words[7]}};
}

// Sixteen numbers as `parts` times as many of 16 bits, whose sums they are; a part lies `part_stride` behind the one
// before.
template <class Numbers, int parts> GPU_FN void put_unit(float (&x)[UNIT], char * to, int part_stride) {
    GPU_UNROLL
    for (int part = 0; part < parts; ++part) {
        uint32_t words[UNIT / 2];
        GPU_UNROLL
        for (int w = 0; w < UNIT / 2; ++w) {
            words[w] = Numbers::pack(x[2 * w], x[2 * w + 1]);
            x[2 * w] -= Numbers::rounded(x[2 * w]);
            x[2 * w + 1] -= Numbers::rounded(x[2 * w + 1]);
        }
        put_words(words, to + part * part_stride);
    }
}

// Rows of numbers out of raw ones; part 1 of all rows lies behind part 0 of all rows.
template <class Numbers>
GPU_FN void convert_rows(const view & p, const pages & x, const sequence & s, int head_kv, int d, int begin, int end,
                         int n_tokens, const char * raw, char * to) {
    const int       units = ceil_div(d, UNIT), stride = number_stride(d);
    const row_share share = share_of_rows(units);
    for (int t = share.row; t < n_tokens; t += share.rows) {
        const int offset = // as fetch_rows had it
            begin + t < end ? (int) ((uint64_t) row_of(p, x, s, head_kv, begin + t) & 15) : 0;
        const char * from = raw + t * raw_stride(x.row_bytes) + offset;
        for (int unit = share.piece; unit < units; unit += share.pieces) {
            char * at = to + t * stride + 2 * UNIT * unit;
            if (Numbers::quantized && is_quantized(x.type)) { // a row is a whole number of groups
                uint32_t words[UNIT / 2] = {};
                if (begin + t < end) {
                    unpack_halves(x.type, from, unit, words);
                }
                put_words(words, at);
                continue;
            }
            float x16[UNIT] = {};
            if (begin + t < end) {
                unpack_floats(x.type, from, unit, x16);
                GPU_UNROLL
                for (int n = 0; n < UNIT; ++n) { // behind the row are other bytes
                    x16[n] = UNIT * unit + n < d ? x16[n] : 0.0f;
                }
            }
            put_unit<Numbers, Numbers::parts>(x16, at, n_tokens * stride);
        }
    }
}

} // namespace paged
