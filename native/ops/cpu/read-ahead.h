// Weights are read once for every token and in order: asks for what comes soon, so that a core waits for none of it.
#pragma once

#include <stddef.h>

#ifdef _MSC_VER
#    include <intrin.h>
#    define VELO_PREFETCH(address) _mm_prefetch((address), _MM_HINT_T0)
#    define VELO_ALWAYS_INLINE static __forceinline
#else
#    define VELO_PREFETCH(address) __builtin_prefetch(address)
#    define VELO_ALWAYS_INLINE static inline __attribute__((always_inline)) // GCC drops calls that only prefetch
#endif

// `at`, `bytes`: what is read now. What is asked for may lie behind the end of anything: a prefetch never faults.
VELO_ALWAYS_INLINE void velo_read_ahead(const void * at, size_t bytes) {
    enum { DISTANCE = 4096 }; // bytes; rates were the same to 8192, with AVX2 alone they fell below it

    for (size_t i = 0; i < bytes; i += 64) {
        VELO_PREFETCH((const char *) at + DISTANCE + i);
    }
}
