// Lines of codes: as a tile has them, or unpacked to a byte for each code.
#pragma once

#include "read-ahead.h"
#include "tile-codes.h"
#include "tile-layout.h"
#include "tile-simd.h"

#include <cstdint>

namespace tiles {

// Lines of a block as its tile has them: read() returns part `p` of line `k` of a group.
template <class Layout> struct packed_lines {
    const char * w;

    ints read(int group, int k, int p) const { return codes_of<Layout>::read(w, group, k, 4 * COLUMNS * p); }
    void read_ahead(int group, int k) const {
        constexpr int GROUP_BYTES = Layout::BYTES / Layout::GROUPS, STEP = GROUP_BYTES / (Layout::GROUP / 4);
        velo_read_ahead(w + group * GROUP_BYTES + k * STEP, STEP);
    }
    packed_lines next() const { return {w + Layout::BYTES}; }
};

// Lines of a block with a byte for each code.
template <class Layout> struct unpacked_lines {
    const char * at;

    ints read(int group, int k, int p) const {
        return load(at + LINE * (Layout::GROUP / 4 * group + k) + LINE / PARTS * p);
    }
    void           read_ahead(int, int) const {}
    unpacked_lines next() const { return {at + COLS * Layout::K}; }
};

template <class Layout> void unpack(const char * w, int64_t n_blocks, char * to) {
    for (packed_lines<Layout> lines{w}; n_blocks > 0; --n_blocks, lines = lines.next()) {
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
