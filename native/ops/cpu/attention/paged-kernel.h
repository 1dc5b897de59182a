// What both kernels share: chunks and tiles, scratch memory, partial results.
#pragma once

#include "paged-problem.h"
#include "paged-rows.h"
#include "paged-softmax.h"

namespace paged {

constexpr int64_t tile_rows = 128; // query rows of an item of the tile kernel at most

// Chunks [first, last) of one sequence.
struct chunk_range {
    int64_t first, last;
};

// Partial results of single chunks: one for each chunk, query row and head of the sequence.
struct partial_store {
    char * base = nullptr; // null: each item merges its own chunks
    size_t stride;         // bytes of one partial: largest, total, sum[d_v]

    static size_t bytes(int64_t d_v) { return (2 + d_v + 15) / 16 * 16 * sizeof(float); }

    float * at(const problem & p, const sequence & s, int64_t chunk, int64_t j, int64_t head) const {
        return (float *) (base + (((chunk - first_chunk(p, s)) * s.n_q + j) * p.n_head + head) * stride);
    }
    static int64_t first_chunk(const problem & p, const sequence & s) {
        return first_visible(p, s.position(0)) / chunk_tokens;
    }
};

// Allocates from a thread's scratch, in whole cache lines. An arena at address 0 measures the size.
struct arena {
    uintptr_t next;

    template <class T> T * take(int64_t n) {
        T * memory = (T *) next;
        next += (n * sizeof(T) + 63) / 64 * 64;
        return memory;
    }
};

// Stores a row's result of one chunk until all chunks are computed.
inline void store_partial(const partial_store & partials, const problem & p, const sequence & s, int64_t chunk,
                          int64_t j, int64_t head, weight_sum weight, const float * sum) {
    float * to = partials.at(p, s, chunk, j, head);
    to[0]      = weight.largest;
    to[1]      = weight.total;
    memcpy(to + 2, sum, p.d_v * sizeof(float));
}

// Tokens [begin, end) of a sequence in neighbouring slots.
struct tile {
    int64_t begin, end, slot;
    int64_t size() const { return end - begin; }
};

// Returns the tile at position t: a whole one if block_size is a multiple of tile_tokens.
inline tile tile_at(const problem & p, const sequence & s, int64_t t, int64_t end) {
    const int64_t block_size = p.params.block_size;
    const int64_t stop       = std::min({end, (t / tile_tokens + 1) * tile_tokens, (t / block_size + 1) * block_size});
    return {t, stop, s.slot(t, block_size)};
}

// The range of a tile in the scores or softmax weights of a chunk.
struct tile_span {
    int64_t offset;
    int64_t n;
};

inline const char * kv_row(const ggml_tensor * t, int64_t head, int64_t slot) {
    return (const char *) t->data + head * t->nb[1] + slot * t->nb[2];
}

} // namespace paged
