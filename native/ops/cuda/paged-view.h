// One call of the operator as a kernel takes it: pointers, strides in bytes, and what follows from shapes alone.
#pragma once

#include "gpu.h"

#include <cstdint>

namespace paged {

// As ggml numbers them; checked where both are known.
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

// The integers in front of the block ids of a row of the table.
enum row_field { ROW_Q0 = 0, ROW_NQ = 1, ROW_LENGTH = 2, ROW_SHARED = 3, ROW_HEADER = 4 };

struct pages { // K or V of one layer
    const char * data;
    int64_t      head_stride, slot_stride;
    int          type;
    int          row_bytes; // of a head
};

struct view {
    const char *    q;
    int64_t         q_head_stride, q_token_stride;
    pages           k, v;
    const int32_t * table;
    int64_t         table_stride; // integers
    const float *   sinks;        // null: none
    float *         out;          // [n_tokens][n_head][d_v]
    float *         partial;      // of those whose tokens are split, see paged-split.h

    int   d_k, d_v;
    int   n_head, n_head_kv, group;
    int   n_tokens;                // query rows of the call
    int   n_rows;                  // of the table
    int   v_is_k;                  // V is the beginning of K: it is read once
    int   block_size, block_shift; // of which it is a power of two, or -1
    int   window, window_type;
    float scale, softcap;
    float slope_step, slope_step_rest; // ALiBi: logarithms (base 2) of the first `n_slopes` heads, and of the others
    int   n_slopes;                    // 0: no bias
    int   fast;                        // products of many rows may be of numbers of 16 bits, rounded once
};

struct sequence {
    int             q0, n_q, length;
    int             shared; // leading blocks that are those of the row before, as far as they were looked for
    const int32_t * blocks;

    GPU_FN int position(int j) const { return length - n_q + j; }
};

GPU_FN sequence sequence_of(const view & p, int row) {
    const int32_t * entry = p.table + row * p.table_stride;
    return {entry[ROW_Q0], entry[ROW_NQ], entry[ROW_LENGTH], entry[ROW_SHARED], entry + ROW_HEADER};
}

// The first position that a query at `position` attends; the last one is its own.
GPU_FN int first_visible(const view & p, int position) {
    if (p.window_type == WINDOW_SLIDING) {
        return position < p.window ? 0 : position - p.window + 1;
    }
    return p.window_type == WINDOW_CHUNKED ? position / p.window * p.window : 0;
}

constexpr float LOG2E = 1.4426950408889634f;

// What the weighted sum of a row is multiplied by; a sink takes its share of the weights.
GPU_FN float final_factor(const view & p, int head, float highest, float total) {
    if (p.sinks == nullptr) {
        return 1.0f / total;
    }
    const float sink = p.sinks[head] * LOG2E, top = fmaxf(highest, sink);
    const float own = gpu::exp2(highest - top);
    return own / (total * own + gpu::exp2(sink - top));
}

GPU_FN float alibi_slope(const view & p, int head) {
    if (p.n_slopes == 0) {
        return 0.0f;
    }
    return gpu::exp2(head < p.n_slopes ? p.slope_step * (float) (head + 1)
                                       : p.slope_step_rest * (float) (2 * (head - p.n_slopes) + 1));
}

} // namespace paged
