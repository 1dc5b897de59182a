// Lines of codes: as a tile has them, or unpacked to a byte for each code.
#pragma once

#include "read-ahead.h"
#include "tile-codes.h"
#include "tile-layout.h"
#include "tile-simd.h"

#include <cstdint>

namespace tiles {

// What a pass prefetches of the weights that follow: `step` bytes with each group. Always inlined, because GCC drops
// calls that only prefetch.
struct later_weights {
    const char * at   = nullptr;
    int64_t      step = 0;

    [[gnu::always_inline]] void read_ahead(int group, int k) const {
        if (k == 0) {
            velo_prefetch(at + group * step, static_cast<size_t>(step));
        }
    }
    later_weights next(int64_t n_groups) const { return {at + n_groups * step, step}; }
};

// Lines of a block as its tile has them: read() returns part `p` of line `k` of a group.
template <class Layout> struct packed_lines {
    const char * w;

    ints read(int group, int k, int p) const { return codes_of<Layout>::read(w, group, k, 4 * COLUMNS * p); }
    [[gnu::always_inline]] void read_ahead(int group, int k) const {
        constexpr int GROUP_BYTES = Layout::BYTES / Layout::GROUPS, STEP = GROUP_BYTES / (Layout::GROUP / 4);
        velo_read_ahead(w + group * GROUP_BYTES + k * STEP, STEP);
        if constexpr (Layout::BITS > 4) {
            __asm__ volatile("" ::: "memory"); // GCC would gather the prefetches of a group, and a burst is slower
        }
    }
    packed_lines next() const { return {w + Layout::BYTES}; }
};

// The same in one of several passes over them, which share the prefetches.
template <class Layout> struct shared_lines : packed_lines<Layout> {
    later_weights later;

    [[gnu::always_inline]] void read_ahead(int group, int k) const { later.read_ahead(group, k); }
    shared_lines                next() const { return {{this->w + Layout::BYTES}, later.next(Layout::GROUPS)}; }
};

// Lines of a block with a byte for each code.
template <class Layout> struct unpacked_lines {
    const char *  at;
    later_weights later;

    ints read(int group, int k, int p) const {
        return load(at + LINE * (Layout::GROUP / 4 * group + k) + LINE / PARTS * p);
    }
    [[gnu::always_inline]] void read_ahead(int group, int k) const { later.read_ahead(group, k); }
    unpacked_lines              next() const { return {at + COLS * Layout::K, later.next(Layout::GROUPS)}; }
};

template <class Layout> void unpack(packed_lines<Layout> lines, int64_t n_blocks, char * to) {
    for (; n_blocks > 0; --n_blocks, lines = lines.next()) {
        for (int group = 0; group < Layout::GROUPS; ++group) {
#pragma GCC unroll 8
            for (int k = 0; k < Layout::GROUP / 4; ++k) {
                for (int p = 0; p < PARTS; ++p, to += LINE / PARTS) {
                    store(to, lines.read(group, k, p));
                }
            }
        }
    }
}

} // namespace tiles
