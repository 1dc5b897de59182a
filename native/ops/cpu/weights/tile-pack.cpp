#include "tile-pack.h"

#include "ggml-impl.h"

#include <cstring>

namespace tiles {

namespace {

// One block of a column: its codes, the bytes for each group, and the halves or the float of the block.
struct column {
    uint8_t codes[QK_K];
    uint8_t scale[16], min[8];
    uint8_t floats[4];
};

template <class Float> void set_float(column & to, int at, Float value) {
    std::memcpy(to.floats + at, &value, sizeof(value));
}

// 2 * n codes: the low nibbles, then the high ones.
void nibbles(const uint8_t * from, int n, uint8_t * to) {
    for (int i = 0; i < n; ++i) {
        to[i]     = from[i] & 15;
        to[i + n] = static_cast<uint8_t>(from[i] >> 4);
    }
}

void fifth_bits(const uint8_t * bits, uint8_t * to) {
    uint32_t all = 0;
    std::memcpy(&all, bits, sizeof(all));
    for (int i = 0; i < 32; ++i) {
        to[i] = static_cast<uint8_t>(to[i] | (all >> i & 1) << 4);
    }
}

void unpack(const block_q4_0 & from, column & to) {
    nibbles(from.qs, QK4_0 / 2, to.codes);
    set_float(to, 0, from.d);
}

void unpack(const block_q4_1 & from, column & to) {
    nibbles(from.qs, QK4_1 / 2, to.codes);
    set_float(to, 0, from.d);
    set_float(to, 2, from.m);
}

void unpack(const block_q5_0 & from, column & to) {
    nibbles(from.qs, QK5_0 / 2, to.codes);
    fifth_bits(from.qh, to.codes);
    set_float(to, 0, from.d);
}

void unpack(const block_q5_1 & from, column & to) {
    nibbles(from.qs, QK5_1 / 2, to.codes);
    fifth_bits(from.qh, to.codes);
    set_float(to, 0, from.d);
    set_float(to, 2, from.m);
}

void unpack(const block_q8_0 & from, column & to) {
    std::memcpy(to.codes, from.qs, QK8_0);
    set_float(to, 0, from.d);
}

void unpack(const block_iq4_nl & from, column & to) {
    nibbles(from.qs, QK4_NL / 2, to.codes);
    set_float(to, 0, from.d);
}

void unpack(const block_mxfp4 & from, column & to) {
    nibbles(from.qs, QK_MXFP4 / 2, to.codes);
    set_float(to, 0, GGML_E8M0_TO_FP32_HALF(from.e));
}

// 8 scales and 8 minima of 6 bits.
void unpack_scales(const uint8_t * from, column & to) {
    for (int i = 0; i < 4; ++i) {
        to.scale[i]     = from[i] & 63;
        to.min[i]       = from[i + 4] & 63;
        to.scale[i + 4] = static_cast<uint8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
        to.min[i + 4]   = static_cast<uint8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
}

void unpack(const block_q4_K & from, column & to) {
    for (int i = 0; i < QK_K / 64; ++i) {
        nibbles(from.qs + 32 * i, 32, to.codes + 64 * i);
    }
    unpack_scales(from.scales, to);
    set_float(to, 0, from.d);
    set_float(to, 2, from.dmin);
}

void unpack(const block_q5_K & from, column & to) {
    for (int i = 0; i < QK_K / 64; ++i) {
        nibbles(from.qs + 32 * i, 32, to.codes + 64 * i);
    }
    for (int i = 0; i < QK_K; ++i) {
        to.codes[i] = static_cast<uint8_t>(to.codes[i] | (from.qh[i % 32] >> i / 32 & 1) << 4);
    }
    unpack_scales(from.scales, to);
    set_float(to, 0, from.d);
    set_float(to, 2, from.dmin);
}

void unpack(const block_q6_K & from, column & to) {
    for (int half = 0; half < 2; ++half) {
        uint8_t * codes = to.codes + 128 * half;
        nibbles(from.ql + 64 * half, 64, codes);
        for (int i = 0; i < 128; ++i) {
            codes[i] = static_cast<uint8_t>(codes[i] | (from.qh[32 * half + i % 32] >> i / 32 * 2 & 3) << 4);
        }
    }
    std::memcpy(to.scale, from.scales, sizeof(from.scales));
    set_float(to, 0, from.d);
}

void unpack(const block_iq4_xs & from, column & to) {
    for (int i = 0; i < QK_K / 32; ++i) {
        nibbles(from.qs + 16 * i, 16, to.codes + 32 * i);
        const int low  = from.scales_l[i / 2] >> i % 2 * 4 & 15;
        const int high = from.scales_h >> 2 * i & 3;
        to.scale[i]    = static_cast<uint8_t>((low | high << 4) - 32);
    }
    set_float(to, 0, from.d);
}

uint32_t word(const uint8_t * codes, int line) {
    uint32_t out = 0;
    std::memcpy(&out, codes + 4 * line, sizeof(out));
    return out;
}

void put(char * line, int column, uint32_t codes) { std::memcpy(line + 4 * column, &codes, sizeof(codes)); }

template <class Layout> void put_column(const column & from, int c, char * tile) {
    constexpr int LINES = Layout::K / 4;
    if constexpr (Layout::BITS == 8) {
        for (int line = 0; line < LINES; ++line) {
            put(tile + LINE * line, c, word(from.codes, line));
        }
    } else if constexpr (Layout::BITS == 6) {
        for (int line = 0; line < LINES; line += 4) {
            const uint32_t last = word(from.codes, line + 3);
            for (int i = 0; i < 3; ++i) {
                const uint32_t upper = last >> 2 * i & 0x03030303;
                put(tile + LINE * (line / 4 * 3 + i), c, word(from.codes, line + i) | upper << 6);
            }
        }
    } else {
        for (int line = 0; line < LINES; line += 2) {
            const uint32_t even = word(from.codes, line) & 0x0f0f0f0f, odd = word(from.codes, line + 1) & 0x0f0f0f0f;
            put(tile + LINE / 2 * line, c, even | odd << 4);
        }
        for (int line = 0; Layout::BITS == 5 && line < LINES; line += 8) {
            uint32_t fifth = 0;
            for (int i = 0; i < 8; ++i) {
                fifth |= (word(from.codes, line + i) >> 4 & 0x01010101) << i;
            }
            put(tile + Layout::FIFTH + LINE * (line / 8), c, fifth);
        }
    }
    for (int group = 0; Layout::MIN > Layout::SCALE && group < Layout::GROUPS; ++group) {
        tile[Layout::SCALE + COLS * group + c] = static_cast<char>(from.scale[group]);
    }
    for (int group = 0; Layout::D > Layout::MIN && group < Layout::GROUPS; ++group) {
        tile[Layout::MIN + 2 * COLS * (group / 2) + 2 * c + group % 2] = static_cast<char>(from.min[group]);
    }
    if constexpr (Layout::TYPE == GGML_TYPE_MXFP4) {
        std::memcpy(tile + Layout::D + 4 * c, from.floats, 4);
    } else {
        std::memcpy(tile + Layout::D + 2 * c, from.floats, 2);
        if constexpr (Layout::BYTES > Layout::D_MIN) {
            std::memcpy(tile + Layout::D_MIN + 2 * c, from.floats + 2, 2);
        }
    }
}

template <class Layout> void pack_rows(const typename Layout::block * from, int64_t n, int64_t n_rows, char * to) {
    const int64_t n_blocks = n / Layout::K;
    for (int64_t row = 0; row < n_rows; row += COLS) {
        for (int64_t block = 0; block < n_blocks; ++block, to += Layout::BYTES) {
            for (int c = 0; c < COLS; ++c) {
                column unpacked;
                unpack(from[(row + c) * n_blocks + block], unpacked);
                put_column<Layout>(unpacked, c, to);
            }
        }
    }
}

} // namespace

void pack(ggml_type type, const void * from, int64_t n, int64_t n_rows, char * to) {
    with_layout(type, false, [&](auto layout) {
        using type = decltype(layout);
        pack_rows<type>(static_cast<const typename type::block *>(from), n, n_rows, to);
        return true;
    });
}

} // namespace tiles
