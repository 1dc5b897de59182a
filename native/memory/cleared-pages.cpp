#include "cleared-pages.h"

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#    include <sys/mman.h>
#    include <unistd.h>
#endif

bool clear_untouched(ggml_backend_buffer_t buffer) {
#if defined(__linux__)
    if (ggml_backend_buffer_get_type(buffer) != ggml_backend_cpu_buffer_type()) {
        return false;
    }
    const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t base  = (uintptr_t) ggml_backend_buffer_get_base(buffer);
    const uintptr_t last  = base + ggml_backend_buffer_get_size(buffer);
    const uintptr_t begin = (base + page - 1) / page * page;
    const uintptr_t end   = last / page * page;
    if (begin >= end || madvise((void *) begin, end - begin, MADV_DONTNEED) != 0) {
        return false;
    }
    memset((void *) base, 0, begin - base);
    memset((void *) end, 0, last - end);
    return true;
#else
    (void) buffer;
    return false;
#endif
}
