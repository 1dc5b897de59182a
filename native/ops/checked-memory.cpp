#include "checked-memory.h"

#include <new>

#undef malloc
#undef calloc
#undef realloc

static void * checked(void * memory, bool wanted) {
    if (!memory && wanted) {
        throw std::bad_alloc();
    }
    return memory;
}

extern "C" void * velo_malloc(size_t size) { return checked(std::malloc(size), size > 0); }

extern "C" void * velo_calloc(size_t count, size_t size) {
    return checked(std::calloc(count, size), count > 0 && size > 0);
}

extern "C" void * velo_realloc(void * memory, size_t size) { return checked(std::realloc(memory, size), size > 0); }
