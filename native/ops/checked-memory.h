// Included before upstream's files that use memory without looking whether there was any (CMakeLists.txt): in them an
// allocation that fails throws std::bad_alloc.
#pragma once

#if defined(__cplusplus)
#    include <cstdlib> // takes macros of these names away
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
