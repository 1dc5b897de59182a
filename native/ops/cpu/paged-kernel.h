// What the two kernels share: the piece of work, its scratch and its results.
#pragma once

#include "paged-problem.h"
#include "paged-rows.h"
#include "paged-softmax.h"

namespace paged {

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

// Reads ahead in address order, a few lines at each step of the arithmetic.
struct read_ahead {
    const char * line  = nullptr;
    const char * end   = nullptr;
    size_t       width = 0, stride = 0; // of the rows of a piece
    int64_t      rows     = 0;
    int          per_step = 0;

    void start(const char * first, size_t row_width, size_t row_stride, int64_t n_rows, int64_t steps) {
        if (row_width == row_stride) {
            row_width = row_stride = row_width * n_rows;
            n_rows                 = 1;
        }
        line     = first;
        end      = first + row_width;
        width    = row_width;
        stride   = row_stride;
        rows     = n_rows;
        per_step = (int) ((row_width / 64 + 1) * n_rows / std::max<int64_t>(1, steps)) + 1;
    }
    PAGED_INLINE void step() {
        const char * at = line; // few instructions: they compete with the arithmetic
        for (int64_t left = per_step * 64;;) {
            const char * stop = at + std::min<int64_t>(left, end - at);
            left -= stop - at;
            for (; at < stop; at += 64) {
                prefetch_line(at);
            }
            if (left <= 0 || rows <= 1) {
                break;
            }
            --rows;
            at = end - width + stride;
            end += stride;
        }
        line = at;
    }
};

} // namespace paged
