#include "large-pages.h"

#include <stdint.h>

#if defined(__linux__)
#    include <sys/mman.h>
#endif

void ggml_prefer_large_pages(void * memory, size_t size) {
#if defined(__linux__)
    const uintptr_t large = 2u << 20; // of x86-64 and 64-bit ARM
    const uintptr_t begin = ((uintptr_t) memory + large - 1) / large * large;
    const uintptr_t end   = ((uintptr_t) memory + size) / large * large;
    if (begin < end) {
        madvise((void *) begin, end - begin, MADV_HUGEPAGE);
    }
#else
    (void) memory;
    (void) size;
#endif
}
