// The kernel for many query rows: a tile of K and V is unpacked to floats once and serves all of them as a product
// of matrices. A row's arithmetic does not depend on the rows beside it.
#pragma once

#include "paged-kernel.h"

namespace paged {

constexpr int64_t tile_rows = 128; // query rows of an item at most

// Rows [row_begin, row_end) of one KV head, row j*group + g being query row j of the group's head g.
struct tile_work {
    sequence    s;
    chunk_range chunks;
    int64_t     head_kv;
    int64_t     row_begin, row_end;
};

// Rows of K or V that come next, asked for one by one while others are unpacked: all together they would wait for each
// other.
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

size_t tile_scratch(const problem & p);
void   attend_tile(const problem & p, const tile_work & w, partial_store partials, char * scratch);

} // namespace paged
