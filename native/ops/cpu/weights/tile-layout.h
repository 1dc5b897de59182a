// The layout into which weights are packed if upstream's packing for AMX is not used, type by type. A tile has 16
// columns (rows of the weights' matrix) and one block of the file's format along K. A line of a tile has 64 bytes: 4
// codes along K of each column, as neighbours. Two lines of nibbles share 64 bytes; four lines of 6 bits share 192.
#pragma once

#define GGML_COMMON_DECL_C
#include "ggml-common.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace tiles {

constexpr int COLS = 16;
constexpr int LINE = 4 * COLS; // bytes

enum class codes {
    PLAIN,         // unsigned, above a minimum
    AROUND_MIDDLE, // unsigned, less a middle
    SIGNED         // values of a table, or signed bytes
};

// `Block` is the file's. `Bits` of a code; the fifth bits are in lines of their own. `Group` codes along K have one
// scale.
template <ggml_type Type, class Block, int Bits, int K_, int Group, codes Kind, int ScaleBytes, int MinBytes,
          int FloatBytes>
struct layout {
    using block = Block;

    static constexpr ggml_type TYPE   = Type;
    static constexpr int       BITS   = Bits;
    static constexpr int       K      = K_;
    static constexpr int       GROUP  = Group;
    static constexpr int       GROUPS = K / GROUP;
    static constexpr codes     KIND   = Kind;

    static constexpr int LINES = BITS * K / 8 * COLS;       // bytes of all lines
    static constexpr int FIFTH = LINES - K / 8 * COLS;      // bits, if BITS is 5: after the lines of nibbles
    static constexpr int SCALE = LINES;                     // bytes of each group
    static constexpr int MIN   = SCALE + ScaleBytes * COLS; // of two groups, as neighbours
    static constexpr int D     = MIN + MinBytes * COLS;     // of the block
    static constexpr int D_MIN = D + 2 * COLS;
    static constexpr int BYTES = D + FloatBytes * COLS;
};

// type, block, bits, K, group, kind, bytes of scales, of minima, and of floats
using q4_0   = layout<GGML_TYPE_Q4_0, block_q4_0, 4, 32, 32, codes::AROUND_MIDDLE, 0, 0, 2>;
using q4_1   = layout<GGML_TYPE_Q4_1, block_q4_1, 4, 32, 32, codes::PLAIN, 0, 0, 4>;
using q5_0   = layout<GGML_TYPE_Q5_0, block_q5_0, 5, 32, 32, codes::AROUND_MIDDLE, 0, 0, 2>;
using q5_1   = layout<GGML_TYPE_Q5_1, block_q5_1, 5, 32, 32, codes::PLAIN, 0, 0, 4>;
using q8_0   = layout<GGML_TYPE_Q8_0, block_q8_0, 8, 32, 32, codes::SIGNED, 0, 0, 2>;
using iq4_nl = layout<GGML_TYPE_IQ4_NL, block_iq4_nl, 4, 32, 32, codes::SIGNED, 0, 0, 2>;
using mxfp4  = layout<GGML_TYPE_MXFP4, block_mxfp4, 4, 32, 32, codes::SIGNED, 0, 0, 4>; // one float
using q4_K   = layout<GGML_TYPE_Q4_K, block_q4_K, 4, 256, 32, codes::PLAIN, 8, 8, 4>;
using q5_K   = layout<GGML_TYPE_Q5_K, block_q5_K, 5, 256, 32, codes::PLAIN, 8, 8, 4>;
using q6_K   = layout<GGML_TYPE_Q6_K, block_q6_K, 6, 256, 16, codes::AROUND_MIDDLE, 16, 0, 2>;
using iq4_xs = layout<GGML_TYPE_IQ4_XS, block_iq4_xs, 4, 256, 32, codes::SIGNED, 8, 0, 2>;

// Returns f(layout) for the layout of a type; `otherwise` for any other type.
template <class R, class F> R with_layout(ggml_type type, R otherwise, F f) {
    switch (type) {
    case GGML_TYPE_Q4_0:
        return f(q4_0());
    case GGML_TYPE_Q4_1:
        return f(q4_1());
    case GGML_TYPE_Q5_0:
        return f(q5_0());
    case GGML_TYPE_Q5_1:
        return f(q5_1());
    case GGML_TYPE_Q8_0:
        return f(q8_0());
    case GGML_TYPE_IQ4_NL:
        return f(iq4_nl());
    case GGML_TYPE_MXFP4:
        return f(mxfp4());
    case GGML_TYPE_Q4_K:
        return f(q4_K());
    case GGML_TYPE_Q5_K:
        return f(q5_K());
    case GGML_TYPE_Q6_K:
        return f(q6_K());
    case GGML_TYPE_IQ4_XS:
        return f(iq4_xs());
    default:
        return otherwise;
    }
}

} // namespace tiles
