// The tiles that upstream packs weights into for AMX, type by type, and what a block of them adds to a few rows. A tile
// has 16 columns; in it bytes that are multiplied together lie side by side, 32 or 16 along K are unpacked into
// registers at a time. Sums are of integers within a block, so that a row is the same to the bit whatever goes with it.
#pragma once

#define GGML_COMMON_DECL_C
#define GGML_COMMON_IMPL_C
#include "ggml-common.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "read-ahead.h"
#include "simd-mappings.h"

#include <cstring>
#include <immintrin.h>

namespace packed {

constexpr int COLS = 16; // of a tile, whose blocks follow each other along K

// ---- the parts of a packed tile ----

inline __m512i load(const char * at) { return _mm512_loadu_si512(at); }
inline __m512i negative(__m512i values) { return _mm512_sub_epi32(_mm512_setzero_si512(), values); }
inline __m512i bytes16(const char * at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) at)); }
inline __m512  halves16(const char * at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) at)); }
inline __m512i low(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline __m512i high(__m512i bytes) { return low(_mm512_srli_epi16(bytes, 4)); }

// `n` bits of each byte, from bit `first`, moved to bit 4 and up.
template <int first, int n> inline __m512i upper(__m512i bytes) {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << n) - 1) << first));
    const __m512i bits = _mm512_and_si512(bytes, mask);
    return first < 4 ? _mm512_slli_epi16(bits, 4 - first) : _mm512_srli_epi16(bits, first - 4);
}

// 32 codes along K of each column, four to a number.
struct codes32 {
    __m512i at[8];

    void read_bytes(const char * lines) {
        for (int k = 0; k < 8; ++k) {
            at[k] = load(lines + 64 * k);
            velo_read_ahead(lines + 64 * k, 64);
        }
    }

    void read_nibbles(const char * lines) {
        for (int k = 0; k < 4; ++k) {
            const __m512i bytes = load(lines + 64 * k);
            velo_read_ahead(lines + 64 * k, 64);
            at[2 * k]     = low(bytes);
            at[2 * k + 1] = high(bytes);
        }
    }

    void add_fifth_bit(__m512i bits) {
        at[0] = _mm512_or_si512(at[0], upper<0, 1>(bits));
        at[1] = _mm512_or_si512(at[1], upper<1, 1>(bits));
        at[2] = _mm512_or_si512(at[2], upper<2, 1>(bits));
        at[3] = _mm512_or_si512(at[3], upper<3, 1>(bits));
        at[4] = _mm512_or_si512(at[4], upper<4, 1>(bits));
        at[5] = _mm512_or_si512(at[5], upper<5, 1>(bits));
        at[6] = _mm512_or_si512(at[6], upper<6, 1>(bits));
        at[7] = _mm512_or_si512(at[7], upper<7, 1>(bits));
    }

    void look_up(__m512i table) {
        for (__m512i & codes : at) {
            codes = _mm512_shuffle_epi8(table, codes);
        }
    }
};

// 32 weights along K of each column: codes, as bytes without sign, that are scaled and moved; halves of 16 apart.
struct weights32 {
    codes32 codes;
    __m512  scale[2], offset[2];
};

// Four bytes of a row, for each column.
inline __m512i word(const void * at) {
    int32_t value;
    std::memcpy(&value, at, sizeof(value));
    return _mm512_set1_epi32(value);
}

// start + codes * row, where N numbers of codes are without sign and the row's bytes have one.
template <int N> inline __m512i products(__m512i start, const __m512i * codes, const int8_t * row) {
#pragma GCC                     unroll 8
    for (int k = 0; k < N; ++k) {
        start = _mm512_dpbusd_epi32(start, codes[k], word(row + 4 * k));
    }
    return start;
}

// ---- types whose rows of activations are q8_K ----

template <int ROWS> using row_sums = __m512i[ROWS];

inline void scale_and_add(__m512i & sum, __m512i products, __m512i scale) {
    sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(products, scale));
}

template <int ROWS>
void finish_block(const char * d, const block_q8_K * const (&rows)[ROWS], const row_sums<ROWS> & sum,
                  __m512 (&out)[ROWS]) {
    const __m512 columns = halves16(d);
    for (int m = 0; m < ROWS; ++m) {
        out[m] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m]), _mm512_mul_ps(columns, _mm512_set1_ps(rows[m]->d)), out[m]);
    }
}

