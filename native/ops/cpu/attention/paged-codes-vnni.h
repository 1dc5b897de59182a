// The codes and scales of a tile of quantized rows, arranged for the dot products of AVX-512 VNNI.
#pragma once

#include "iq4-values.h"
#include "paged-page.h"

#if defined(PAGED_CODES_VNNI)

namespace paged {

namespace vnni {

constexpr int group       = code_group;
constexpr int most_groups = most_code_groups;
static_assert(most_groups % 4 == 0, "scales are stored for 4 groups at a time");

struct alignas(64) byte_table {
    uint8_t x[64];
};
struct alignas(64) dword_table {
    uint32_t x[16];
};
PAGED_INLINE __m512i vector_of(const byte_table & t) { return _mm512_load_si512(t.x); }
PAGED_INLINE __m512i vector_of(const dword_table & t) { return _mm512_load_si512(t.x); }

// ---- where rows lie ----

// Hides a value's origin from the compiler.
template <class T> PAGED_INLINE T opaque(T x) {
#    if defined(__GNUC__)
    __asm__("" : "+r"(x));
#    endif
    return x;
}

// The same, anew in each iteration of a loop. Addresses in the loop are then offsets from it. Otherwise the compiler
// computes each of them before the loop and spills them.
template <class T> PAGED_INLINE T renewed(T x) {
#    if defined(__GNUC__)
    __asm__ volatile("" : "+r"(x));
#    endif
    return x;
}

// Offsets of rows from a few multiples of the stride in registers. Otherwise the compiler keeps an address for each
// row, on the stack.
struct row_strides {
    size_t one, three, five, seven;

    explicit PAGED_INLINE row_strides(size_t stride)
        : one(stride), three(opaque(3 * stride)), five(opaque(5 * stride)), seven(opaque(7 * stride)) {}
    PAGED_INLINE size_t operator()(int i) const { // below 8
        const size_t at[8] = {0, one, 2 * one, three, 4 * one, five, 2 * three, seven};
        return at[i];
    }
};
struct rows_of_4 {
    const char * first;
    row_strides  at;

    PAGED_INLINE              rows_of_4(const char * p, row_strides s) : first(opaque(p)), at(s) {}
    PAGED_INLINE const char * operator[](int i) const { return first + at(i); }
};
struct rows_of_16 {
    const char * first;
    const char * second;
    row_strides  at;

    PAGED_INLINE rows_of_16(const char * p, row_strides s) : first(opaque(p)), second(opaque(p + 8 * s.one)), at(s) {}
    PAGED_INLINE const char * operator[](int i) const { return (i < 8 ? first : second) + at(i % 8); }
};

// ---- loads and transposes ----

PAGED_INLINE __m512i load_2x32(const char * a, const char * b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) a)),
                              _mm256_loadu_si256((const __m256i *) b), 1);
}
PAGED_INLINE __m256i load_2x16(const char * a, const char * b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) a)),
                                   _mm_loadu_si128((const __m128i *) b), 1);
}
PAGED_INLINE __m512i load_4x16(const char * a, const char * b, const char * c, const char * d) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_2x16(a, b)), load_2x16(c, d), 1);
}
PAGED_INLINE uint64_t word_at(const char * p) {
    uint16_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

// 4x4 dwords within each quarter of four vectors
PAGED_INLINE void transpose_quarters(const __m512i * x, __m512i * out) {
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

// Interleaves 16 bytes of each of 4 tokens: byte 4*i + t of the result is byte i of token t. With VBMI in one permute,
// else dwords across the vector and then bytes within its quarters.
constexpr byte_table make_interleave() {
    byte_table made = {};
    for (int i = 0; i < 64; ++i) {
        made.x[i] = (uint8_t) (i % 4 * 16 + i / 4);
    }
    return made;
}
constexpr dword_table make_dword_interleave() {
    dword_table made = {};
    for (int i = 0; i < 16; ++i) {
        made.x[i] = (uint32_t) (i % 4 * 4 + i / 4);
    }
    return made;
}
constexpr byte_table make_byte_transpose() { // 4x4 bytes within each quarter
    byte_table made = {};
    for (int i = 0; i < 64; ++i) {
        made.x[i] = (uint8_t) (i % 4 * 4 + i % 16 / 4);
    }
    return made;
}
constexpr byte_table byte_transpose = make_byte_transpose();

PAGED_INLINE __m512i interleaved_16(__m512i x) { // 4 rows of 16 bytes
#    if defined(__AVX512VBMI__)
    static constexpr byte_table order = make_interleave();
    return _mm512_permutexvar_epi8(vector_of(order), x);
#    else
    static constexpr dword_table order = make_dword_interleave();
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(vector_of(order), x), vector_of(byte_transpose));
#    endif
}

// ---- products ----

// Returns sum + x * y, with one dword of y for all lanes: four products of unsigned and signed bytes, or two of words.
// GCC would spend an instruction on the broadcast.
PAGED_INLINE __m512i add_bytes(__m512i sum, __m512i x, const int32_t * y) {
#    if defined(__GNUC__)
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*y));
    return sum;
