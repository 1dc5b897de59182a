// Launches of a call: checks, tile sizes, kernels. On the host; nothing reads the table, so a captured CUDA graph stays
// valid for every step of the same shapes. `Launcher` launches kernels on a GPU, or on the host for tests.
#pragma once

#include "paged-kernel.h"

#include <cmath>
#include <initializer_list>
#include <type_traits>

namespace paged {

constexpr int SYSTEM_BYTES = 1024; // of shared memory, which the system takes for each thread block

// Return the tokens of an owner's tile, 0 if none fits into a thread block's `shared_bytes`: as many as leave room for
// a second block on the multiprocessor, else as many as fit. The number does not depend on the batch, because the order
// of sums depends on it.
template <class KNumbers, class VNumbers>
inline int tile_tokens(const params & p, division by, int rows, int shared_bytes) {
    const int parts = n_warps(by, rows) / ceil_div(rows, 16); // by columns, warps with the same rows have a group each
    const int most  = by == BY_TOKENS ? GROUP : by == BY_ROWS ? MAX_TILE_TOKENS : GROUP * parts;
    const int least = by == BY_ROWS ? 2 * GROUP : GROUP;
    for (const int limit : {(shared_bytes - SYSTEM_BYTES) / 2, shared_bytes}) {
        for (int tokens = most; tokens >= least; tokens /= 2) {
            if (layout_of<KNumbers, VNumbers>(p, by, rows, tokens).total <= limit) {
                return tokens;
            }
        }
    }
    return 0;
}

template <division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers, class Launcher>
bool launch_kernel(const params & p, row_range of, int shared_bytes, Launcher & launcher) {
    constexpr int rows   = kernel_of<BY, M_TILES, V_TILES, KNumbers, VNumbers>::work::ROWS;
    const int     tokens = tile_tokens<KNumbers, VNumbers>(p, BY, rows, shared_bytes);
    if (tokens == 0) {
        return false;
    }
    const int bytes = layout_of<KNumbers, VNumbers>(p, BY, rows, tokens).total;
    launcher.template attend<BY, M_TILES, V_TILES, KNumbers, VNumbers>(p, of, tokens, bytes);
    return true;
}

// Launch a kernel for sums or tokens that are too large for others. Latent attention of 64 heads or more has tiles of
// 64 rows, of which each sequence fills one or more.
template <class KNumbers, class VNumbers, class Launcher>
bool launch_wide(const params & p, row_range of, int shared_bytes, Launcher & launcher) {
    if constexpr (KNumbers::size != 0) {
        return false; // kernels for any size have it
    } else {
        constexpr bool one_term = std::is_same<KNumbers, VNumbers>::value && KNumbers::terms == 1;
        if constexpr (one_term) { // floats are too large
            if (p.v_is_k && p.group >= 64 && launcher.has_all_kernels() &&
                launch_kernel<BY_COLUMNS, 4, 4, KNumbers, VNumbers>(p, of, shared_bytes, launcher)) {
                return true;
            }
        }
        return launch_kernel<BY_COLUMNS, 1, 8, KNumbers, VNumbers>(p, of, shared_bytes, launcher);
    }
}

// Return whether all products are of f16 and have one term, which takes fewer registers.
template <class KNumbers, class VNumbers> constexpr bool is_light() {
    return KNumbers::quantized && VNumbers::quantized;
}

// Launch a kernel for sequences of few rows. Sums of 256 columns and products of several terms need too many registers.
template <int Q_TILES, int V_TILES, class KNumbers, class VNumbers, class Launcher>
bool launch_few(const params & p, row_range few, int shared_bytes, Launcher & launcher) {
    if constexpr (V_TILES <= 8 || is_light<KNumbers, VNumbers>()) {
        if (launch_kernel<BY_TOKENS, Q_TILES, V_TILES, KNumbers, VNumbers>(p, few, shared_bytes, launcher)) {
            return true;
        }
    }
    return launch_wide<KNumbers, VNumbers>(p, few, shared_bytes, launcher);
}

static_assert(VERY_FEW_ROWS == Q_TILE && FEW_ROWS == 2 * Q_TILE, "the kernels for few rows have one tile or two");

// Launch the kernels for sequences of very few, few and many rows, and the merge. Only kernels that may have a
// sequence: each has `group` rows or more, and exactly so many if all have one query. Shared prefixes want tiles that
// hold the rows of several sequences, if these fit: another kernel would have other bits. Two tiles of queries and 256
// columns need too many registers.
template <int M_TILES, int V_TILES, class KNumbers, class VNumbers, class Launcher>
bool launch_all(const params & p, int shared_bytes, Launcher & launcher) {
    constexpr int rows = 16 * M_TILES * N_WARPS;
    if (KNumbers::size != 0 && (!tile_tokens<KNumbers, VNumbers>(p, BY_TOKENS, FEW_ROWS, shared_bytes) ||
                                !tile_tokens<KNumbers, VNumbers>(p, BY_ROWS, rows, shared_bytes))) {
        return false; // the kernels for any size launch another
    }
    const int64_t   most     = (p.single ? 1 : (int64_t) p.n_tokens) * p.group;
    const auto      any      = [&](const row_range & of) { return p.group <= of.max && most >= of.min; };
    constexpr bool  both     = V_TILES <= 8;
    const bool      large    = p.prefixes && tile_tokens<KNumbers, VNumbers>(p, BY_TOKENS, FEW_ROWS, shared_bytes);
    const row_range very_few = {1, !both ? FEW_ROWS : large ? 0 : Q_TILE}, few = {very_few.max + 1, FEW_ROWS};
    if (any(very_few) && !launch_few<1, V_TILES, KNumbers, VNumbers>(p, very_few, shared_bytes, launcher)) {
        return false;
    }
    if constexpr (both) {
        if (any(few) && !launch_few<2, V_TILES, KNumbers, VNumbers>(p, few, shared_bytes, launcher)) {
            return false;
        }
    }
    const row_range many = {FEW_ROWS + 1, INT32_MAX};
    if (any(many) && !launch_kernel<BY_ROWS, M_TILES, V_TILES, KNumbers, VNumbers>(p, many, shared_bytes, launcher) &&
        !launch_wide<KNumbers, VNumbers>(p, many, shared_bytes, launcher)) {
        return false;
    }
    launcher.merge(p);
    return true;
}

template <class KNumbers, class VNumbers, class Launcher>
bool launch_by_size(const params & p, int shared_bytes, Launcher & launcher) {
    if (p.d_v <= 64) {
        return launch_all<2, 4, KNumbers, VNumbers>(p, shared_bytes, launcher);
    }
    if (p.d_v <= 128) {
        constexpr int m_tiles = is_light<KNumbers, VNumbers>() ? 2 : 1;
        return launch_all<m_tiles, 8, KNumbers, VNumbers>(p, shared_bytes, launcher);
    }
    if (p.d_v <= 256) {
        return launch_all<1, 16, KNumbers, VNumbers>(p, shared_bytes, launcher);
    }
    if (p.d_v > 512 || !launch_wide<KNumbers, VNumbers>(p, {1, INT32_MAX}, shared_bytes, launcher)) {
        return false;
    }
    launcher.merge(p);
    return true;
}

// Launch kernels that are compiled for one type and head size. `slim`: tiles of 64 rows instead of 128, if larger ones
// would leave multiprocessors idle or do not fit. Both have the same bits.
template <int TYPE, int SIZE, class Launcher>
bool launch_known(const params & p, bool slim, int shared_bytes, Launcher & launcher) {
    using numbers         = known_numbers<TYPE, SIZE>;
    constexpr int m_tiles = SIZE > 128 ? 1 : 2;
    const bool    fits    = tile_tokens<numbers, numbers>(p, BY_ROWS, 16 * m_tiles * N_WARPS, shared_bytes) != 0;
    return slim || !fits ? launch_all<1, SIZE / 16, numbers, numbers>(p, shared_bytes, launcher)
                         : launch_all<m_tiles, SIZE / 16, numbers, numbers>(p, shared_bytes, launcher);
}

template <int TYPE, class Launcher>
bool launch_known_size(const params & p, bool slim, int shared_bytes, Launcher & launcher) {
    switch (p.d_k) {
    case 64:
        return launch_known<TYPE, 64>(p, slim, shared_bytes, launcher);
    case 128:
        return launch_known<TYPE, 128>(p, slim, shared_bytes, launcher);
    default:
        return launch_known<TYPE, 256>(p, slim, shared_bytes, launcher);
    }
}

struct known_types {}; // selects these kernels

template <class Launcher> bool launch_known_type(const params & p, int shared_bytes, Launcher & launcher) {
    const int64_t tiles = ((int64_t) p.n_tokens * p.group + 127) / 128 * p.n_head_kv;
    const bool    slim  = tiles < 2 * launcher.multiprocessors();
    switch (p.k.type) {
    case PAGE_F16:
        return launch_known_size<PAGE_F16>(p, slim, shared_bytes, launcher);
    case PAGE_Q8_0:
        return launch_known_size<PAGE_Q8_0>(p, slim, shared_bytes, launcher);
    default:
        return launch_known_size<PAGE_Q4_0>(p, slim, shared_bytes, launcher);
    }
}

// Return whether there are such kernels for a call.
inline bool is_known(const params & p) {
    const auto fits = [](const pages & x) {
        const auto bits = (uint64_t) x.data | (uint64_t) x.head_stride;
        return x.steps_aligned && bits % known_alignment(x.row_bytes) == 0;
    };
    return (p.k.type == PAGE_F16 || p.k.type == PAGE_Q8_0 || p.k.type == PAGE_Q4_0) && p.v.type == p.k.type &&
           (p.d_k == 64 || p.d_k == 128 || p.d_k == 256) && p.d_v == p.d_k && fits(p.k) && fits(p.v) && !p.v_is_k &&
           p.groups_whole;
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

// Launch known_types, or the kernels for K of these numbers.
template <class Which, class Launcher> bool launch_which(const params & p, int shared_bytes, Launcher & launcher) {
    if constexpr (std::is_same<Which, known_types>::value) {
        return launch_known_type(p, shared_bytes, launcher);
    } else {
        return launch_by_v<Which>(p, shared_bytes, launcher);
    }
}

// Launch the kernels for the sequences of `p.table`. Return false if a tile of these heads does not fit into
// `shared_bytes`, the limit of a thread block.
template <class Launcher> bool launch_part(const params & p, int shared_bytes, Launcher & launcher) {
    if (is_known(p) && launcher.has_all_kernels() && launcher.template attend_with<known_types>(p, shared_bytes)) {
        return true;
    }
    switch (p.k.type) {
    case PAGE_F32:
        return launcher.template attend_with<float_numbers>(p, shared_bytes);
    case PAGE_BF16:
        return launcher.template attend_with<bfloat_numbers>(p, shared_bytes);
    default:
        return launcher.template attend_with<half_numbers>(p, shared_bytes);
    }
}

// Return an upper bound of the rows of `partial`, from shapes alone.
inline int64_t max_partials(int64_t n_tokens, int64_t n_rows, int64_t n_head, int64_t width_tokens) {
    const int64_t few    = n_rows * MAX_SPLIT_QUERIES;
    const int64_t tokens = width_tokens + SPLIT_ALIGN; // the first split may begin before the table
    return (n_tokens < few ? n_tokens : few) * n_head * most_kv_splits(tokens);
}

// Memory for partial results, and the rows of the table whose partial results fit into it.
struct workspace {
    int64_t bytes;
    int     rows;
};

constexpr int64_t WORKSPACE_BYTES = 256 << 20;

// Return the workspace of a call: for all rows of the table if `most` bytes suffice, else for some of them, at least
// one. `width`: blocks of a row.
inline workspace workspace_of(const params & p, int64_t width, int64_t most) {
    const auto bytes_of = [&](int64_t rows) {
        return max_partials(p.n_tokens, rows, p.n_head, width * p.block_size) * partial_floats(p) *
               (int64_t) sizeof(float);
    };
    const int64_t some = bytes_of(p.n_rows) <= most ? p.n_rows : most / bytes_of(1);
    const int     rows = some < 1 ? 1 : (int) some;
    return {bytes_of(rows), rows};
}

// Launch a call whose `p.partial` is a workspace for `rows` rows of the table at a time. Return false as launch_part.
template <class Launcher> bool launch(params p, int rows, int shared_bytes, Launcher & launcher) {
    for (int first = 0; first == 0 || first < p.n_rows; first += rows) {
        p.first_row = first;
        p.end_row   = p.n_rows - first < rows ? p.n_rows : first + rows;
        if (!launch_part(p, shared_bytes, launcher)) {
            return false;
        }
    }
    return true;
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
    p.block_size   = block_size;
    p.groups_whole = block_size % GROUP == 0;
    p.block_shift  = -1;
    for (int shift = 0; shift < 31; ++shift) {
        p.block_shift = 1 << shift == block_size ? shift : p.block_shift;
    }
}

// Launches nothing, to check whether a call would be launched.
struct no_launcher {
    template <division, int, int, class, class> void attend(const params &, row_range, int, int) {}
    void                                             merge(const params &) {}
    int                                              multiprocessors() const { return 1; }
    bool                                             has_all_kernels() const { return true; }

    template <class Which> bool attend_with(const params & p, int shared_bytes) {
        return launch_which<Which>(p, shared_bytes, *this);
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
    if (p.k.slot_stride < 0 || p.v.slot_stride < 0 || (p.k.slot_stride | p.v.slot_stride) >> 28) {
        return "slots of K and V must be less than 256 MiB apart";
    }
    no_launcher nothing;
    return launch_part(p, shared_bytes, nothing) ? nullptr
                                                 : "a tile of these heads does not fit into a block's shared memory";
}

} // namespace paged
