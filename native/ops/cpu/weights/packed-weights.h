// The tiles into which upstream packs weights for AMX, type by type, and their products with a few rows. A tile has 16
// columns; bytes that are multiplied together are neighbours; 32 or 16 along K are unpacked into registers at a time.
// Sums within a group of one scale are of integers, and a row's groups are added in their order, so a row's bits do not
// depend on the other rows.
#pragma once

#define GGML_COMMON_DECL_C
#include "ggml-common.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "iq4-values.h"
#include "packed-codes.h"
#include "read-ahead.h"
#include "simd-mappings.h"

namespace packed {

// ---- types whose rows of activations are q8_K ----

// Sums of the groups of a block for each row, before the scales of the block.
template <int ROWS> using block_sums = __m512[ROWS];

template <int ROWS> void scale_and_add(block_sums<ROWS> & sums, const row_sums<ROWS> & products, __m512 scale) {
#pragma GCC              unroll 8
    for (int m = 0; m < ROWS; ++m) {
        sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[m]), scale, sums[m]);
    }
}

template <int ROWS, class Row>
void finish_block(const char * d, const Row * const (&rows)[ROWS], const block_sums<ROWS> & sums, __m512 (&out)[ROWS]) {
    const __m512 columns = halves16(d);
    for (int m = 0; m < ROWS; ++m) {
        out[m] = _mm512_fmadd_ps(sums[m], _mm512_mul_ps(columns, _mm512_set1_ps(rows[m]->d)), out[m]);
    }
}

inline __m512 scales16(const char * at) { return _mm512_cvtepi32_ps(bytes16(at)); }

// A row's bytes as in a q8_K, and the starts of the sums of products with each `GROUP` of them: minus what the codes'
// middle of 2^SHIFT adds.
template <int SHIFT, int GROUP> struct centered_q8_K {
    float   d;
    int32_t starts[QK_K / GROUP];
    int8_t  qs[QK_K];
};

template <int ROWS, class Row>
row_sums<ROWS> & begin(row_sums<ROWS> & sums, const Row * const (&rows)[ROWS], int group) {
#pragma GCC      unroll 8
    for (int m = 0; m < ROWS; ++m) {
        sums[m] = _mm512_set1_epi32(rows[m]->starts[group]);
    }
    return sums;
}

// q4_K and q5_K: a scale and a minimum for each 32 codes.
template <bool FIVE_BITS> struct with_minimum {
    using row = block_q8_K;

    static constexpr int K     = QK_K;
    static constexpr int BITS  = QK_K / 2 * COLS;
    static constexpr int SCALE = BITS + (FIVE_BITS ? QK_K / 8 * COLS : 0);
    static constexpr int MIN   = SCALE + 8 * COLS;
    static constexpr int D     = MIN + 8 * COLS;
    static constexpr int D_MIN = D + 2 * COLS;
    static constexpr int BYTES = D_MIN + 2 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        block_sums<ROWS> sums = {};
        for (int group = 0; group < 8; ++group) {
            row_sums<ROWS> products = {};
            add_products<8>(products, read(w, group).at, rows, 32 * group);
            scale_and_add<ROWS>(sums, products, scales16(w + SCALE + COLS * group));
        }
        finish_block<ROWS>(w + D, rows, sums, out);
        subtract_minima<ROWS>(w, rows, out);
    }

    static weights32 unpack(const char * w, int group) {
        const char *  pairs = w + MIN + 32 * (group / 2); // of two groups, as neighbours
        const __m512i both  = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) pairs));
        const __m512i min = group % 2 ? _mm512_srai_epi32(both, 16) : _mm512_and_si512(both, _mm512_set1_epi32(0xffff));
        const __m512  scale = _mm512_mul_ps(halves16(w + D), _mm512_cvtepi32_ps(bytes16(w + SCALE + COLS * group)));
        const __m512  down  = _mm512_mul_ps(halves16(w + D_MIN), _mm512_cvtepi32_ps(negative(min)));
        return {read(w, group), {scale, scale}, {down, down}};
    }

    static codes32 read(const char * w, int group) {
        codes32 codes = codes32::nibbles(w + 256 * group);
        velo_read_ahead(w + BYTES / 8 * group, BYTES / 8);
        if (FIVE_BITS) {
            codes.add_fifth_bit(load(w + BITS + 64 * group));
        }
        return codes;
    }

    template <int ROWS>
    static void subtract_minima(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        const __m512 d = halves16(w + D_MIN);
        __m512i      min[8]; // of a group, in both halves of a lane: a row's sums are of 16 values
        for (int k = 0; k < 4; ++k) {
            const __m512i two  = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) (w + MIN + 32 * k)));
            const __m512i even = _mm512_and_si512(two, _mm512_set1_epi32(0xffff));
            const __m512i odd  = _mm512_srli_epi32(two, 16);
            min[2 * k]         = _mm512_or_si512(even, _mm512_slli_epi32(two, 16));
            min[2 * k + 1]     = _mm512_or_si512(odd, _mm512_slli_epi32(odd, 16));
        }
        for (int m = 0; m < ROWS; ++m) {
            __m512i minima = _mm512_setzero_si512();
            for (int k = 0; k < 8; ++k) {
                minima = _mm512_dpwssd_epi32(minima, word(rows[m]->bsums + 2 * k), min[k]);
            }
            out[m] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minima), _mm512_mul_ps(d, _mm512_set1_ps(rows[m]->d)), out[m]);
        }
    }
};

