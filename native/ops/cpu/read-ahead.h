// Prefetching of weights, which are read once for every token and in order.
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

// Prefetches what follows `bytes` bytes at `at`, which are read now. Addresses may be past the end of the memory,
// because a prefetch never faults.
VELO_ALWAYS_INLINE void velo_read_ahead(const void * at, size_t bytes) {
    enum { DISTANCE = 4096 }; // bytes; speeds were the same up to 8192, and with AVX2 alone lower below 4096

    for (size_t i = 0; i < bytes; i += 64) {
        VELO_PREFETCH((const char *) at + DISTANCE + i);
    }
}
