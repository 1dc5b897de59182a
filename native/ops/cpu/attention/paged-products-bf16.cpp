#include "paged-products-bf16.h"

#if defined(PAGED_BF16)

namespace paged {

namespace {

struct shape {
    int64_t a_stride, b_stride, pairs, stride;
};

constexpr int64_t step_pairs = 16;

// Calls f(a, b) for 16 pairs of each product in turn, so that the order of a sum does not depend on the number of
// steps.
template <class F>
PAGED_INLINE void for_each_step(const bf16_factors * factors, int n, const shape & x, int64_t row, int64_t column,
                                F f) {
    for (int64_t i = 0; i < x.pairs; i += step_pairs) {
        for (int k = 0; k < n; ++k) {
            f(factors[k].a + row * x.a_stride + 2 * i, factors[k].b + i * x.b_stride + column);
        }
    }
}

// ---- with vectors: 8 rows by one or two vectors of sums ----

PAGED_INLINE __m512bh pair_splat(const uint16_t * p) {
    int32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return (__m512bh) _mm512_set1_epi32(pair);
}

template <int columns>
PAGED_INLINE void multiply(const bf16_factors * factors, int n, const shape & x, int64_t row, int64_t column,
                           float * out, bool more) {
    f32v sum[8][columns];
    PAGED_UNROLL
    for (int r = 0; r < 8; ++r) {
        PAGED_UNROLL
        for (int c = 0; c < columns; ++c) {
            sum[r][c] = more ? load(out + r * x.stride + c * lanes) : zero();
        }
    }
    for_each_step(factors, n, x, row, column, [&](const uint16_t * a, const uint32_t * b) {
        for (int64_t i = 0; i < step_pairs; ++i) {
            __m512bh right[columns];
            PAGED_UNROLL
            for (int c = 0; c < columns; ++c) {
                right[c] = (__m512bh) _mm512_loadu_si512(b + i * x.b_stride + c * lanes);
            }
            PAGED_UNROLL
            for (int r = 0; r < 8; ++r) {
                const __m512bh left = pair_splat(a + r * x.a_stride + 2 * i);
                PAGED_UNROLL
                for (int c = 0; c < columns; ++c) {
                    sum[r][c] = _mm512_dpbf16_ps(sum[r][c], right[c], left);
                }
            }
        }
    });
    PAGED_UNROLL
    for (int r = 0; r < 8; ++r) {
        PAGED_UNROLL
        for (int c = 0; c < columns; ++c) {
            store(out + r * x.stride + c * lanes, sum[r][c]);
        }
    }
}

#    if defined(VELO_AMX_TILES)

// ---- with tiles: up to 32 rows by 32 columns of sums in registers 0 to 3, 16 pairs of factors in 4 to 7 ----

template <bool two_rows, bool two_columns>
PAGED_INLINE void multiply_tiles(const bf16_factors * factors, int n, const shape & x, int64_t row, int64_t column,
                                 float * out, bool more) {
    asm volatile("" : : : "memory"); // GCC does not know that tile loads read memory
    const int64_t out_bytes = x.stride * sizeof(float);
    if (more) {
        _tile_loadd(0, out, out_bytes);
        if constexpr (two_columns) {
            _tile_loadd(1, out + 16, out_bytes);
        }
        if constexpr (two_rows) {
            _tile_loadd(2, out + 16 * x.stride, out_bytes);
        }
        if constexpr (two_rows && two_columns) {
            _tile_loadd(3, out + 16 * x.stride + 16, out_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const int64_t a_bytes = x.a_stride * sizeof(uint16_t), b_bytes = x.b_stride * sizeof(uint32_t);
    for_each_step(factors, n, x, row, column, [&](const uint16_t * a, const uint32_t * b) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (two_columns) {
            _tile_loadd(7, b + 16, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (two_rows) {
            _tile_loadd(5, a + 16 * x.a_stride, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (two_rows && two_columns) {
            _tile_dpbf16ps(3, 5, 7);
        }
    });
    _tile_stored(0, out, out_bytes);
    if constexpr (two_columns) {
        _tile_stored(1, out + 16, out_bytes);
    }
    if constexpr (two_rows) {
        _tile_stored(2, out + 16 * x.stride, out_bytes);
    }
    if constexpr (two_rows && two_columns) {
        _tile_stored(3, out + 16 * x.stride + 16, out_bytes);
    }
}

void multiply_block(const bf16_factors * factors, int n, const shape & x, int64_t row, int64_t rows, int64_t column,
                    int64_t columns, float * out, bool more) {
    if (rows > 16 && columns > 16) {
        multiply_tiles<true, true>(factors, n, x, row, column, out, more);
    } else if (rows > 16) {
        multiply_tiles<true, false>(factors, n, x, row, column, out, more);
    } else if (columns > 16) {
        multiply_tiles<false, true>(factors, n, x, row, column, out, more);
    } else {
        multiply_tiles<false, false>(factors, n, x, row, column, out, more);
    }
}

#    endif

} // namespace

void multiply_bf16(const bf16_factors * factors, int n, int64_t rows, int64_t a_stride, int64_t b_stride, int64_t pairs,
                   int64_t columns, float * out, int64_t stride, bool more) {
    const shape x = {a_stride, b_stride, pairs, stride};
#    if defined(VELO_AMX_TILES)
    if (amx::has_tiles()) {
        for (int64_t r = 0; r < rows; r += 32) {
            for (int64_t c = 0; c < columns; c += 32) {
                multiply_block(factors, n, x, r, rows - r, c, columns - c, out + r * stride + c, more);
            }
        }
        return;
    }
#    endif
    for (int64_t r = 0; r < rows; r += 8) {
        int64_t c = 0;
        for (; c + 32 <= columns; c += 32) {
            multiply<2>(factors, n, x, r, c, out + r * stride + c, more);
        }
        for (; c < columns; c += 16) {
            multiply<1>(factors, n, x, r, c, out + r * stride + c, more);
        }
    }
}

} // namespace paged

#endif
