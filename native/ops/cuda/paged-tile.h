// Tiles of tokens in shared memory: the layout, copies of raw K and V rows, conversion to 16-bit numbers.
#pragma once

#include "paged-codec.h"
#include "paged-schedule.h"

namespace paged {

constexpr int N_WARPS   = 4;
constexpr int N_THREADS = 32 * N_WARPS;
constexpr int N_STAGES  = 2;

constexpr int MAX_TILE_TOKENS = 64; // tokens of a tile
static_assert(N_WARPS <= 32, "scan_rows has room for the sums of 32 warps");

constexpr int PAD = 16; // bytes after a row of 16-bit numbers, so that eight rows are in different banks

GPU_BOTH int round_up(int n, int to) { return (n + to - 1) / to * to; }
GPU_BOTH int raw_stride(int row_bytes) {
    return round_up(row_bytes, 16) + PAD;
} // rows are copied from a multiple of 16 bytes
GPU_BOTH int number_stride(int d) { return 2 * round_up(d, UNIT) + PAD; }

// Return whether raw rows go to the tensor cores without conversion.
GPU_BOTH bool raw_is_ready(const pages & x, int d) {
    const bool aligned = ((uint64_t) x.data | x.head_stride | x.slot_stride) % 16 == 0;
    return (x.type == PAGE_F16 || x.type == PAGE_BF16) && aligned && d % UNIT == 0;
}

// 16-bit terms of a query value. Fast tiles of many rows use one.
constexpr int MAX_TERMS = 2;
GPU_BOTH bool is_fast(const params & p, int rows) { return p.fast && rows > 16; }

// Offsets in shared memory, in bytes.
struct layout {
    int rows, tokens; // of a tile
    int q, stages, stage_bytes, v_raw, k, v, weights, maxima, positions, output_rows, starts, total;
};

GPU_BOTH int weight_stride(int tokens) { return 2 * tokens + PAD; }

template <class KNumbers, class VNumbers> GPU_BOTH layout layout_of(const params & p, int rows, int tokens) {
    const bool k_ready = raw_is_ready(p.k, p.d_k), v_ready = raw_is_ready(p.v, p.d_v);
    const int  terms        = is_fast(p, rows) ? 1 : MAX_TERMS;
    const int  weight_terms = terms < VNumbers::weight_terms ? terms : VNumbers::weight_terms;
    layout     l;
    l.rows        = rows;
    l.tokens      = tokens;
    l.q           = 0;
    l.stages      = l.q + terms * rows * number_stride(p.d_k);
    l.v_raw       = tokens * raw_stride(p.k.row_bytes);
    l.stage_bytes = l.v_raw + (p.v_is_k ? 0 : tokens * raw_stride(p.v.row_bytes));
    l.k           = l.stages + N_STAGES * l.stage_bytes;
    l.v           = l.k + (k_ready ? 0 : KNumbers::terms * tokens * number_stride(p.d_k));
    l.weights     = l.v + (v_ready || p.v_is_k ? 0 : VNumbers::terms * tokens * number_stride(p.d_v));
    l.maxima      = l.weights + weight_terms * rows * weight_stride(tokens);
    l.positions   = l.maxima + rows * N_WARPS * (int) sizeof(float);
    l.output_rows = l.positions + rows * (int) sizeof(int);
    l.starts      = l.output_rows + rows * (int) sizeof(int);
    l.total       = l.starts + START_INTS * (int) sizeof(int);
    return l;
}

GPU_FN const char * row_of(const params & p, const pages & x, const sequence & s, int head_kv, int token) {
    int64_t slot;
    if (p.block_shift >= 0) { // a division would cost more than the rest
        slot = ((int64_t) s.blocks[(token >> p.block_shift) - s.first] << p.block_shift) + (token & (p.block_size - 1));
    } else {
        slot = (int64_t) s.blocks[token / p.block_size - s.first] * p.block_size + token % p.block_size;
    }
    return x.data + head_kv * x.head_stride + slot * x.slot_stride;
}

// Return whether the table has this token of a tile that ends before `end`. Tiles begin at multiples of SPLIT_ALIGN,
// maybe in blocks before the window.
GPU_FN bool has_token(const params & p, const sequence & s, int token, int end) {
    return token < end && token >= s.first * p.block_size;
}

// Division of rows of `n` pieces among threads: the next power of two of threads for each row.
struct row_share {
    int row, rows, piece, pieces; // this thread's first row and piece, and the steps to the next
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

// Start to copy the rows of tokens begin .. begin + n_tokens, 16 bytes at a time. Rows from `end` on, and rows that the
// table does not have, become zeros.
GPU_FN void fetch_rows(const params & p, const pages & x, const sequence & s, int head_kv, int begin, int end,
                       int n_tokens, char * to) {
    const int       stride = raw_stride(x.row_bytes), chunks = stride / 16;
    const row_share share = share_of_rows(ceil_div(x.row_bytes, 16));
    for (int t = share.row; t < n_tokens; t += share.rows) {
        char * at = to + t * stride;
        if (!has_token(p, s, begin + t, end)) {
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

GPU_FN void store_words(const uint32_t (&words)[UNIT / 2], char * to) {
    ((quad *) to)[0] = {{words[0], words[1], words[2], words[3]}};
    ((quad *) to)[1] = {{words[4], words[5], words[6], words[7]}};
}

// Store sixteen numbers as sums of `terms` 16-bit numbers each. A term is `term_stride` bytes after the one before.
template <class Numbers, int terms> GPU_FN void store_unit(float (&x)[UNIT], char * to, int term_stride) {
    GPU_UNROLL
    for (int term = 0; term < terms; ++term) {
        uint32_t words[UNIT / 2];
        GPU_UNROLL
        for (int w = 0; w < UNIT / 2; ++w) {
            words[w] = Numbers::pack(x[2 * w], x[2 * w + 1]);
            x[2 * w] -= Numbers::rounded(x[2 * w]);
            x[2 * w + 1] -= Numbers::rounded(x[2 * w + 1]);
        }
        store_words(words, to + term * term_stride);
    }
}

// Convert raw rows to rows of 16-bit numbers. Term 1 of all rows follows term 0 of all rows.
template <class Numbers>
GPU_FN void convert_rows(const params & p, const pages & x, const sequence & s, int head_kv, int d, int begin, int end,
                         int n_tokens, const char * raw, char * to) {
    const int       units = ceil_div(d, UNIT), stride = number_stride(d);
    const row_share share = share_of_rows(units);
    for (int t = share.row; t < n_tokens; t += share.rows) {
        const int offset = // as in fetch_rows
            has_token(p, s, begin + t, end) ? (int) ((uint64_t) row_of(p, x, s, head_kv, begin + t) & 15) : 0;
        const char * from = raw + t * raw_stride(x.row_bytes) + offset;
        for (int unit = share.piece; unit < units; unit += share.pieces) {
            char * at = to + t * stride + 2 * UNIT * unit;
            if (Numbers::quantized && is_quantized(x.type)) { // rows consist of whole groups
                uint32_t words[UNIT / 2] = {};
                if (has_token(p, s, begin + t, end)) {
                    unpack_halves(x.type, from, unit, words);
                }
                store_words(words, at);
                continue;
            }
            float x16[UNIT] = {};
            if (has_token(p, s, begin + t, end)) {
                unpack_floats(x.type, from, unit, x16);
                GPU_UNROLL
                for (int n = 0; n < UNIT; ++n) { // other bytes follow the row
                    x16[n] = UNIT * unit + n < d ? x16[n] : 0.0f;
                }
            }
            store_unit<Numbers, Numbers::terms>(x16, at, n_tokens * stride);
        }
    }
}

} // namespace paged
