#include "pool-ahead.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>

#if defined(__linux__)
#    include <sys/mman.h>
#    if !defined(MADV_POPULATE_WRITE)
#        define MADV_POPULATE_WRITE 23
#    endif
#endif

static constexpr uintptr_t page = 2u << 20;
static constexpr uintptr_t soon = page / 4 * 3; // the first page is enough for a short chat

static uintptr_t page_end(uintptr_t address) { return (address + page - 1) / page * page; }

// Make the system provide these pages. Return false if it cannot or refuses.
static bool fetch(uintptr_t begin, uintptr_t end) {
#if defined(__linux__)
    return madvise((void *) begin, end - begin, MADV_POPULATE_WRITE) == 0;
#else
    (void) begin;
    (void) end;
    return false;
#endif
}

void pool_ahead::add(const ggml_tensor * pool) {
    if (!pool->buffer || ggml_backend_buffer_get_type(pool->buffer) != ggml_backend_cpu_buffer_type()) {
        return;
    }
    const uintptr_t begin = (uintptr_t) pool->data;
    regions.push_back({begin, begin + ggml_nbytes(pool), pool->nb[1], page_end(begin), 0});
}

// Update the region after a step. Return the share of a page that this step should fetch for it.
static double due(pool_ahead::region & r, int64_t highest, int64_t n_slots) {
    const uintptr_t used = r.begin + (highest + 1) * r.slot_bytes;
    r.fetched            = std::max(r.fetched, page_end(used));
    r.left               = r.fetched - used;
    if (r.fetched >= r.end || r.left > soon) {
        return 0;
    }
    return std::min(1.0, (double) (n_slots * r.slot_bytes) / std::max<size_t>(r.left, 1));
}

void pool_ahead::stored(int64_t highest, int64_t n_slots) {
    double pages = 0;
    for (region & r : regions) {
        pages += due(r, highest, n_slots);
    }
    for (int n = (int) std::ceil(pages); n > 0; --n) {
        region & r = *std::min_element(regions.begin(), regions.end(), [](const region & a, const region & b) {
            return a.fetched < a.end && (b.fetched >= b.end || a.left < b.left);
        });
        if (!fetch(r.fetched, std::min(r.fetched + page, r.end))) {
            regions.clear();
            return;
        }
        r.fetched += page;
        r.left += page;
    }
}
