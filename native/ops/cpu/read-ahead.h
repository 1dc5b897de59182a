// Prefetching of weights, which are read once for every token and in order.
#pragma once

#include <stddef.h>

#if defined(_MSC_VER) && !defined(__clang__)
#    include <intrin.h>
#    define VELO_PREFETCH(address) _mm_prefetch((address), _MM_HINT_T0)
#    define VELO_ALWAYS_INLINE static __forceinline
#else
#    define VELO_PREFETCH(address) __builtin_prefetch(address)
#    define VELO_ALWAYS_INLINE static inline __attribute__((always_inline)) // GCC drops calls that only prefetch
#endif

// Intel's cores since Golden Cove read weights some 10 % faster if these are prefetched to the second level, from
// farther ahead. A build is for them if it has AMX, or AVX-VNNI without AVX-512.
#if defined(__GNUC__) && (defined(__AMX_INT8__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)))
#    define VELO_PREFETCH_WEIGHTS(address) __builtin_prefetch(address, 0, 2)
enum { VELO_WEIGHTS_AHEAD = 16384 }; // bytes; 4096, 8192 and 32768 were slower
#else
#    define VELO_PREFETCH_WEIGHTS(address) VELO_PREFETCH(address)
enum { VELO_WEIGHTS_AHEAD = 4096 }; // bytes; speeds were the same up to 8192, and with AVX2 alone lower below 4096
#endif

// Prefetches weights. Addresses may be past the end of the memory, because a prefetch never faults.
VELO_ALWAYS_INLINE void velo_prefetch(const char * at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        VELO_PREFETCH_WEIGHTS(at + i);
    }
}

// Prefetches what follows `bytes` bytes at `at`, which are read now.
VELO_ALWAYS_INLINE void velo_read_ahead(const void * at, size_t bytes) {
    velo_prefetch((const char *) at + VELO_WEIGHTS_AHEAD, bytes);
}