// Codes of 6 bits around 32, a scale for each 16.
struct q6_K {
    using row = centered_q8_K<5, 16>;

    static constexpr int K     = QK_K;
    static constexpr int BITS  = QK_K / 2 * COLS;
    static constexpr int SCALE = BITS + QK_K / 4 * COLS;
    static constexpr int D     = SCALE + 16 * COLS;
    static constexpr int BYTES = D + 2 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        block_sums<ROWS> sums = {};
        for (int group = 0; group < 16; ++group) {
            __m512i codes[4];
            read(w, group, codes);
            row_sums<ROWS> products;
            add_products<4>(begin<ROWS>(products, rows, group), codes, rows, 16 * group);
            scale_and_add<ROWS>(sums, products, scales16(w + SCALE + COLS * group));
        }
        finish_block<ROWS>(w + D, rows, sums, out);
    }

    static weights32 unpack(const char * w, int group) {
        weights32 out;
        for (int half = 0; half < 2; ++half) {
            read(w, 2 * group + half, out.codes.at + 4 * half);
            const __m512i scale = bytes16(w + SCALE + COLS * (2 * group + half));
            out.scale[half]     = _mm512_mul_ps(halves16(w + D), _mm512_cvtepi32_ps(scale));
            out.offset[half]    = _mm512_mul_ps(out.scale[half], _mm512_set1_ps(-32));
        }
        return out;
    }

    static void read(const char * w, int group, __m512i * codes) {
        const char * line = w + 128 * group;
        velo_read_ahead(w + BYTES / 16 * group, BYTES / 16);
        const __m512i bits = load(w + BITS + 64 * group);
        codes[0]           = _mm512_or_si512(low(load(line)), upper<0, 2>(bits));
        codes[1]           = _mm512_or_si512(high(load(line)), upper<2, 2>(bits));
        codes[2]           = _mm512_or_si512(low(load(line + 64)), upper<4, 2>(bits));
        codes[3]           = _mm512_or_si512(high(load(line + 64)), upper<6, 2>(bits));
    }
};

// Codes of 4 bits for bytes around 128, a scale for each 32.
struct iq4_xs {
    using row = centered_q8_K<7, 32>;

    static constexpr int K     = QK_K;
    static constexpr int SCALE = QK_K / 2 * COLS;
    static constexpr int D     = SCALE + 8 * COLS;
    static constexpr int BYTES = D + 2 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        block_sums<ROWS> sums = {};
        for (int group = 0; group < 8; ++group) {
            const codes32  codes = read(w, group);
            row_sums<ROWS> products;
            add_products<8>(begin<ROWS>(products, rows, group), codes.at, rows, 32 * group);
            scale_and_add<ROWS>(sums, products, scales16(w + SCALE + COLS * group));
        }
        finish_block<ROWS>(w + D, rows, sums, out);
    }

    static weights32 unpack(const char * w, int group) {
        const __m512 scale = _mm512_mul_ps(halves16(w + D), _mm512_cvtepi32_ps(bytes16(w + SCALE + COLS * group)));
        const __m512 down  = _mm512_mul_ps(scale, _mm512_set1_ps(-128));
        return {read(w, group), {scale, scale}, {down, down}};
    }

    static codes32 read(const char * w, int group) {
        const __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(VELO_IQ4_VALUES));
        codes32       codes  = codes32::nibbles(w + 256 * group);
        velo_read_ahead(w + BYTES / 8 * group, BYTES / 8);
        codes.look_up(_mm512_xor_si512(values, _mm512_set1_epi8(static_cast<char>(128))));
        return codes;
    }
};

