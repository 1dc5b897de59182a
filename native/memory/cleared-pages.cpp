#include "cleared-pages.h"

#include <cstdint>
#include <cstring>
#include <new>

#if defined(_WIN32)
#    include <windows.h>
#else
#    include <sys/mman.h>
#    include <unistd.h>
#endif

// Replace whole pages by zeroed ones. Return false if the system refuses.
static bool renew(void * pages, size_t size) {
#if defined(_WIN32)
    MEMORY_BASIC_INFORMATION region = {};
    if (VirtualQuery(pages, &region, sizeof(region)) == 0 || region.State != MEM_COMMIT || region.RegionSize < size ||
        !VirtualFree(pages, size, MEM_DECOMMIT)) {
        return false;
    }
    if (!VirtualAlloc(pages, size, MEM_COMMIT, PAGE_READWRITE)) { // another process took the memory
        throw std::bad_alloc();
    }
    return true;
#elif defined(__linux__)
    return madvise(pages, size, MADV_DONTNEED) == 0;
#else
    return mmap(pages, size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANON, -1, 0) == pages;
#endif
}

static uintptr_t page_size() {
#if defined(_WIN32)
    SYSTEM_INFO system;
    GetSystemInfo(&system);
    return system.dwPageSize;
#else
    return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
#endif
}

bool clear_untouched(ggml_backend_buffer_t buffer) {
    if (ggml_backend_buffer_get_type(buffer) != ggml_backend_cpu_buffer_type()) {
        return false;
    }
    const uintptr_t page  = page_size();
    const uintptr_t base  = (uintptr_t) ggml_backend_buffer_get_base(buffer);
    const uintptr_t last  = base + ggml_backend_buffer_get_size(buffer);
    const uintptr_t begin = (base + page - 1) / page * page;
    const uintptr_t end   = last / page * page;
    if (begin >= end || !renew((void *) begin, end - begin)) {
        return false;
    }
    memset((void *) base, 0, begin - base);
    memset((void *) end, 0, last - end);
    return true;
}
