// The sum of squares of upstream's RMS norm, with several additions under way at once.
#pragma once

#include <cstdint>

// Returns the sum of the squares of n floats. A double has room for so many more bits that the result, rounded to a
// float, is upstream's, which adds one square after the other.
inline double velo_sum_of_squares(const float * x, int64_t n) {
    constexpr int64_t STEP       = 16; // as many as hide the latency of an addition with the narrowest vectors
    double            sums[STEP] = {};
    int64_t           i          = 0;
    for (; i + STEP <= n; i += STEP) {
        for (int64_t j = 0; j < STEP; ++j) {
            sums[j] += static_cast<double>(x[i + j] * x[i + j]);
        }
    }
    double sum = 0.0;
    for (const double part : sums) {
        sum += part;
    }
    for (; i < n; ++i) {
        sum += static_cast<double>(x[i] * x[i]);
    }
    return sum;
}