// What a code's middle of 2^SHIFT adds to products with each 16 of the row's values, negative.
template <int SHIFT, int ROWS> void middles(const block_q8_K * const (&rows)[ROWS], int32_t (&out)[ROWS][16]) {
    for (int m = 0; m < ROWS; ++m) {
        const __m512i sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *) rows[m]->bsums));
        _mm512_storeu_si512(out[m], negative(_mm512_slli_epi32(sums, SHIFT)));
    }
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
        row_sums<ROWS> sum = {};
        for (int group = 0; group < 8; ++group) {
            const codes32 codes = read(w, group);
            const __m512i scale = bytes16(w + SCALE + COLS * group);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; ++m) {
                scale_and_add(sum[m], products<8>(_mm512_setzero_si512(), codes.at, rows[m]->qs + 32 * group), scale);
            }
        }
        finish_block<ROWS>(w + D, rows, sum, out);
        subtract_minima<ROWS>(w, rows, out);
    }

    static weights32 unpack(const char * w, int group) {
        const char *  pairs = w + MIN + 32 * (group / 2); // of two groups: their minima side by side
        const __m512i both  = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) pairs));
        const __m512i min = group % 2 ? _mm512_srai_epi32(both, 16) : _mm512_and_si512(both, _mm512_set1_epi32(0xffff));
        const __m512  scale = _mm512_mul_ps(halves16(w + D), _mm512_cvtepi32_ps(bytes16(w + SCALE + COLS * group)));
        const __m512  down  = _mm512_mul_ps(halves16(w + D_MIN), _mm512_cvtepi32_ps(negative(min)));
        return {read(w, group), {scale, scale}, {down, down}};
    }

    static codes32 read(const char * w, int group) {
        codes32 codes;
        codes.read_nibbles(w + 256 * group);
        if (FIVE_BITS) {
            velo_read_ahead(w + BITS + 64 * group, 64);
            codes.add_fifth_bit(load(w + BITS + 64 * group));
        }
        return codes;
    }

    template <int ROWS>
    static void subtract_minima(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        const __m512 d = halves16(w + D_MIN);
        __m512i      min[4];
        for (int k = 0; k < 4; ++k) {
            min[k] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) (w + MIN + 32 * k)));
        }
        for (int m = 0; m < ROWS; ++m) {
            const __m256i       sums = _mm256_loadu_si256((const __m256i *) rows[m]->bsums); // of 16 values each
            alignas(16) int32_t pairs[4];
            _mm_store_si128((__m128i *) pairs,
                            _mm_hadd_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
            __m512i minima = _mm512_setzero_si512();
            for (int k = 0; k < 4; ++k) {
                minima = _mm512_dpwssds_epi32(minima, _mm512_set1_epi32(pairs[k]), min[k]);
            }
            out[m] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minima), _mm512_mul_ps(d, _mm512_set1_ps(rows[m]->d)), out[m]);
        }
    }
};

// Codes of 6 bits around 32, a scale for each 16.
struct q6_K {
    using row = block_q8_K;

    static constexpr int K     = QK_K;
    static constexpr int BITS  = QK_K / 2 * COLS;
    static constexpr int SCALE = BITS + QK_K / 4 * COLS;
    static constexpr int D     = SCALE + 16 * COLS;
    static constexpr int BYTES = D + 2 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        int32_t middle[ROWS][16];
        middles<5, ROWS>(rows, middle);
        row_sums<ROWS> sum = {};
        for (int group = 0; group < 16; ++group) {
            __m512i codes[4];
            read(w, group, codes);
            const __m512i scale = bytes16(w + SCALE + COLS * group);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; ++m) {
                const __m512i start = _mm512_set1_epi32(middle[m][group]);
                scale_and_add(sum[m], products<4>(start, codes, rows[m]->qs + 16 * group), scale);
            }
        }
        finish_block<ROWS>(w + D, rows, sum, out);
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
        velo_read_ahead(line, 128);
        velo_read_ahead(w + BITS + 64 * group, 64);
        const __m512i bits = load(w + BITS + 64 * group);
        codes[0]           = _mm512_or_si512(low(load(line)), upper<0, 2>(bits));
        codes[1]           = _mm512_or_si512(high(load(line)), upper<2, 2>(bits));
        codes[2]           = _mm512_or_si512(low(load(line + 64)), upper<4, 2>(bits));
        codes[3]           = _mm512_or_si512(high(load(line + 64)), upper<6, 2>(bits));
    }
};

// Codes of 4 bits that stand for bytes around 128, a scale for each 32.
struct iq4_xs {
    using row = block_q8_K;

