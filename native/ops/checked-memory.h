// Included before upstream's files that do not check their allocations (CMakeLists.txt): a failed allocation throws
// std::bad_alloc there.
#pragma once

#if defined(__cplusplus)
#    include <cstdlib> // undefines macros of these names
#    include <locale>  // libc++'s calls std::realloc
#endif
#include <stdlib.h>

#if defined(__cplusplus)
extern "C" {
#endif

void * velo_malloc(size_t size);
void * velo_calloc(size_t count, size_t size);
void * velo_realloc(void * memory, size_t size);

#if defined(__cplusplus)
}
#endif

#define malloc(size) velo_malloc(size)
#define calloc(count, size) velo_calloc(count, size)
#define realloc(memory, size) velo_realloc(memory, size)
