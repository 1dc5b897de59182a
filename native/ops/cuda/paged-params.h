// Parameters of one call of the operator: pointers, strides in bytes, shapes, and the sequences of the block table.
#pragma once

#include "../kv-splits.h"
#include "gpu.h"

#include <cstdint>

namespace paged {

// ggml's numbers of types; paged-attn.cu checks them.
enum page_type {
    PAGE_F32    = 0,
    PAGE_F16    = 1,
    PAGE_Q4_0   = 2,
    PAGE_Q4_1   = 3,
    PAGE_Q5_0   = 6,
    PAGE_Q5_1   = 7,
    PAGE_Q8_0   = 8,
    PAGE_IQ4_NL = 20,
    PAGE_BF16   = 30
};

enum window_kind { WINDOW_NONE = 0, WINDOW_SLIDING = 1, WINDOW_CHUNKED = 2 };

// Integers before the block ids in a row of the table, as in paged-attn.h. The ones from ROW_VERY_FEW on are sums over
// this row and all rows before it.
enum row_field {
    ROW_Q0        = 0,
    ROW_NQ        = 1,
    ROW_LENGTH    = 2,
    ROW_FIRST     = 4,
    ROW_BEGIN     = 5,
    ROW_SHIFT     = 6,
    ROW_COMMON    = 7,
    ROW_VERY_FEW  = 8,
    ROW_FEW       = 9,
    ROW_TILES_16  = 10,
    ROW_TILES_64  = 11,
    ROW_TILES_128 = 12,
    ROW_SAVED_8   = 13,
    ROW_SAVED_16  = 14,
    ROW_SAVED_64  = 15,
    ROW_SAVED_128 = 16,
    ROW_MERGED    = 17,
    ROW_PARTIALS  = 18,
    ROW_QUERIES   = 19,
    ROW_HEADER    = 20
};

struct pages { // K or V of one layer
    const char * data;
    int64_t      head_stride, slot_stride;
    int          type;
    int          row_bytes;     // of a head
    int          aligned;       // all rows begin at multiples of sixteen bytes
    int          steps_aligned; // rows of consecutive slots begin at the same place of a piece of sixteen bytes
    int          raw_stride;    // of rows in shared memory, which begin where they do in a piece
    int          pieces;        // lanes that copy a row together, each a piece; 0: rows are copied one by one
};

struct params {
    const char *    q;
    int64_t         q_head_stride, q_token_stride;
    pages           k, v;
    const int32_t * table;
    int64_t         table_stride; // integers
    const float *   sinks;        // null: none
    float *         out;          // [n_tokens][n_head][d_v]
    float *         partial;      // partial results of KV splits, see paged-softmax.h

    int   d_k, d_v;
    int   n_head, n_head_kv, group;
    int   n_tokens;                // query rows of the call
    int   n_rows;                  // of `table`
    int   first_row, end_row;      // of `table`, for which kernels compute: all, or some if `partial` is too small
    int   v_is_k;                  // V is a view of K and read once
    int   block_size, block_shift; // block_size = 1 << block_shift, or -1
    int   groups_whole;            // sixteen tokens from a multiple of sixteen on are in one block
    int   window, window_type;
    float scale, softcap;
    float slope_step,
        slope_step_rest; // ALiBi: base-2 logarithms of the slopes of the first `n_slopes` heads and of the others
    int n_slopes;        // 0: no bias
    int fast;            // products of many packed rows may use one 16-bit term
    int single;          // no sequence has more than one query
    int prefixes;        // many sequences share blocks with the one before
};

struct sequence {
    int             q0, n_q, length;
    int             first; // blocks before blocks[0], all before the window of the first query
    const int32_t * blocks;

    GPU_FN int position(int j) const { return length - n_q + j; }
};

GPU_FN const int32_t * row_at(const params & p, int row) { return p.table + row * p.table_stride; }
GPU_FN sequence        sequence_of(const params & p, int row) {
    const int32_t * entry = row_at(p, row);
    return {entry[ROW_Q0], entry[ROW_NQ], entry[ROW_LENGTH], entry[ROW_FIRST], entry + ROW_HEADER};
}

// Return a sum over the rows before this one.
GPU_FN int sum_before(const params & p, int row, row_field sum) { return row > 0 ? row_at(p, row - 1)[sum] : 0; }

// Return the first position that a query at `position` attends. The last one is its own.
GPU_FN int first_visible(const params & p, int position) {
    if (p.window_type == WINDOW_SLIDING) {
        return position < p.window ? 0 : position - p.window + 1;
    }
    return p.window_type == WINDOW_CHUNKED ? position / p.window * p.window : 0;
}

constexpr float LOG2E = 1.4426950408889634f;

GPU_FN float alibi_slope(const params & p, int head) {
    if (p.n_slopes == 0) {
        return 0.0f;
    }
    return gpu::exp2(head < p.n_slopes ? p.slope_step * (float) (head + 1)
                                       : p.slope_step_rest * (float) (2 * (head - p.n_slopes) + 1));
}

GPU_BOTH constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
GPU_BOTH constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

constexpr int PAD        = 16; // bytes after a row of numbers in shared memory: eight rows are in different banks
constexpr int PIECE      = 16; // bytes that a copy to shared memory has
constexpr int READ_AHEAD = 2;  // bytes after a row that may be read, and are ignored

GPU_BOTH constexpr int pieces_of(int row_bytes, int before) { return ceil_div(before + row_bytes, PIECE); }

// Return the bytes from row to row in shared memory, of rows that begin up to `before` bytes after a piece: an odd
// number of pieces, so that eight rows are in different banks.
GPU_BOTH constexpr int raw_stride_of(int row_bytes, int before) { return PIECE * (pieces_of(row_bytes, before) | 1); }

// Return the lanes that copy a row of this many pieces together, a power of two.
GPU_BOTH constexpr int lanes_of_row(int pieces) {
    return pieces <= 2 || pieces > 32 ? 0 : pieces <= 4 ? 4 : pieces <= 8 ? 8 : pieces <= 16 ? 16 : 32;
}

inline pages make_pages(const void * data, int64_t head_stride, int64_t slot_stride, int type, int row_bytes) {
    const bool aligned = ((uint64_t) data | (uint64_t) head_stride | (uint64_t) slot_stride) % PIECE == 0;
    const int  before  = aligned ? 0 : PIECE - 2; // at most: rows begin at even addresses
    return {(const char *) data,
            head_stride,
            slot_stride,
            type,
            row_bytes,
            aligned,
            slot_stride % PIECE == 0,
            raw_stride_of(row_bytes + READ_AHEAD, before),
            lanes_of_row(pieces_of(row_bytes, before))};
}

} // namespace paged