// ---- types of 32 codes to a scale ----

// A row's bytes as in a q8_0, and minus their sum, which gives what the middle of the codes adds to the products.
struct summed_q8_0 {
    float   d;
    int32_t minus_sum;
    int8_t  qs[QK8_0];
};

// 32 codes along K around a middle of 2^SHIFT.
template <int SHIFT, int ROWS>
void add_around_middle(const codes32 & codes, __m512 d, const summed_q8_0 * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
    row_sums<ROWS> sums;
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
        sums[m] = _mm512_slli_epi32(_mm512_set1_epi32(rows[m]->minus_sum), SHIFT);
    }
    add_products<8>(sums, codes.at, rows, 0);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
        out[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m]), _mm512_mul_ps(d, _mm512_set1_ps(rows[m]->d)), out[m]);
    }
}

inline __m512 scale_of(const ggml_half & half) { return _mm512_set1_ps(GGML_CPU_FP16_TO_FP32(half)); }

// Codes of 4 bits around 8.
struct q4_0 {
    using row = summed_q8_0;

    static constexpr int K     = QK4_0;
    static constexpr int D     = K / 2 * COLS;
    static constexpr int BYTES = D + 2 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        velo_read_ahead(w, BYTES);
        add_around_middle<3, ROWS>(codes32::nibbles(w), halves16(w + D), rows, out);
    }

    static weights32 unpack(const char * w, int) {
        velo_read_ahead(w, BYTES);
        const __m512 d = halves16(w + D), down = _mm512_mul_ps(d, _mm512_set1_ps(-8));
        return {codes32::nibbles(w), {d, d}, {down, down}};
    }
};

// Codes of 4 bits above a minimum.
struct q4_1 {
    using row = block_q8_1;

    static constexpr int K     = QK4_1;
    static constexpr int D     = K / 2 * COLS;
    static constexpr int MIN   = D + 2 * COLS;
    static constexpr int BYTES = MIN + 2 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        const __m512   d = halves16(w + D), min = halves16(w + MIN);
        row_sums<ROWS> sums = {};
        velo_read_ahead(w, BYTES);
        add_products<8>(sums, codes32::nibbles(w).at, rows, 0);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
            out[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m]), _mm512_mul_ps(d, scale_of(rows[m]->d)), out[m]);
            out[m] = _mm512_fmadd_ps(min, scale_of(rows[m]->s), out[m]);
        }
    }

    static weights32 unpack(const char * w, int) {
        velo_read_ahead(w, BYTES);
        const __m512 d = halves16(w + D), min = halves16(w + MIN);
        return {codes32::nibbles(w), {d, d}, {min, min}};
    }
};

// Signed bytes. One factor of the instruction is unsigned: these, plus 128.
struct q8_0 {
    using row = summed_q8_0;

    static constexpr int K     = QK8_0;
    static constexpr int D     = K * COLS;
    static constexpr int BYTES = D + 2 * COLS + 4 * COLS; // after the scales follow sums for upstream's products

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        velo_read_ahead(w, BYTES);
        add_around_middle<7, ROWS>(codes32::shifted_bytes(w), halves16(w + D), rows, out);
    }

    static weights32 unpack(const char * w, int) {
        velo_read_ahead(w, BYTES);
        const __m512 d = halves16(w + D), down = _mm512_mul_ps(d, _mm512_set1_ps(-128));
        return {codes32::shifted_bytes(w), {d, d}, {down, down}};
    }
};

template <class T> struct type_of {
    using weights = T;
};

// Returns f(type_of<T>()) for the weights T of a type; false for any other type.
template <class F> bool with_weights(ggml_type type, F f) {
    switch (type) {
    case GGML_TYPE_Q4_0:
        return f(type_of<q4_0>());
    case GGML_TYPE_Q4_1:
        return f(type_of<q4_1>());
    case GGML_TYPE_Q8_0:
        return f(type_of<q8_0>());
    case GGML_TYPE_Q4_K:
        return f(type_of<with_minimum<false>>());
    case GGML_TYPE_Q5_K:
        return f(type_of<with_minimum<true>>());
    case GGML_TYPE_Q6_K:
        return f(type_of<q6_K>());
    case GGML_TYPE_IQ4_XS:
        return f(type_of<iq4_xs>());
    default:
        return false;
    }
}

} // namespace packed
