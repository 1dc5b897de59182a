// Arithmetic on lines of tiles: 8 columns to a vector, with AVX2 alone or with VNNI of 256 bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace tiles {

constexpr int PARTS   = 2; // vectors of a line
constexpr int COLUMNS = 8; // of a vector

using ints   = __m256i; // 4 bytes, or 2 words, or one number, of each column
using floats = __m256;

inline ints   load(const char * at) { return _mm256_loadu_si256((const __m256i *) at); }
inline floats load_floats(const void * at) { return _mm256_loadu_ps((const float *) at); }
inline floats load_halves(const char * at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) at)); }
inline void   store(float * to, floats x) { _mm256_storeu_ps(to, x); }
inline void   store(char * to, ints x) { _mm256_storeu_si256((__m256i *) to, x); }
inline ints   add(ints a, ints b) { return _mm256_add_epi32(a, b); }
inline ints   merge(ints a, ints b) { return _mm256_or_si256(a, b); }
inline floats multiply(floats a, floats b) { return _mm256_mul_ps(a, b); }
inline floats multiply_add(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
inline floats to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
inline ints   splat(int32_t x) { return _mm256_set1_epi32(x); }
inline floats splat(float x) { return _mm256_set1_ps(x); }

// Bits of each byte, shifted to the right, or to the left if `by` is negative. Bits of other bytes must not be in
// `mask`.
inline ints bits(ints x, int by, int mask) {
    const ints shifted = by < 0 ? _mm256_slli_epi16(x, -by) : _mm256_srli_epi16(x, by);
    return _mm256_and_si256(by ? shifted : x, _mm256_set1_epi8(static_cast<char>(mask)));
}
inline ints low_nibbles(ints x) { return bits(x, 0, 15); }
inline ints high_nibbles(ints x) { return bits(x, 4, 15); }

// Replaces codes by the bytes that a table of 16 has for them.
inline ints look_up(const int8_t * table, ints codes) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *) table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), codes);
}

// Four bytes or two words of a row, for each column.
inline ints word(const void * at) {
    int32_t value;
    std::memcpy(&value, at, sizeof(value));
    return _mm256_set1_epi32(value);
}

// Words of two groups, as neighbours, from the bytes of each.
inline ints pairs(const char * first, const char * second) {
    const __m128i a = _mm_loadl_epi64((const __m128i *) first), b = _mm_loadl_epi64((const __m128i *) second);
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
}
inline ints pairs(const char * both) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) both)); }
inline ints bytes_to_ints(const char * at) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) at)); }

// Sums of scaled sums of products, in floats.
struct float_totals {
    using scale = floats;

    floats x = _mm256_setzero_ps();

    static scale load_scale(const char * at) { return to_floats(bytes_to_ints(at)); }
    void         add(ints sum, scale by) { x = multiply_add(to_floats(sum), by, x); }
    floats       value() const { return x; }
};

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))

constexpr int MIDDLE_OF_BYTES = 128; // an instruction takes unsigned codes of 8 bits

inline ints codes_of_bytes(ints bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(128))); }

inline ints multiply_bytes(ints sum, ints codes, ints row) {
#    if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, codes, row);
#    else
    return _mm256_dpbusd_epi32(sum, codes, row);
#    endif
}

template <int BITS> struct products {
    static constexpr int  ROOM = 1 << 10; // products that fit into a sum
    static constexpr bool WIDE = true;    // sums are numbers of 32 bits

    using totals = float_totals;

    static ints add(ints sum, ints codes, ints row) { return multiply_bytes(sum, codes, row); }
    static ints total(ints sum) { return sum; }
};

// Adds the products of pairs of words.
inline ints add_pairs(ints sum, ints a, ints b) {
#    if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#    else
    return _mm256_dpwssd_epi32(sum, a, b);
#    endif
}

#else

constexpr int MIDDLE_OF_BYTES = 0; // codes of 8 bits are signed

inline ints codes_of_bytes(ints bytes) { return bytes; }

// Keeps a sum in its register: GCC would compute all products first, in more registers than there are.
inline ints in_order(ints sum) {
    asm("" : "+x"(sum));
    return sum;
}

inline ints add_pairs(ints sum, ints a, ints b) { return in_order(add(sum, _mm256_madd_epi16(a, b))); }

// Sums of scaled sums of products, in integers: scales are bytes, and the sums are pairs of words.
struct int_totals {
    using scale = ints; // the same word twice

    ints x = _mm256_setzero_si256();

    static scale load_scale(const char * at) {
        const ints numbers = bytes_to_ints(at);
        return _mm256_blend_epi16(numbers, _mm256_slli_epi32(numbers, 16), 0xaa);
    }
    void   add(ints sum, scale by) { x = tiles::add(x, _mm256_madd_epi16(sum, by)); }
    floats value() const { return to_floats(x); }
};

// Unsigned codes of up to 6 bits. A sum is a pair of words: two products of such a code and a byte in -127..127 each.
template <int BITS> struct products {
    static constexpr int  ROOM = 32767 / (2 * 127 * ((1 << BITS) - 1));
    static constexpr bool WIDE = false;

    using totals = int_totals;

    static ints add(ints sum, ints codes, ints row) {
        return in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, row)));
    }
    static ints total(ints sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};

// Signed codes of 8 bits.
template <> struct products<8> {
    static constexpr int  ROOM = 1 << 10;
    static constexpr bool WIDE = true;

    using totals = float_totals;

    static ints add(ints sum, ints codes, ints row) {
        const ints two = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(row, codes));
        return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(two, _mm256_set1_epi16(1))));
    }
    static ints total(ints sum) { return sum; }
};

#endif

// ---- rounding of rows ----

// Returns the largest magnitude; not a number if one of the values is none.
template <int N> float largest_of(const float * from) {
    ints most = _mm256_setzero_si256(); // magnitudes are ordered like the integers of their bits
    for (int i = 0; i < N; i += 8) {
        const ints bits = _mm256_loadu_si256((const __m256i *) (from + i));
        most            = _mm256_max_epi32(most, _mm256_and_si256(bits, splat(0x7fffffff)));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four         = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four         = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

// Sums of 16 bytes each.
inline void sums_of(ints bytes, int32_t (&out)[2]) {
    const ints pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    ints       sums  = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    sums             = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums             = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
    out[0]           = _mm256_extract_epi32(sums, 0);
    out[1]           = _mm256_extract_epi32(sums, 4);
}

// Rounds 32 values to bytes, to nearest, ties to even, and returns the sums of 16 each.
inline void round_32(const float * from, float scale, int8_t * to, int32_t (&sums)[2]) {
    const floats by = splat(scale);
    const ints   a  = _mm256_cvtps_epi32(multiply(_mm256_loadu_ps(from), by));
    const ints   b  = _mm256_cvtps_epi32(multiply(_mm256_loadu_ps(from + 8), by));
    const ints   c  = _mm256_cvtps_epi32(multiply(_mm256_loadu_ps(from + 16), by));
    const ints   d  = _mm256_cvtps_epi32(multiply(_mm256_loadu_ps(from + 24), by));
    // packing takes both halves of a vector by themselves
    const ints parts = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    const ints bytes = _mm256_permutevar8x32_epi32(parts, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *) to, bytes);
    sums_of(bytes, sums);
}

} // namespace tiles