#    else
    return _mm512_dpbusd_epi32(sum, x, _mm512_set1_epi32(*y));
#    endif
}
PAGED_INLINE __m512i add_words(__m512i sum, __m512i x, const int32_t * y) {
#    if defined(__GNUC__)
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*y));
    return sum;
#    else
    return _mm512_dpwssd_epi32(sum, x, _mm512_set1_epi32(*y));
#    endif
}

// ---- the types ----

// Each has: the bytes of a group; whether a minimum follows the scale; what is subtracted from its key and its value
// codes; keys() of 16 tokens: lane t of w[k] has bytes 4k.. of token t; values() of 4 tokens, bytes interleaved,
// or of 2, words interleaved within each quarter. Codes are unsigned; as words, signed.

struct q8_0_codes {
    static constexpr int  bytes = 34, key_offset = 128, value_offset = 0;
    static constexpr bool has_min = false, value_words = true;

    static PAGED_INLINE void keys(const char * p, const row_strides & at, __m512i * w) {
        const __m512i    flip = _mm512_set1_epi8((char) 0x80);
        const rows_of_16 row(p + 2, at);
        __m512i          x[8], u[8];
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) { // two rows beside each other, 4 tokens apart
            x[i]     = _mm512_xor_si512(load_2x32(row[i], row[4 + i]), flip);
            x[4 + i] = _mm512_xor_si512(load_2x32(row[8 + i], row[12 + i]), flip);
        }
        transpose_quarters(x, u);
        transpose_quarters(x + 4, u + 4);
        PAGED_UNROLL
        for (int k = 0; k < 4; ++k) {
            w[k]     = _mm512_shuffle_i32x4(u[k], u[4 + k], 0x88);
            w[4 + k] = _mm512_shuffle_i32x4(u[k], u[4 + k], 0xdd);
        }
    }
    static PAGED_INLINE void values(const char * p, const char * q, __m512i * x) {
        const __m512i a = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) (p + 2)));
        const __m512i b = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) (q + 2)));
        x[0]            = _mm512_unpacklo_epi16(a, b);
        x[1]            = _mm512_unpackhi_epi16(a, b);
    }
};

// Byte i of the codes holds element i in its low nibble and element i + 16 in its high one.
template <int first_code> struct nibbles {
    static PAGED_INLINE __m512i low(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static PAGED_INLINE __m512i high(__m512i x) { return low(_mm512_srli_epi16(x, 4)); }

    static PAGED_INLINE void keys(const char * p, const row_strides & at, __m512i * w) {
        const rows_of_16 row(p + first_code, at);
        __m512i          x[4], u[4];
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) {
            x[i] = load_4x16(row[i], row[4 + i], row[8 + i], row[12 + i]);
        }
        transpose_quarters(x, u);
        PAGED_UNROLL
        for (int k = 0; k < 4; ++k) {
            w[k]     = low(u[k]);
            w[4 + k] = high(u[k]);
        }
    }
    static PAGED_INLINE void values(const char * p, const row_strides & at, __m512i * x) {
        const rows_of_4 row(p + first_code, at);
        const __m512i   both = interleaved_16(load_4x16(row[0], row[1], row[2], row[3]));
        x[0]                 = low(both);
        x[1]                 = high(both);
    }
};

