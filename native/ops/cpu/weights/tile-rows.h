// Rows of activations, rounded to bytes in -127..127, and their sums.
#pragma once

#include "ggml-impl.h"
#include "tile-simd.h"

#include <cstdint>

namespace tiles {

struct row_32 {
    float   d;
    float   sum; // of d * q
    int32_t minus_sum;
    int8_t  q[32];
};

struct row_256 {
    float   d;
    int16_t sums[16]; // of 16 each
    int16_t sums_32[8];
    int8_t  q[256];
};

inline void round_block(const float * from, row_32 & to) {
    const float largest = largest_of<32>(from);
    const float d       = largest / 127.0f;
    int32_t     sums[2];
    round_32(from, largest > 0.0f ? 127.0f / largest : 0.0f, to.q, sums);
    to.d         = GGML_FP16_TO_FP32(GGML_FP32_TO_FP16(d)); // as in upstream's rows
    to.minus_sum = -(sums[0] + sums[1]);
    to.sum       = -to.d * static_cast<float>(to.minus_sum);
}

inline void round_block(const float * from, row_256 & to) {
    const float largest = largest_of<256>(from);
    const float scale   = largest > 0.0f ? 127.0f / largest : 0.0f;
    to.d                = largest / 127.0f;
    for (int i = 0; i < 8; ++i) {
        int32_t sums[2];
        round_32(from + 32 * i, scale, to.q + 32 * i, sums);
        to.sums[2 * i]     = static_cast<int16_t>(sums[0]);
        to.sums[2 * i + 1] = static_cast<int16_t>(sums[1]);
        to.sums_32[i]      = static_cast<int16_t>(sums[0] + sums[1]);
    }
}

} // namespace tiles
