// Rows of activations, rounded to bytes in -127..127, and their sums.
#pragma once

#include "ggml-impl.h"
#include "tile-simd.h"

#include <cstdint>

namespace tiles {

struct row_32 {
    float   d;
    float   sum;       // of d * q
    int32_t starts[1]; // minus what the middle of the codes adds
    int8_t  q[32];
};

template <int GROUPS> struct row_256 {
    float   d;
    int16_t sums[GROUPS];
    int32_t starts[GROUPS]; // as above
    int8_t  q[256];
};

// Returns the factor that makes bytes of values up to `largest`; 0 for values so small that it would be infinite.
inline float factor_for(float largest) { return largest > 1e-36f ? 127.0f / largest : 0.0f; }

template <int MIDDLE> void round_block(const float * from, row_32 & to) {
    const float largest = largest_of<32>(from);
    const float d       = largest / 127.0f;
    int32_t     sums[2];
    round_32(from, factor_for(largest), to.q, sums);
    const int32_t sum = sums[0] + sums[1];
    to.d              = GGML_FP16_TO_FP32(GGML_FP32_TO_FP16(d)); // as in upstream's rows
    to.sum            = to.d * static_cast<float>(sum);
    to.starts[0]      = -MIDDLE * sum;
}

template <int MIDDLE, int GROUPS> void round_block(const float * from, row_256<GROUPS> & to) {
    const float largest = largest_of<256>(from);
    const float scale   = factor_for(largest);
    to.d                = largest / 127.0f;
    for (int i = 0; i < GROUPS; ++i) {
        to.sums[i] = 0;
    }
    for (int i = 0; i < 8; ++i) {
        int32_t sums[2];
        round_32(from + 32 * i, scale, to.q + 32 * i, sums);
        for (int half = 0; half < 2; ++half) {
            to.sums[(2 * i + half) * GROUPS / 16] += static_cast<int16_t>(sums[half]);
        }
    }
    for (int i = 0; i < GROUPS; ++i) {
        to.starts[i] = -MIDDLE * to.sums[i];
    }
}

} // namespace tiles
