// Codes of a tile's lines, as the products take them.
#pragma once

#include "iq4-values.h"
#include "tile-layout.h"
#include "tile-simd.h"

namespace tiles {

// A type's codes: of `BITS` bits, and around `MIDDLE`.
template <class Layout> struct codes_of {
    static constexpr int BITS   = Layout::BITS;
    static constexpr int MIDDLE = Layout::KIND == codes::AROUND_MIDDLE ? 1 << (BITS - 1) : 0;

    // Line `k` of a group, from a column's offset of `at` bytes on.
    static ints read(const char * w, int group, int k, int at) {
        constexpr int LINES = Layout::GROUP / 4; // of a group
        if constexpr (BITS == 6) {
            static_assert(LINES == 4);
            return read_6(w + 3 * LINE * group + at, k);
        }
        const ints both = load(w + LINE / 2 * (LINES * group + k - k % 2) + at);
        const ints four = k % 2 ? high_nibbles(both) : low_nibbles(both);
        if constexpr (BITS == 5) {
            static_assert(LINES == 8);
            return merge(four, bits(load(w + Layout::FIFTH + LINE * group + at), k - 4, 16));
        }
        return four;
    }

    // Line `i` of four. The last one is in the upper bits of the others.
    static ints read_6(const char * w, int i) {
        if (i < 3) {
            return bits(load(w + LINE * i), 0, 63);
        }
        return merge(merge(bits(load(w), 6, 3), bits(load(w + LINE), 4, 12)), bits(load(w + 2 * LINE), 2, 48));
    }
};

template <> struct codes_of<q8_0> {
    static constexpr int BITS   = 8;
    static constexpr int MIDDLE = MIDDLE_OF_BYTES;

    static ints read(const char * w, int, int k, int at) { return codes_of_bytes(load(w + LINE * k + at)); }
};

inline constexpr int8_t IQ4_VALUES[]  = {VELO_IQ4_VALUES};
inline constexpr int8_t MXFP4_CODES[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Nibbles of 32 codes, looked up in a table.
template <const int8_t * TABLE> ints look_up_line(const char * w, int group, int k, int at) {
    const ints both = load(w + LINE / 2 * (8 * group + k - k % 2) + at);
    return look_up(TABLE, k % 2 ? high_nibbles(both) : low_nibbles(both));
}

struct iq4_codes {
    static constexpr int BITS   = 8;
    static constexpr int MIDDLE = MIDDLE_OF_BYTES;

    static ints read(const char * w, int group, int k, int at) {
        return codes_of_bytes(look_up_line<IQ4_VALUES>(w, group, k, at));
    }
};
template <> struct codes_of<iq4_nl> : iq4_codes {};
template <> struct codes_of<iq4_xs> : iq4_codes {};

template <> struct codes_of<mxfp4> {
    static constexpr int BITS   = 5;
    static constexpr int MIDDLE = 12;

    static ints read(const char * w, int, int k, int at) { return look_up_line<MXFP4_CODES>(w, 0, k, at); }
};

} // namespace tiles