    static constexpr int K     = QK_K;
    static constexpr int SCALE = QK_K / 2 * COLS;
    static constexpr int D     = SCALE + 8 * COLS;
    static constexpr int BYTES = D + 2 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        int32_t middle[ROWS][16];
        middles<7, ROWS>(rows, middle);
        row_sums<ROWS> sum = {};
        for (int group = 0; group < 8; ++group) {
            const codes32 codes = read(w, group);
            const __m512i scale = bytes16(w + SCALE + COLS * group);
#pragma GCC unroll 8
            for (int m = 0; m < ROWS; ++m) {
                const __m512i start = _mm512_set1_epi32(middle[m][2 * group] + middle[m][2 * group + 1]);
                scale_and_add(sum[m], products<8>(start, codes.at, rows[m]->qs + 32 * group), scale);
            }
        }
        finish_block<ROWS>(w + D, rows, sum, out);
    }

    static weights32 unpack(const char * w, int group) {
        const __m512 scale = _mm512_mul_ps(halves16(w + D), _mm512_cvtepi32_ps(bytes16(w + SCALE + COLS * group)));
        const __m512 down  = _mm512_mul_ps(scale, _mm512_set1_ps(-128));
        return {read(w, group), {scale, scale}, {down, down}};
    }

    static codes32 read(const char * w, int group) {
        const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) kvalues_iq4nl));
        codes32       codes;
        codes.read_nibbles(w + 256 * group);
        codes.look_up(_mm512_xor_si512(values, _mm512_set1_epi8(static_cast<char>(128))));
        return codes;
    }
};

// ---- types whose rows of activations are q8_0 or q8_1 ----

inline __m512 scale_of(const ggml_half & half) { return _mm512_set1_ps(GGML_CPU_FP16_TO_FP32(half)); }

// Codes of 4 bits around 8.
struct q4_0 {
    using row = block_q8_0;

    static constexpr int K     = QK4_0;
    static constexpr int D     = K / 2 * COLS;
    static constexpr int BYTES = D + 2 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        codes32 codes;
        codes.read_nibbles(w);
        const __m512 d = halves16(w + D);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
            const __m512i sum = products<8>(_mm512_set1_epi32(middle(rows[m]->qs)), codes.at, rows[m]->qs);
            out[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(d, scale_of(rows[m]->d)), out[m]);
        }
    }

    static weights32 unpack(const char * w, int) {
        const __m512 d = halves16(w + D), down = _mm512_mul_ps(d, _mm512_set1_ps(-8));
        weights32    out = {{}, {d, d}, {down, down}};
        out.codes.read_nibbles(w);
        return out;
    }

    static int32_t middle(const int8_t * row) {
        const __m256i eights =
            _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(8), _mm256_loadu_si256((const __m256i *) row));
        const __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
        const __m128i twos  = _mm_add_epi32(fours, _mm_shuffle_epi32(fours, 0x4e));
        return -_mm_cvtsi128_si32(_mm_add_epi32(twos, _mm_shuffle_epi32(twos, 0xb1)));
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
        codes32 codes;
        codes.read_nibbles(w);
        const __m512 d = halves16(w + D), min = halves16(w + MIN);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
            const __m512i sum = products<8>(_mm512_setzero_si512(), codes.at, rows[m]->qs);
            out[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(d, scale_of(rows[m]->d)), out[m]);
            out[m] = _mm512_fmadd_ps(min, scale_of(rows[m]->s), out[m]);
        }
    }

    static weights32 unpack(const char * w, int) {
        const __m512 d = halves16(w + D), min = halves16(w + MIN);
        weights32    out = {{}, {d, d}, {min, min}};
        out.codes.read_nibbles(w);
        return out;
    }
};

// Bytes with a sign. The instruction wants one side without: the row's, with 128 on top; what that adds lies packed.
struct q8_0 {
    using row = block_q8_0;

    static constexpr int K      = QK8_0;
    static constexpr int D      = K * COLS;
    static constexpr int MIDDLE = D + 2 * COLS;
    static constexpr int BYTES  = MIDDLE + 4 * COLS;

    template <int ROWS> static void add(const char * w, const row * const (&rows)[ROWS], __m512 (&out)[ROWS]) {
        codes32 codes;
        codes.read_bytes(w);
        const __m512  d     = halves16(w + D);
        const __m512i start = negative(load(w + MIDDLE));
        const __m256i top   = _mm256_set1_epi8(static_cast<char>(128));
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
            alignas(32) uint8_t shifted[K];
            const __m256i       values = _mm256_loadu_si256((const __m256i *) rows[m]->qs);
            _mm256_store_si256((__m256i *) shifted, _mm256_xor_si256(values, top));
            __m512i sum = start;
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                sum = _mm512_dpbusd_epi32(sum, word(shifted + 4 * k), codes.at[k]);
            }
            out[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(d, scale_of(rows[m]->d)), out[m]);
        }
    }

    static weights32 unpack(const char * w, int) {
        const __m512 d = halves16(w + D), down = _mm512_mul_ps(d, _mm512_set1_ps(-128));
        weights32    out = {{}, {d, d}, {down, down}};
        out.codes.read_bytes(w);
        for (__m512i & codes : out.codes.at) {
            codes = _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(128)));
        }
        return out;
    }
};

template <class T> struct type_of {
    using weights = T;
};

// What f(type_of<T>()) returns for the weights T of a type; false for a type that is none of these.
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
