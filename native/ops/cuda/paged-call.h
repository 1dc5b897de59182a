// What is decided about a call before any of it runs, on the host: is it one for these kernels, and what follows from
// it.
#pragma once

#include "paged-launch.h"

#include <cmath>

namespace paged {

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

// The slopes of ALiBi, as ggml's soft_max has them: powers of two numbers, one for the heads within a power of two.
inline void set_bias(view & p, float max_bias) {
    p.n_slopes = 0;
    if (max_bias > 0.0f) {
        p.n_slopes        = 1 << (int) std::floor(std::log2((double) p.n_head));
        p.slope_step      = -max_bias / p.n_slopes;
        p.slope_step_rest = -max_bias / 2.0f / p.n_slopes;
    }
}

inline void set_block_size(view & p, int block_size) {
    p.block_size  = block_size;
    p.block_shift = -1;
    for (int shift = 0; shift < 31; ++shift) {
        p.block_shift = 1 << shift == block_size ? shift : p.block_shift;
    }
}

// A machine that launches nothing: what is left of a launch is whether there would be one.
struct no_machine {
    template <int, int, class, class> void attend(const view &, row_class, int, int) {}
    void                                   merge(const view &, int) {}
    template <class KNumbers> bool         attend_with(const view & p, int shared_bytes) {
        return launch_by_v<KNumbers>(p, shared_bytes, *this);
    }
};

// Null where the kernels compute this call on a device whose blocks may have so much shared memory; else why not.
inline const char * refusal(const view & p, int shared_bytes) {
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
    no_machine nothing;
    return launch(p, shared_bytes, nothing) ? nullptr : "a block has too little shared memory for a tile of such heads";
}

} // namespace paged
