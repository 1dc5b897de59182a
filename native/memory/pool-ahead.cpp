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
static constexpr uintptr_t soon = page / 4 * 3; // a short chat does with the first page

static uintptr_t page_end(uintptr_t address) { return (address + page - 1) / page * page; }

// False where the system cannot, or will not.
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

// Takes note of what is stored. Returns how much of a page this step should fetch for the region.
static double due(pool_ahead::region & r, int64_t highest, int64_t n_slots) {
    const uintptr_t used = r.begin + (highest + 1) * r.slot_bytes;
    r.there              = std::max(r.there, page_end(used));
    r.left               = r.there - used;
    if (r.there >= r.end || r.left > soon) {
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
            return a.there < a.end && (b.there >= b.end || a.left < b.left);
        });
        if (!fetch(r.there, std::min(r.there + page, r.end))) {
            regions.clear();
            return;
        }
        r.there += page;
        r.left += page;
    }
}
