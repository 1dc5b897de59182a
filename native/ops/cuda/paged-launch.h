// Launches of a call: checks, tile sizes, kernels. On the host; nothing reads the table, so a captured CUDA graph stays
// valid for every step of the same shapes. `Launcher` launches kernels on a GPU, or on the host for tests.
#pragma once

#include "paged-tile.h"

#include <cmath>

namespace paged {

// Return the tokens of a tile: as many as fit into shared memory. The number does not depend on the batch, because the
// order of sums depends on it.
template <class KNumbers, class VNumbers> inline int tile_tokens(const params & p, int rows, int shared_bytes) {
    for (int tokens = MAX_TILE_TOKENS; tokens >= 16; tokens /= 2) {
        if (layout_of<KNumbers, VNumbers>(p, rows, tokens).total <= shared_bytes) {
            return tokens;
        }
    }
    return 0;
}

template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers, class Launcher>
bool launch_class(const params & p, row_range of, int shared_bytes, Launcher & launcher) {
    const int tokens = tile_tokens<KNumbers, VNumbers>(p, 16 * M_TILES, shared_bytes);
    if (tokens == 0) {
        return false;
    }
    const int bytes = layout_of<KNumbers, VNumbers>(p, 16 * M_TILES, tokens).total;
    launcher.template attend<M_TILES, V_PAIRS, KNumbers, VNumbers>(p, of, tokens, bytes);
    return true;
}

// Launch the kernel for sequences of few rows, the kernel for sequences of many rows, and the merge.
template <int MANY, int V_PAIRS, class KNumbers, class VNumbers, class Launcher>
bool launch_all(const params & p, int shared_bytes, Launcher & launcher) {
    if (!launch_class<1, V_PAIRS, KNumbers, VNumbers>(p, {1, 16}, shared_bytes, launcher)) {
        return false;
    }
    const row_range many = {17, INT32_MAX};
    if ((int64_t) p.n_tokens * p.group > 16 &&
        !launch_class<MANY, V_PAIRS, KNumbers, VNumbers>(p, many, shared_bytes, launcher)) {
        launch_class<1, V_PAIRS, KNumbers, VNumbers>(p, many, shared_bytes, launcher);
    }
    launcher.merge(p, START_INTS * (int) sizeof(int));
    return true;
}

template <class KNumbers, class VNumbers, class Launcher>
bool launch_by_size(const params & p, int shared_bytes, Launcher & launcher) {
    if (p.d_v <= 64) {
        return launch_all<4, 1, KNumbers, VNumbers>(p, shared_bytes, launcher);
    }
    if (p.d_v <= 128) {
        return launch_all<4, 2, KNumbers, VNumbers>(p, shared_bytes, launcher);
    }
    if (p.d_v <= 256) {
        return launch_all<2, 4, KNumbers, VNumbers>(p, shared_bytes, launcher);
    }
    return p.d_v <= 512 && launch_all<1, 8, KNumbers, VNumbers>(p, shared_bytes, launcher);
}

// Select the kernels by the type of V. Each type of K is compiled in its own file.
template <class KNumbers, class Launcher> bool launch_by_v(const params & p, int shared_bytes, Launcher & launcher) {
    switch (p.v.type) {
    case PAGE_F32:
        return launch_by_size<KNumbers, float_numbers>(p, shared_bytes, launcher);
    case PAGE_BF16:
        return launch_by_size<KNumbers, bfloat_numbers>(p, shared_bytes, launcher);
    default:
        return launch_by_size<KNumbers, half_numbers>(p, shared_bytes, launcher);
    }
}

// Launch a call. Return false if a tile of these heads does not fit into `shared_bytes`, the limit of a thread block.
template <class Launcher> bool launch(const params & p, int shared_bytes, Launcher & launcher) {
    switch (p.k.type) {
    case PAGE_F32:
        return launcher.template attend_with<float_numbers>(p, shared_bytes);
    case PAGE_BF16:
        return launcher.template attend_with<bfloat_numbers>(p, shared_bytes);
    default:
        return launcher.template attend_with<half_numbers>(p, shared_bytes);
    }
}

inline bool is_page_type(int type) {
    switch (type) {
    case PAGE_F32:
    case PAGE_F16:
    case PAGE_BF16:
    case PAGE_Q8_0:
    case PAGE_Q5_1:
    case PAGE_Q5_0:
    case PAGE_Q4_1:
    case PAGE_Q4_0:
    case PAGE_IQ4_NL:
        return true;
    default:
        return false;
    }
}

// Set the slopes of ALiBi as in ggml's soft_max: powers of one base for the heads up to a power of two, of another for
// the rest.
inline void set_bias(params & p, float max_bias) {
    p.n_slopes = 0;
    if (max_bias > 0.0f) {
        p.n_slopes        = 1 << (int) std::floor(std::log2((double) p.n_head));
        p.slope_step      = -max_bias / p.n_slopes;
        p.slope_step_rest = -max_bias / 2.0f / p.n_slopes;
    }
}

inline void set_block_size(params & p, int block_size) {
    p.block_size  = block_size;
    p.block_shift = -1;
    for (int shift = 0; shift < 31; ++shift) {
        p.block_shift = 1 << shift == block_size ? shift : p.block_shift;
    }
}

// Launches nothing, to check whether a call would be launched.
struct no_launcher {
    template <int, int, class, class> void attend(const params &, row_range, int, int) {}
    void                                   merge(const params &, int) {}
    template <class KNumbers> bool         attend_with(const params & p, int shared_bytes) {
        return launch_by_v<KNumbers>(p, shared_bytes, *this);
    }
};

// Return null if the kernels can compute this call with `shared_bytes` for a thread block, else the reason.
inline const char * refusal(const params & p, int shared_bytes) {
    if (!is_page_type(p.k.type) || !is_page_type(p.v.type)) {
        return "K and V must be f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl";
    }
    if (p.d_k <= 0 || p.d_v <= 0 || p.d_k % 8 || p.d_v % 8) {
        return "the head sizes must be multiples of 8";
    }
    if (p.d_v > 512) {
        return "the head size of V must be at most 512";
    }
    if (((uint64_t) p.k.data | p.k.head_stride | p.k.slot_stride | (uint64_t) p.v.data | p.v.head_stride |
         p.v.slot_stride) %
        2) {
        return "rows of K and V must begin at even addresses";
    }
    no_launcher nothing;
    return launch(p, shared_bytes, nothing) ? nullptr
                                            : "a tile of these heads does not fit into a block's shared memory";
}

} // namespace paged
