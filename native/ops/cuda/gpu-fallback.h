// Fragments of gpu.h by shuffles and ordinary instructions, for GPUs without the tensor core instruction: correct but
// slow. Uses the primitives of the including header, so that tests on the host check it too.
#pragma once

namespace gpu {
namespace fallback {

template <bool transposed> GPU_FN void load(uint32_t (&to)[4], const void * row) {
    const auto mine = shared_address(row);
    const int  g = lane() / 4, c = lane() % 4;
    GPU_UNROLL
    for (int m = 0; m < 4; ++m) {
        if (transposed) { // numbers of two rows, in one half of a word each
            const uint32_t upper = words_at(shuffle(mine, 8 * m + 2 * c))[g / 2];
            const uint32_t lower = words_at(shuffle(mine, 8 * m + 2 * c + 1))[g / 2];
            to[m]                = permute(upper, lower, g % 2 ? 0x7632 : 0x5410);
        } else {
            to[m] = words_at(shuffle(mine, 8 * m + g))[c];
        }
    }
}

// Transpose an 8x8 matrix, of which a lane has two numbers of row lane / 4.
GPU_FN uint32_t transpose(uint32_t x) {
    const int      g = lane() / 4, c = lane() % 4;
    const uint32_t upper = shuffle(x, 8 * c + g / 2), lower = shuffle(x, 8 * c + 4 + g / 2);
    return permute(upper, lower, g % 2 ? 0x7632 : 0x5410);
}

template <float (*number)(uint16_t)> GPU_FN float dot(float sum, uint32_t a, uint32_t b) {
    sum += number((uint16_t) a) * number((uint16_t) b);
    return sum + number((uint16_t) (a >> 16)) * number((uint16_t) (b >> 16));
}

template <float (*number)(uint16_t)> GPU_FN void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int g = lane() / 4, column = lane() % 4 * 2;
    GPU_ROLLED
    for (int k = 0; k < 4; ++k) { // the lanes of a row have its pairs of numbers
        uint32_t rows[4], columns[2][2];
        GPU_UNROLL
        for (int i = 0; i < 4; ++i) {
            rows[i]               = shuffle(a[i], g * 4 + k);
            columns[i % 2][i / 2] = shuffle(i / 2 ? b1 : b0, (column + i % 2) * 4 + k);
        }
        GPU_UNROLL
        for (int i = 0; i < 4; ++i) {
            c[i] = dot<number>(c[i], rows[i / 2], columns[i % 2][0]);
            c[i] = dot<number>(c[i], rows[2 + i / 2], columns[i % 2][1]);
        }
    }
}

} // namespace fallback
} // namespace gpu