// The same with a fifth bit for each element, in 4 bytes before the codes.
template <int first_code> struct fifths {
    using base = nibbles<first_code>;

    static PAGED_INLINE __m512i with_bit(__m512i x, uint64_t bits) {
        return _mm512_or_si512(x, _mm512_maskz_set1_epi8(bits, 16));
    }
    static constexpr int qh = -4; // offset of the bits from the codes
    // bits of tokens i, i + 4, i + 8, i + 12 after one another
    static PAGED_INLINE uint64_t bits_of_keys(const rows_of_16 & row, int i, int from) {
        return word_at(row[i] + from) | word_at(row[4 + i] + from) << 16 | word_at(row[8 + i] + from) << 32 |
               word_at(row[12 + i] + from) << 48;
    }
    // bit 4*i + t is bit i of token t
    static PAGED_INLINE uint64_t bits_of_values(const rows_of_4 & row, int from) {
        constexpr uint64_t each = 0x1111111111111111;
        return _pdep_u64(word_at(row[0] + from), each) | _pdep_u64(word_at(row[1] + from), each << 1) |
               _pdep_u64(word_at(row[2] + from), each << 2) | _pdep_u64(word_at(row[3] + from), each << 3);
    }
    static PAGED_INLINE void keys(const char * p, const row_strides & at, __m512i * w) {
        const rows_of_16 row(p + first_code, at);
        __m512i          low[4], high[4];
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) {
            const __m512i x = load_4x16(row[i], row[4 + i], row[8 + i], row[12 + i]);
            low[i]          = with_bit(base::low(x), bits_of_keys(row, i, qh));
            high[i]         = with_bit(base::high(x), bits_of_keys(row, i, qh + 2));
        }
        transpose_quarters(low, w);
        transpose_quarters(high, w + 4);
    }
    static PAGED_INLINE void values(const char * p, const row_strides & at, __m512i * x) {
        const rows_of_4 row(p + first_code, at);
        base::values(p, at, x);
        x[0] = with_bit(x[0], bits_of_values(row, qh));
        x[1] = with_bit(x[1], bits_of_values(row, qh + 2));
    }
};

struct q4_0_codes : nibbles<2> {
    static constexpr int  bytes = 18, key_offset = 8, value_offset = 8;
    static constexpr bool has_min = false, value_words = false;
};
struct q4_1_codes : nibbles<4> {
    static constexpr int  bytes = 20, key_offset = 0, value_offset = 0;
    static constexpr bool has_min = true, value_words = false;
};
struct q5_0_codes : fifths<6> {
    static constexpr int  bytes = 22, key_offset = 16, value_offset = 16;
    static constexpr bool has_min = false, value_words = false;
};
struct q5_1_codes : fifths<8> {
    static constexpr int  bytes = 24, key_offset = 0, value_offset = 0;
    static constexpr bool has_min = true, value_words = false;
};
struct iq4_nl_codes {
    static constexpr int  bytes = 18, key_offset = 128, value_offset = 128;
    static constexpr bool has_min = false, value_words = false;

    static PAGED_INLINE __m512i values_plus_128(__m512i x) {
        const __m128i values = _mm_xor_si128(_mm_setr_epi8(VELO_IQ4_VALUES), _mm_set1_epi8((char) 0x80));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), x);
    }
    static PAGED_INLINE void keys(const char * p, const row_strides & at, __m512i * w) {
        nibbles<2>::keys(p, at, w);
        PAGED_UNROLL
        for (int k = 0; k < 8; ++k) {
            w[k] = values_plus_128(w[k]);
        }
    }
    static PAGED_INLINE void values(const char * p, const row_strides & at, __m512i * x) {
        nibbles<2>::values(p, at, x);
        x[0] = values_plus_128(x[0]);
        x[1] = values_plus_128(x[1]);
    }
};

