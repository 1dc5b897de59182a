// One call of the operator, as plain data: sizes, strides, parameters, and the slots of a sequence's tokens.
#pragma once

#include "ggml.h"
#include "paged-attn.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace paged {

struct problem {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const ggml_tensor * table;
    const float *       sinks; // null: none
    const ggml_tensor * dst;

    ggml_paged_attn_params params;

    int64_t d_k, d_v;
    int64_t n_head, n_head_kv;
    int64_t group; // query heads of a KV head
    int64_t n_tokens;
    int64_t n_rows; // of the table

    explicit problem(const ggml_tensor * dst)
        : q(dst->src[0]), k(dst->src[1]), v(dst->src[2]), table(dst->src[3]),
          sinks(dst->src[4] ? (const float *) dst->src[4]->data : nullptr), dst(dst), d_k(k->ne[0]), d_v(v->ne[0]),
          n_head(q->ne[1]), n_head_kv(k->ne[1]), group(n_head / n_head_kv), n_tokens(q->ne[2]), n_rows(table->ne[1]) {
        memcpy(&params, dst->op_params, sizeof(params));
    }

    const float * query(int64_t head, int64_t token) const {
        return (const float *) ((const char *) q->data + head * q->nb[1] + token * q->nb[2]);
    }
    float * output(int64_t head, int64_t token) const {
        return (float *) ((char *) dst->data + head * dst->nb[1] + token * dst->nb[2]);
    }
    bool deterministic() const { return params.flags & GGML_PAGED_ATTN_DETERMINISTIC; }
    bool fast() const { return params.flags & GGML_PAGED_ATTN_FAST; }
};

// A row of the table.
struct sequence {
    int64_t         q0;     // its first query row
    int64_t         n_q;    // its query rows
    int64_t         length; // its tokens after this step
    int64_t         first;  // its blocks before blocks[0], all before the window of the first query
    const int32_t * blocks;

    int64_t position(int64_t j) const { return length - n_q + j; }
    int64_t slot(int64_t position, int64_t block_size) const {
        return (int64_t) blocks[position / block_size - first] * block_size + position % block_size;
    }
};

inline sequence sequence_of(const problem & p, int64_t row) {
    const int32_t * entry = (const int32_t *) ((const char *) p.table->data + row * p.table->nb[1]);
    return {entry[GGML_PAGED_ATTN_Q0], entry[GGML_PAGED_ATTN_NQ], entry[GGML_PAGED_ATTN_KV],
            entry[GGML_PAGED_ATTN_FIRST], entry + GGML_PAGED_ATTN_HEADER};
}

// Returns the first position that a query at `position` attends. The last one is its own.
inline int64_t first_visible(const problem & p, int64_t position) {
    switch (p.params.window_type) {
    case GGML_PAGED_ATTN_WINDOW_SLIDING:
        return std::max<int64_t>(0, position - p.params.window + 1);
    case GGML_PAGED_ATTN_WINDOW_CHUNKED:
        return position / p.params.window * p.params.window;
    default:
        return 0;
    }
}

// Returns the slope of ALiBi, as in ggml's soft_max; 0 without a bias.
inline float alibi_slope(const problem & p, int64_t head) {
    if (p.params.max_bias <= 0.0f) {
        return 0.0f;
    }
    const int64_t n  = int64_t(1) << (int64_t) floor(log2((double) p.n_head)); // the largest power of two within n_head
    const float   m0 = powf(2.0f, -p.params.max_bias / n);
    const float   m1 = powf(2.0f, -p.params.max_bias / 2.0f / n);
    return head < n ? powf(m0, head + 1) : powf(m1, 2 * (head - n) + 1);
}

} // namespace paged
