#include "cleared-pages.h"

#include <cstdint>

#if defined(__linux__)
#    include <sys/mman.h>
#    include <unistd.h>
#endif

void give_back_cleared_pages(ggml_backend_buffer_t buffer) {
#if defined(__linux__)
    if (ggml_backend_buffer_get_type(buffer) != ggml_backend_cpu_buffer_type()) {
        return;
    }
    const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t base  = (uintptr_t) ggml_backend_buffer_get_base(buffer);
    const uintptr_t begin = (base + page - 1) / page * page;
    const uintptr_t end   = (base + ggml_backend_buffer_get_size(buffer)) / page * page;
    if (begin < end) {
        madvise((void *) begin, end - begin, MADV_DONTNEED);
    }
#else
    (void) buffer;
#endif
}
