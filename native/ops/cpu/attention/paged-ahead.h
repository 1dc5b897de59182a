// Prefetching of the next tile of K or V while the current one is computed.
#pragma once

#include "paged-kernel.h"
#include "paged-simd.h"

namespace paged {

// Prefetches some bytes at each step of the arithmetic, in several streams of rising addresses. With three streams a
// core reads a tenth more from memory than with one, because the processor's own prefetcher works page by page.
struct read_ahead {
    static constexpr int streams = 3;

    const char * line   = nullptr; // of the first stream
    const char * goal   = nullptr; // its position after this step
    const char * end    = nullptr; // of its row
    size_t       apart  = 0;       // bytes from one stream to the next
    size_t       pace   = 0;       // bytes of a stream at each step; 0 at the end
    size_t       stride = 0;       // of rows
    size_t       gap    = 0;       // between them
    int64_t      rows   = 0;       // of a stream, this one included

    void start(const char * first, size_t width, size_t row_stride, int64_t n_rows, int64_t steps) {
        if (width == row_stride) { // one long row, cut at lines
            const size_t bytes = width * n_rows;
            apart              = bytes / streams / 64 * 64;
            width = row_stride = bytes - (streams - 1) * apart;
            rows               = 1;
        } else {
            apart = n_rows / streams * row_stride;
            rows  = n_rows - (streams - 1) * (n_rows / streams);
        }
        stride = row_stride;
        gap    = row_stride - width;
        line = goal = first;
        end         = first + width;
        pace        = width * rows / std::max<int64_t>(1, steps) + 1;
    }
    PAGED_INLINE void step() { // few instructions and registers, which the arithmetic needs
        const char * at   = line;
        const char * stop = goal + pace;
        while (at < stop) {
            PAGED_UNROLL
            for (int i = 0; i < streams; ++i) {
                prefetch_line(at + i * apart);
            }
            at += 64;
            if (at >= end) {
                if (--rows <= 0) {
                    pace = 0;
                    stop = at;
                    break;
                }
                at = end + gap;
                stop += gap;
                end += stride;
            }
        }
        line = at;
        goal = stop;
    }
};

// Prefetches the rows of the next tile, one at each step of unpacking: all at once they would wait for each other.
class rows_ahead {
public:
    rows_ahead() = default;
    rows_ahead(const ggml_tensor * t, int64_t head_kv, const tile & next)
        : row_(kv_row(t, head_kv, next.slot)), stride_(t->nb[2]), bytes_(ggml_row_size(t->type, t->ne[0])),
          left_(next.size()) {}

    PAGED_INLINE void step() {
        if (left_ == 0) {
            return;
        }
        for (size_t i = 0; i < bytes_; i += 64) {
            prefetch_line(row_ + i);
        }
        row_ += stride_;
        --left_;
    }

    void finish() {
        while (left_ > 0) {
            step();
        }
    }

private:
    const char * row_    = nullptr;
    size_t       stride_ = 0, bytes_ = 0;
    int64_t      left_ = 0;
};

} // namespace paged
