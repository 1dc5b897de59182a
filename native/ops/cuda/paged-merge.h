// What the attending kernels leave: rows whose tokens were split among blocks, and rows that no sequence covers.
#pragma once

#include "paged-attend.h"

namespace paged {

// One output row from its parts, in the order of positions.
GPU_FN void merge_row(const view & p, const float * parts, int n, int head, float * out) {
    const int stride = partial_floats(p);
    float     top = -INFINITY, total = 0.0f;
    for (int k = 0; k < n; ++k) {
        top = fmaxf(top, parts[k * stride + p.d_v]);
    }
    for (int k = 0; k < n; ++k) {
        total += parts[k * stride + p.d_v + 1] * gpu::exp2(parts[k * stride + p.d_v] - top);
    }
    const float factor = final_factor(p, head, top, total);
    for (int column = gpu::thread(); column < p.d_v; column += gpu::n_threads()) {
        float sum = 0.0f;
        for (int k = 0; k < n; ++k) {
            sum += parts[k * stride + column] * gpu::exp2(parts[k * stride + p.d_v] - top);
        }
        out[column] = sum * factor;
    }
}

// Of all threads' numbers.
GPU_FN int sum_of_block(int x, int * scratch) {
    GPU_UNROLL
    for (int mask = 16; mask; mask /= 2) {
        x += gpu::shuffle_xor(x, mask);
    }
    gpu::sync_block(); // whoever read the scratch before has done so
    if (gpu::lane() == 0) {
        scratch[gpu::warp()] = x;
    }
    gpu::sync_block();
    x = 0;
    for (int w = 0; w < gpu::n_threads() / 32; ++w) {
        x += scratch[w];
    }
    return x;
}

// Rows that no sequence covers are zero.
GPU_FN void clear_uncovered(const view & p, int * scratch) {
    int covered = 0;
    for (int row = gpu::thread(); row < p.n_rows; row += gpu::n_threads()) {
        covered += sequence_of(p, row).n_q;
    }
    if (sum_of_block(covered, scratch) == p.n_tokens) {
        return;
    }
    for (int token = gpu::block(); token < p.n_tokens; token += gpu::n_blocks()) {
        int found = 0;
        for (int row = gpu::thread(); row < p.n_rows; row += gpu::n_threads()) {
            const sequence s = sequence_of(p, row);
            found += token >= s.q0 && token - s.q0 < s.n_q;
        }
        if (sum_of_block(found, scratch) == 0) {
            for (int i = gpu::thread(); i < p.n_head * p.d_v; i += gpu::n_threads()) {
                p.out[(int64_t) token * p.n_head * p.d_v + i] = 0.0f;
            }
        }
    }
}

// What the attending kernels left: rows whose tokens were split, and those of no sequence.
GPU_FN void merge_block(const view & p, char * memory) {
    const row_starts   starts = starts_in(p, (int *) memory);
    const merges_asked asks   = {p};
    find_starts(p, asks, starts);
    for (int number = gpu::block(); number < starts.items[starts.n]; number += gpu::n_blocks()) {
        const row_place at = place_of(asks, starts, number);
        const sequence  s  = sequence_of(p, at.row);
        const int       i = number - at.before.items, n = n_splits(p, s);
        merge_row(p, p.partial + ((int64_t) at.before.partials + (int64_t) i * n) * partial_floats(p), n, i % p.n_head,
                  p.out + ((int64_t) s.q0 * p.n_head + i) * p.d_v);
    }
    clear_uncovered(p, (int *) memory);
}

} // namespace paged
