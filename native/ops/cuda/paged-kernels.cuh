// The CUDA kernels. No host code, so that the runtime compiler can compile them too.
#pragma once

#include "paged-kernel.h"

namespace paged {

// Return the least thread blocks on a multiprocessor. More blocks would spill registers. Products without tensor cores
// need more registers, and blocks of eight warps have room for one. `type`: of the rows, if the kernel is for one type.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int min_blocks(int, int, int, int) { return 2; }
#else
constexpr int min_blocks(int by, int m_tiles, int v_tiles, int type) {
    if (by != BY_TOKENS) {
        return by == BY_COLUMNS && m_tiles > 1 ? 1 : 2;
    }
    if (m_tiles == 1 && v_tiles == 8) {
        return type == PAGE_Q4_0 ? 4 : type == PAGE_Q8_0 ? 3 : 2;
    }
    return type != -1 && m_tiles * v_tiles <= 4 ? 3 : 2;
}
#endif

template <int BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
__global__ void __launch_bounds__(kernel_threads<(division) BY, M_TILES, V_TILES, KNumbers, VNumbers>,
                                  min_blocks(BY, M_TILES, V_TILES, KNumbers::type))
    attend_kernel(const __grid_constant__ params p, const __grid_constant__ row_range of, int tokens) {
    extern __shared__ __align__(16) char memory[];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    // see has_all_kernels
    constexpr bool launched = KNumbers::size == 0 && !(BY == BY_COLUMNS && M_TILES > 1);
#else
    constexpr bool launched = true;
#endif
    if constexpr (launched) {
        attend_block<(division) BY, M_TILES, V_TILES, KNumbers, VNumbers>(p, of, tokens, memory);
    }
}

static __global__ void __launch_bounds__(32 * MERGE_WARPS, 4) merge_kernel(const __grid_constant__ params p) {
    merge_block(p);
}

} // namespace paged