// ---- scales ----

// One word of each group of 32 tokens, as halves: [group][token]. Four groups at a time: one load of a token's row, or
// two loads, have each group in another quarter, and a byte shuffle moves its words to the token's lane.
using halves = uint16_t[most_groups][tile_tokens];

template <int bytes, int word> struct scale_picker {
    static constexpr bool in_one_load = 3 * bytes + 2 * word + 2 <= 64;
    // else: groups 0 and 1 are in quarters 0 and `apart`, groups 2 and 3 in the other two of a load from `rest` on
    static constexpr int apart = bytes / 16;
    static constexpr int rest  = 2 * bytes - 16 * (3 - apart);

    static constexpr int quarter(int g) { return in_one_load || apart == 1 ? g : g % 2 * 2 + g / 2; }
    static constexpr int byte(int g) { return g * bytes + 2 * word - (in_one_load || g < 2 ? 0 : rest); }

    struct alignas(64) tables {
        uint8_t of[8][64];
    };
    static constexpr tables make_picks() { // of tokens 0 to 7
        tables made = {};
        for (int t = 0; t < 8; ++t) {
            for (int i = 0; i < 64; ++i) {
                made.of[t][i] = 0x80; // a zero
            }
            for (int g = 0; g < 4; ++g) {
                uint8_t * to = made.of[t] + 16 * quarter(g) + 2 * t;
                to[0]        = (uint8_t) (byte(g) % 16);
                to[1]        = (uint8_t) (byte(g) % 16 + 1);
            }
        }
        return made;
    }
    static constexpr tables picks = make_picks();

    // 8 of the rows; `other` is `rest` bytes after `row`
    static PAGED_INLINE __m512i of_8(const rows_of_16 & row, const rows_of_16 & other, int from, __mmask16 others) {
        __m512i r = _mm512_setzero_si512();
        PAGED_UNROLL
        for (int t = 0; t < 8; ++t) {
            __m512i x = _mm512_loadu_si512(row[from + t]);
            if constexpr (!in_one_load) {
                x = _mm512_mask_loadu_epi32(x, others, other[from + t]);
            }
            r = _mm512_or_si512(r, _mm512_shuffle_epi8(x, _mm512_load_si512(picks.of[t])));
        }
        return r;
    }
    static PAGED_INLINE void all(const char * p, const row_strides & at, int n_groups, halves out) {
        for (int j = 0; j < n_groups; j += 4) { // reads nothing past the last group but the rest of a load
            const __mmask16 others =
                (j + 2 < n_groups ? 1 << byte(2) / 4 : 0) | (j + 3 < n_groups ? 1 << byte(3) / 4 : 0);
            const char *     q = p + j * bytes;
            const rows_of_16 low(q, at), low_rest(q + rest, at);
            const rows_of_16 high(q + 16 * at.one, at), high_rest(q + 16 * at.one + rest, at);
            const __m512i    a = of_8(low, low_rest, 0, others), b = of_8(low, low_rest, 8, others);
            const __m512i    c = of_8(high, high_rest, 0, others), d = of_8(high, high_rest, 8, others);
            const __m512i    ab = _mm512_shuffle_i64x2(a, b, 0x44), cd = _mm512_shuffle_i64x2(c, d, 0x44);
            const __m512i    ef = _mm512_shuffle_i64x2(a, b, 0xee), gh = _mm512_shuffle_i64x2(c, d, 0xee);
            const __m512i    of[4] = {_mm512_shuffle_i64x2(ab, cd, 0x88), _mm512_shuffle_i64x2(ab, cd, 0xdd),
                                      _mm512_shuffle_i64x2(ef, gh, 0x88), _mm512_shuffle_i64x2(ef, gh, 0xdd)};
            PAGED_UNROLL
            for (int g = 0; g < 4; ++g) {
                _mm512_store_si512(out[j + g], of[quarter(g)]);
            }
        }
    }
};

PAGED_INLINE __m512 floats_of(const uint16_t * h) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *) h)); }

} // namespace vnni

} // namespace paged

#endif
