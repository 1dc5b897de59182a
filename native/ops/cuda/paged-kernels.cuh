// The kernels. Nothing of the host is here: any compiler for devices takes them.
#pragma once

#include "paged-attend.h"
#include "paged-merge.h"

namespace paged {

// Blocks that a multiprocessor has registers for, at least: with more of them registers would go to memory. Products
// without tensor cores take more of them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
constexpr int least_blocks(int m_tiles, int v_pairs) { return m_tiles > 1 || v_pairs > 2 ? 2 : 4; }
#else
constexpr int least_blocks(int m_tiles, int v_pairs) { return m_tiles > 1 ? 2 : v_pairs > 4 ? 3 : 4; }
#endif

template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers>
__global__ void __launch_bounds__(N_THREADS, least_blocks(M_TILES, V_PAIRS))
    attend_kernel(const __grid_constant__ view p, const __grid_constant__ row_class of, int tokens) {
    extern __shared__ __align__(16) char memory[];
    attend_block<M_TILES, V_PAIRS, KNumbers, VNumbers>(p, of, tokens, memory);
}

static __global__ void __launch_bounds__(N_THREADS) merge_kernel(const __grid_constant__ view p) {
    extern __shared__ __align__(16) char memory[];
    merge_block(p, memory);
}

} // namespace paged
