// Sums of products of rows with the columns of a tile. add() multiplies LINES lines, from line `k` of a group on:
// read(k, p) returns part `p` of one, and `rows` are the bytes of the group.
#pragma once

#include "tile-simd.h"

#include <type_traits>

namespace tiles {

template <int BITS, int ROWS> struct sums_by_line {
    static constexpr int LINES = 1;

    ints x[ROWS][PARTS] = {};

    void begin(int m, int32_t start) {
        for (int p = 0; p < PARTS; ++p) {
            x[m][p] = splat(start);
        }
    }

    template <class Read> void add(int k, Read read, const int8_t * const (&rows)[ROWS]) {
        ints line[PARTS];
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; ++p) {
            line[p] = read(k, p);
        }
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; ++m) {
            const ints row = word(rows[m] + 4 * k);
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; ++p) {
                x[m][p] = products<BITS>::add(x[m][p], line[p], row);
            }
        }
    }

    ints at(int m, int p) const { return x[m][p]; }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Two rows and two lines at once: an instruction multiplies 8 bytes of each of two rows and two columns.
template <int BITS, int ROWS> struct sums_by_pairs {
    static constexpr int LINES = 2;
    static constexpr int PAIRS = (ROWS + 1) / 2; // of rows; an odd last row is twice in its pair

    ints x[PAIRS][PARTS][2] = {};

    void begin(int m, int32_t start) {
        for (int p = 0; p < PARTS; ++p) {
            for (ints & sums : x[m / 2][p]) {
                const int32x2_t both = vdup_n_s32(start);
                sums = m % 2 ? vcombine_s32(vget_low_s32(sums), both) : vcombine_s32(both, vget_high_s32(sums));
            }
        }
    }

    template <class Read> void add(int k, Read read, const int8_t * const (&rows)[ROWS]) {
        int8x16_t pair[PAIRS];
#    pragma GCC unroll 4
        for (int i = 0; i < PAIRS; ++i) {
            const int8_t * second = rows[2 * i + 1 < ROWS ? 2 * i + 1 : 2 * i];
            pair[i]               = vcombine_s8(vld1_s8(rows[2 * i] + 4 * k), vld1_s8(second + 4 * k));
        }
#    pragma GCC unroll 4
        for (int p = 0; p < PARTS; ++p) {
            const ints first = read(k, p), second = read(k + 1, p);
            const ints left = vzip1q_s32(first, second), right = vzip2q_s32(first, second); // columns 0 and 1, 2 and 3
#    pragma GCC unroll 4
            for (int i = 0; i < PAIRS; ++i) {
                x[i][p][0] = vmmlaq_s32(x[i][p][0], pair[i], bytes(left));
                x[i][p][1] = vmmlaq_s32(x[i][p][1], pair[i], bytes(right));
            }
        }
    }

    ints at(int m, int p) const {
        const int64x2_t left  = vreinterpretq_s64_s32(x[m / 2][p][0]);
        const int64x2_t right = vreinterpretq_s64_s32(x[m / 2][p][1]);
        return vreinterpretq_s32_s64(m % 2 ? vzip2q_s64(left, right) : vzip1q_s64(left, right));
    }
};

template <int BITS, int ROWS>
using sums_of_rows = std::conditional_t<ROWS == 1, sums_by_line<BITS, 1>, sums_by_pairs<BITS, ROWS>>;

#else

template <int BITS, int ROWS> using sums_of_rows = sums_by_line<BITS, ROWS>;

#endif

} // namespace tiles
