#include "pool-ahead.h"

#include "ggml-backend.h"

#include <algorithm>

#if defined(__linux__)
#    include <sys/mman.h>
#    if !defined(MADV_POPULATE_WRITE)
#        define MADV_POPULATE_WRITE 23
#    endif
#endif

static constexpr uintptr_t page = 2u << 20;

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
    regions.push_back({begin, begin + ggml_nbytes(pool), pool->nb[1], page_end(begin)});
    slot_bytes += pool->nb[1];
}

void pool_ahead::stored(int64_t highest, int64_t n_slots) {
    size_t n_pages = 1 + n_slots * slot_bytes / page;
    for (size_t i = 0; i < regions.size() && n_pages > 0; ++i) {
        region &        r    = regions[next];
        const uintptr_t used = r.begin + (highest + 1) * r.slot_bytes;
        next                 = (next + 1) % regions.size();
        r.there              = std::max(r.there, page_end(used));
        if (r.there >= r.end || used + page / 2 < r.there) {
            continue; // there is none, or it is not needed soon
        }
        if (!fetch(r.there, std::min(r.there + page, r.end))) {
            regions.clear();
            return;
        }
        r.there += page;
        --n_pages;
    }
}
