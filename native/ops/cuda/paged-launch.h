// From a call's shapes to launches: which kernel, how much shared memory. Nothing here reads the table, so that a
// captured graph holds for every step of the same shapes. `Machine` launches, on a GPU or on the host, or not at all.
#pragma once

#include "paged-merge.h"

namespace paged {

// Tokens of a tile: as many as shared memory has room for. They do not follow the number of sequences: a sum's order
// follows them.
template <class KNumbers, class VNumbers> inline int tile_tokens(const view & p, int rows, int shared_bytes) {
    for (int tokens = MOST_TILE_TOKENS; tokens >= 16; tokens /= 2) {
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

// Rows of few queries, then those of many.
template <int MANY, int V_PAIRS, class KNumbers, class VNumbers, class Machine>
bool launch_all(const view & p, int shared_bytes, Machine & machine) {
    if (!launch_class<1, V_PAIRS, KNumbers, VNumbers>(p, {1, 16}, shared_bytes, machine)) {
        return false;
    }
    const row_class many = {17, INT32_MAX};
    if ((int64_t) p.n_tokens * p.group > 16 &&
        !launch_class<MANY, V_PAIRS, KNumbers, VNumbers>(p, many, shared_bytes, machine)) {
        launch_class<1, V_PAIRS, KNumbers, VNumbers>(p, many, shared_bytes, machine);
    }
    machine.merge(p, START_INTS * (int) sizeof(int));
    return true;
}

template <class KNumbers, class VNumbers, class Machine>
bool launch_by_size(const view & p, int shared_bytes, Machine & machine) {
    if (p.d_v <= 64) {
        return launch_all<4, 1, KNumbers, VNumbers>(p, shared_bytes, machine);
    }
    if (p.d_v <= 128) {
        return launch_all<4, 2, KNumbers, VNumbers>(p, shared_bytes, machine);
    }
    if (p.d_v <= 256) {
        return launch_all<2, 4, KNumbers, VNumbers>(p, shared_bytes, machine);
    }
    return p.d_v <= 512 && launch_all<1, 8, KNumbers, VNumbers>(p, shared_bytes, machine);
}

// One for each kind of numbers of K: each is a file of its own to compile.
template <class KNumbers, class Machine> bool launch_by_v(const view & p, int shared_bytes, Machine & machine) {
    switch (p.v.type) {
    case PAGE_F32:
        return launch_by_size<KNumbers, float_numbers>(p, shared_bytes, machine);
    case PAGE_BF16:
        return launch_by_size<KNumbers, bfloat_numbers>(p, shared_bytes, machine);
    default:
        return launch_by_size<KNumbers, half_numbers>(p, shared_bytes, machine);
    }
}

// Launches, and is true; or no kernel has room for such heads in the `shared_bytes` that a block may have.
template <class Machine> bool launch(const view & p, int shared_bytes, Machine & machine) {
    switch (p.k.type) {
    case PAGE_F32:
        return machine.template attend_with<float_numbers>(p, shared_bytes);
    case PAGE_BF16:
        return machine.template attend_with<bfloat_numbers>(p, shared_bytes);
    default:
        return machine.template attend_with<half_numbers>(p, shared_bytes);
    }
}

} // namespace paged
