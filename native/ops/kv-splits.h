// KV splits of GPUs: a sequence with few queries and many tokens is divided, so that it occupies the whole GPU. The
// number and size of its splits depend on the sequence alone. The host's plan (block-table.c) and the kernels share
// this.
#pragma once

#include <stdint.h>

enum {
    MAX_SPLIT_QUERIES = 16,   // a sequence with more queries is not split
    MAX_KV_SPLITS     = 32,   // of a sequence
    SPLIT_ALIGN       = 64,   // tokens; the first split begins at a multiple of it
    SPLIT_SHIFT       = 8,    // base-2 logarithm of the tokens of the smallest split
    SHORT_SEQUENCE    = 2048, // tokens; longer sequences have larger splits

    VERY_FEW_ROWS = 8, // packed rows: query rows of a sequence times query heads of a KV head
    FEW_ROWS      = 16 // sequences of up to so many have kernels of their own
};

// Return the base-2 logarithm of the tokens of a split. Short splits occupy the GPU for a few short sequences; for long
// sequences, longer splits cost less. Only splits of the same size are shared, so there are few sizes.
static inline int kv_split_shift(int64_t tokens) {
    int shift = tokens <= SHORT_SEQUENCE ? SPLIT_SHIFT : SPLIT_SHIFT + 1;
    while (tokens > (int64_t) MAX_KV_SPLITS << shift) {
        ++shift;
    }
    return shift;
}

static inline int kv_splits_of(int64_t tokens) {
    const int shift = kv_split_shift(tokens);
    return tokens <= 1 << shift ? 1 : (int) ((tokens - 1) >> shift) + 1;
}

// Return the most splits of up to so many tokens: where a larger size begins, there are fewer than just before.
static inline int most_kv_splits(int64_t tokens) {
    const int now = kv_splits_of(tokens), before = tokens > SHORT_SEQUENCE ? SHORT_SEQUENCE >> SPLIT_SHIFT : 0;
    return tokens > (int64_t) MAX_KV_SPLITS << (SPLIT_SHIFT + 1) ? MAX_KV_SPLITS : now > before ? now : before;
}
