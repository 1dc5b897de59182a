// Sizes, checks and runs of blocks. Private to this folder.
#pragma once

#include "paged-state.h"

size_t paged_block_bytes(const llama_paged & paged, const ggml_tensor * pool); // in one pool
size_t paged_block_bytes(const llama_paged & paged);                           // in all of them

// Throw if a block is not in the pool, or not in host memory.
void paged_check_blocks(const llama_paged & paged, const int32_t * blocks, int32_t n);
void paged_check_swap_blocks(const llama_paged & paged, const int32_t * swap_blocks, int32_t n);

// Return the blocks that a saved recurrent state takes.
uint32_t paged_state_blocks(const llama_paged & paged);

// Call f(first of a, first of b, length) for each run in which both lists count up by one.
template <typename F> void for_each_run(const int32_t * a, const int32_t * b, int32_t n, F && f) {
    for (int32_t first = 0, i = 1; i <= n; ++i) {
        if (i == n || a[i] != a[i - 1] + 1 || b[i] != b[i - 1] + 1) {
            f(a[first], b[first], (size_t) (i - first));
            first = i;
        }
    }
}
