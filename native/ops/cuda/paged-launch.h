// From a call's shapes to launches: which kernel, how many blocks, how much shared memory. Nothing here reads the
// table, so that a captured graph holds for every step of the same shapes. `Machine` launches, on a GPU or on the host.
#pragma once

#include "paged-attend.h"

namespace paged {

// Tokens of a tile: as many as shared memory has room for.
template <class KNumbers, class VNumbers> inline int tile_tokens(const view & p, int rows, int shared_bytes) {
    for (int tokens : {64, 32, 16}) {
        if (layout_of<KNumbers, VNumbers>(p, rows, tokens).total <= shared_bytes) {
            return tokens;
        }
    }
    return 0;
}

template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers, class Machine>
bool launch_class(const view & p, row_class of, int shared_bytes, Machine & machine) {
    const int tokens = tile_tokens<KNumbers, VNumbers>(p, 16 * M_TILES, shared_bytes);
    if (tokens == 0) {
        return false;
    }
    const int bytes = layout_of<KNumbers, VNumbers>(p, 16 * M_TILES, tokens).total;
    machine.template attend<M_TILES, V_PAIRS, KNumbers, VNumbers>(p, of, tokens, bytes);
    return true;
}

// Rows of few queries, then those of many; n_tokens: query rows of the call.
template <int MANY, int V_PAIRS, class KNumbers, class VNumbers, class Machine>
bool launch_all(const view & p, int n_tokens, int shared_bytes, Machine & machine) {
    if (!launch_class<1, V_PAIRS, KNumbers, VNumbers>(p, {1, 16}, shared_bytes, machine)) {
        return false;
    }
    if (n_tokens * p.group > 16) {
        if (!launch_class<MANY, V_PAIRS, KNumbers, VNumbers>(p, {17, INT32_MAX}, shared_bytes, machine)) {
            launch_class<1, V_PAIRS, KNumbers, VNumbers>(p, {17, INT32_MAX}, shared_bytes, machine);
        }
    }
    machine.merge(p, (2 * (p.n_rows + 1) + 64) * (int) sizeof(int));
    return true;
}

template <class KNumbers, class VNumbers, class Machine>
bool launch_by_size(const view & p, int n_tokens, int shared_bytes, Machine & machine) {
    if (p.d_v <= 64) {
        return launch_all<4, 1, KNumbers, VNumbers>(p, n_tokens, shared_bytes, machine);
    }
    if (p.d_v <= 128) {
        return launch_all<4, 2, KNumbers, VNumbers>(p, n_tokens, shared_bytes, machine);
    }
    if (p.d_v <= 256) {
        return launch_all<2, 4, KNumbers, VNumbers>(p, n_tokens, shared_bytes, machine);
    }
    return p.d_v <= 512 && launch_all<1, 8, KNumbers, VNumbers>(p, n_tokens, shared_bytes, machine);
}

template <class KNumbers, class Machine>
bool launch_by_v(const view & p, int n_tokens, int shared_bytes, Machine & machine) {
    switch (p.v.type) {
    case PAGE_F32:
        return launch_by_size<KNumbers, float_numbers>(p, n_tokens, shared_bytes, machine);
    case PAGE_BF16:
        return launch_by_size<KNumbers, bfloat_numbers>(p, n_tokens, shared_bytes, machine);
    default:
        return launch_by_size<KNumbers, half_numbers>(p, n_tokens, shared_bytes, machine);
    }
}

// `shared_bytes`: what a block may have. False where that has no room for a tile, or where heads are no whole number of
// eight, or longer than any kernel has registers for.
template <class Machine> bool launch(const view & p, int n_tokens, int shared_bytes, Machine & machine) {
    if (p.d_k % 8 || p.d_v % 8) {
        return false;
    }
    switch (p.k.type) {
    case PAGE_F32:
        return launch_by_v<float_numbers>(p, n_tokens, shared_bytes, machine);
    case PAGE_BF16:
        return launch_by_v<bfloat_numbers>(p, n_tokens, shared_bytes, machine);
    default:
        return launch_by_v<half_numbers>(p, n_tokens, shared_bytes, machine);
    }
}

} // namespace paged
