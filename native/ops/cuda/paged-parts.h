// How a sequence's tokens are cut: where it has few queries, into parts at multiples of a number of tokens, so that a
// GPU is full with one sequence. What becomes of a part are rows of `partial`, which are joined in the order of
// positions. All of it follows from the sequence alone.
#pragma once

#include "paged-view.h"

namespace paged {

constexpr int FEW_QUERIES  = 16;  // of a sequence, up to which its tokens are split
constexpr int SPLIT_TOKENS = 256; // of a part, at least
constexpr int MOST_SPLITS  = 32;
constexpr int GRAIN        = 64; // tokens; parts begin at multiples of it

struct token_range {
    int begin, end;
};

GPU_BOTH int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The first token that any query attends, down to a multiple of the grain.
GPU_FN int first_token(const view & p, const sequence & s) { return first_visible(p, s.position(0)) / GRAIN * GRAIN; }

GPU_FN int n_splits(const view & p, const sequence & s) {
    if (s.n_q == 0 || s.n_q > FEW_QUERIES) {
        return 1;
    }
    const int n = ceil_div(s.length - first_token(p, s), SPLIT_TOKENS);
    return n < 1 ? 1 : n < MOST_SPLITS ? n : MOST_SPLITS;
}

// Tokens of each of `n` parts; those at the end may have fewer, or none.
GPU_FN int part_tokens(const view & p, const sequence & s, int n) {
    return ceil_div(ceil_div(s.length - first_token(p, s), n), GRAIN) * GRAIN;
}

GPU_FN token_range split_range(const view & p, const sequence & s, int split, int n) {
    const int each = part_tokens(p, s, n), begin = first_token(p, s) + split * each, end = begin + each;
    return {begin < s.length ? begin : s.length, end < s.length ? end : s.length};
}

GPU_FN int packed_rows(const view & p, const sequence & s) { return s.n_q * p.group; }

// Rows of `partial` that a sequence takes: for each query and head as many as it has parts.
GPU_FN int n_partials(const view & p, const sequence & s) {
    const int n = n_splits(p, s);
    return n == 1 ? 0 : s.n_q * p.n_head * n;
}

// A row of `partial`: the weighted sum of V, the largest score (base 2), and the sum of the weights.
GPU_BOTH int partial_floats(const view & p) { return p.d_v + 2; }

// The bound of all rows of `partial`, from shapes alone.
inline int64_t most_partials(int64_t n_tokens, int64_t n_rows, int64_t n_head, int64_t width_tokens) {
    const int64_t few    = n_rows * FEW_QUERIES;
    const int64_t splits = (width_tokens + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
    return (n_tokens < few ? n_tokens : few) * n_head * (splits < MOST_SPLITS ? splits : MOST_SPLITS);
}

} // namespace paged
