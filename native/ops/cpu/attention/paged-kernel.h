// What the two kernels share: the piece of work, its scratch and its results.
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

// Where the partial results of single chunks go: one for each chunk, query row and head of the sequence.
struct partial_store {
    char * base = nullptr; // null: chunks are joined where they are computed
    size_t stride;         // bytes of one partial: largest, total, sum[d_v]

    static size_t bytes(int64_t d_v) { return (2 + d_v + 15) / 16 * 16 * sizeof(float); }

    float * at(const problem & p, const sequence & s, int64_t chunk, int64_t j, int64_t head) const {
        return (float *) (base + (((chunk - first_chunk(p, s)) * s.n_q + j) * p.n_head + head) * stride);
    }
    static int64_t first_chunk(const problem & p, const sequence & s) {
        return first_visible(p, s.position(0)) / chunk_tokens;
    }
};

// Takes memory off a thread's scratch, each piece on lines of its own. From address 0 it measures.
struct arena {
    uintptr_t next;

    template <class T> T * take(int64_t n) {
        T * piece = (T *) next;
        next += (n * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};

// A row's result for one chunk, kept until all chunks are there.
inline void keep(const partial_store & partials, const problem & p, const sequence & s, int64_t chunk, int64_t j,
                 int64_t head, weight_sum weight, const float * sum) {
    float * to = partials.at(p, s, chunk, j, head);
    to[0]      = weight.largest;
    to[1]      = weight.total;
    memcpy(to + 2, sum, p.d_v * sizeof(float));
}

// Tokens [begin, end) of a sequence that lie one after the other.
struct tile {
    int64_t begin, end, slot;
    int64_t size() const { return end - begin; }
};

// The tile at position t: whole where blocks are multiples of a tile.
inline tile tile_at(const problem & p, const sequence & s, int64_t t, int64_t end) {
    const int64_t block_size = p.params.block_size;
    const int64_t stop       = std::min({end, (t / tile_tokens + 1) * tile_tokens, (t / block_size + 1) * block_size});
    return {t, stop, s.slot(t, block_size)};
}

// A tile's scores or weights within those of a chunk.
struct tile_span {
    int64_t offset;
    int64_t n;
};

inline const char * kv_row(const ggml_tensor * t, int64_t head, int64_t slot) {
    return (const char *) t->data + head * t->nb[1] + slot * t->nb[2];
}

} // namespace paged
