// The CUDA kernels. No host code, so that the runtime compiler can compile them too.
#pragma once

#include "paged-attend.h"
#include "paged-softmax.h"

namespace paged {

// Least thread blocks on a multiprocessor. More blocks would spill registers. Products without tensor cores need more
// registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
constexpr int min_blocks(int m_tiles, int v_pairs) { return m_tiles > 1 || v_pairs > 2 ? 2 : 4; }
#else
constexpr int min_blocks(int m_tiles, int v_pairs) { return m_tiles > 1 ? 2 : v_pairs > 4 ? 3 : 4; }
#endif

template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers>
__global__ void __launch_bounds__(N_THREADS, min_blocks(M_TILES, V_PAIRS))
    attend_kernel(const __grid_constant__ params p, const __grid_constant__ row_range of, int tokens) {
    extern __shared__ __align__(16) char memory[];
    attend_block<M_TILES, V_PAIRS, KNumbers, VNumbers>(p, of, tokens, memory);
}

static __global__ void __launch_bounds__(N_THREADS) merge_kernel(const __grid_constant__ params p) {
    extern __shared__ __align__(16) char memory[];
    merge_block(p, memory);
}

} // namespace paged
