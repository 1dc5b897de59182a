// The codes and scales of a tile of quantized rows, arranged for the dot products of AVX-512 VNNI.
#pragma once

#include "paged-page.h"

#if defined(PAGED_CODES_VNNI)

namespace paged {

namespace vnni {

constexpr int group       = 32;              // elements that share a scale
constexpr int most_groups = 576 / group + 3; // a load takes the scales of up to 4 groups

struct alignas(64) byte_table {
    uint8_t x[64];
};
struct alignas(64) word_table {
    uint16_t x[32];
};
struct alignas(64) dword_table {
    uint32_t x[16];
};
PAGED_INLINE __m512i vector_of(const byte_table & t) { return _mm512_load_si512(t.x); }
PAGED_INLINE __m512i vector_of(const word_table & t) { return _mm512_load_si512(t.x); }
PAGED_INLINE __m512i vector_of(const dword_table & t) { return _mm512_load_si512(t.x); }

// ---- loads and transposes ----

PAGED_INLINE __m512i load_2x32(const char * p, size_t stride) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) p)),
                              _mm256_loadu_si256((const __m256i *) (p + stride)), 1);
}
PAGED_INLINE __m512i load_4x16(const char * p, size_t stride) {
    const __m128i * row[4] = {(const __m128i *) p, (const __m128i *) (p + stride), (const __m128i *) (p + 2 * stride),
                              (const __m128i *) (p + 3 * stride)};
    const __m256i   low =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(row[0])), _mm_loadu_si128(row[1]), 1);
    const __m256i high =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(row[2])), _mm_loadu_si128(row[3]), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
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

// Interleaves 16 bytes of each of 4 tokens, which lie `bytes` apart: byte 4*i + t of the result is byte from + i of
// token t. With VBMI in one permute, else dwords across the vector and then bytes within its quarters.
template <int bytes, int from> constexpr byte_table make_interleave() {
    byte_table made = {};
    for (int i = 0; i < 64; ++i) {
        made.x[i] = (uint8_t) (i % 4 * bytes + from + i / 4);
    }
    return made;
}
template <int bytes, int from> constexpr dword_table make_dword_interleave() {
    dword_table made = {};
    for (int i = 0; i < 16; ++i) {
        made.x[i] = (uint32_t) (i % 4 * bytes + from) / 4 + i / 4;
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
    static constexpr byte_table order = make_interleave<16, 0>();
    return _mm512_permutexvar_epi8(vector_of(order), x);
#    else
    static constexpr dword_table order = make_dword_interleave<16, 0>();
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(vector_of(order), x), vector_of(byte_transpose));
#    endif
}
template <int from> PAGED_INLINE __m512i interleaved_32(__m512i a, __m512i b) { // 4 rows of 32 bytes, from `from` on
#    if defined(__AVX512VBMI__)
    static constexpr byte_table order = make_interleave<32, from>();
    return _mm512_permutex2var_epi8(a, vector_of(order), b);
#    else
    static constexpr dword_table order = make_dword_interleave<32, from>();
    return _mm512_shuffle_epi8(_mm512_permutex2var_epi32(a, vector_of(order), b), vector_of(byte_transpose));
#    endif
}

// ---- the types ----

// Each has: the bytes of a group; whether an offset follows the scale; whether scales may be negative; what is taken
// off its key and its value codes; keys() of 16 tokens, w[k] having bytes 4k.. of each in a lane; values() of 4
// tokens, interleaved. Key codes are unsigned; value codes are signed, and unsigned too where they are below 128.

struct q8_0_codes {
    static constexpr int  bytes = 34, key_offset = 128, value_offset = 0;
    static constexpr bool has_min = false, signed_scale = false, wide_values = true;

    static PAGED_INLINE void keys(const char * p, size_t stride, __m512i * w) {
        const __m512i flip = _mm512_set1_epi8((char) 0x80);
        __m512i       x[8], u[8];
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) { // two rows beside each other, 4 tokens apart
            x[i]     = _mm512_xor_si512(load_2x32(p + 2 + i * stride, 4 * stride), flip);
            x[4 + i] = _mm512_xor_si512(load_2x32(p + 2 + (8 + i) * stride, 4 * stride), flip);
        }
        transpose_quarters(x, u);
        transpose_quarters(x + 4, u + 4);
        PAGED_UNROLL
        for (int k = 0; k < 4; ++k) {
            w[k]     = _mm512_shuffle_i32x4(u[k], u[4 + k], 0x88);
            w[4 + k] = _mm512_shuffle_i32x4(u[k], u[4 + k], 0xdd);
        }
    }
    static PAGED_INLINE void values(const char * p, size_t stride, __m512i * x) {
        const __m512i a = load_2x32(p + 2, stride), b = load_2x32(p + 2 + 2 * stride, stride);
        x[0] = interleaved_32<0>(a, b);
        x[1] = interleaved_32<16>(a, b);
    }
};

// Byte i of the codes holds element i in its low nibble and element i + 16 in its high one.
template <int first_code> struct nibbles {
    static PAGED_INLINE __m512i low(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static PAGED_INLINE __m512i high(__m512i x) { return low(_mm512_srli_epi16(x, 4)); }

    static PAGED_INLINE void keys(const char * p, size_t stride, __m512i * w) {
        __m512i x[4], u[4];
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) {
            x[i] = load_4x16(p + first_code + i * stride, 4 * stride);
        }
        transpose_quarters(x, u);
        PAGED_UNROLL
        for (int k = 0; k < 4; ++k) {
            w[k]     = low(u[k]);
            w[4 + k] = high(u[k]);
        }
    }
    static PAGED_INLINE void values(const char * p, size_t stride, __m512i * x) {
        const __m512i both = interleaved_16(load_4x16(p + first_code, stride));
        x[0]               = low(both);
        x[1]               = high(both);
    }
};

// The same with a fifth bit for each element, in 4 bytes before the codes.
template <int first_code> struct fifths {
    using base = nibbles<first_code>;

    static PAGED_INLINE __m512i with_bit(__m512i x, uint64_t bits) {
        return _mm512_or_si512(x, _mm512_maskz_set1_epi8(bits, 16));
    }
    // bits of tokens 0, 4, 8, 12 after one another
    static PAGED_INLINE uint64_t bits_of_keys(const char * qh, size_t stride) {
        return word_at(qh) | word_at(qh + 4 * stride) << 16 | word_at(qh + 8 * stride) << 32 |
               word_at(qh + 12 * stride) << 48;
    }
    // bit 4*i + t is bit i of token t
    static PAGED_INLINE uint64_t bits_of_values(const char * qh, size_t stride) {
        constexpr uint64_t each = 0x1111111111111111;
        return _pdep_u64(word_at(qh), each) | _pdep_u64(word_at(qh + stride), each << 1) |
               _pdep_u64(word_at(qh + 2 * stride), each << 2) | _pdep_u64(word_at(qh + 3 * stride), each << 3);
    }
    static PAGED_INLINE void keys(const char * p, size_t stride, __m512i * w) {
        const char * qh = p + first_code - 4;
        __m512i      low[4], high[4];
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) {
            const __m512i x = load_4x16(p + first_code + i * stride, 4 * stride);
            low[i]          = with_bit(base::low(x), bits_of_keys(qh + i * stride, stride));
            high[i]         = with_bit(base::high(x), bits_of_keys(qh + 2 + i * stride, stride));
        }
        transpose_quarters(low, w);
        transpose_quarters(high, w + 4);
    }
    static PAGED_INLINE void values(const char * p, size_t stride, __m512i * x) {
        const char * qh = p + first_code - 4;
        base::values(p, stride, x);
        x[0] = with_bit(x[0], bits_of_values(qh, stride));
        x[1] = with_bit(x[1], bits_of_values(qh + 2, stride));
    }
};

struct q4_0_codes : nibbles<2> {
    static constexpr int  bytes = 18, key_offset = 8, value_offset = 8;
    static constexpr bool has_min = false, signed_scale = true, wide_values = false;
};
struct q4_1_codes : nibbles<4> {
    static constexpr int  bytes = 20, key_offset = 0, value_offset = 0;
    static constexpr bool has_min = true, signed_scale = false, wide_values = false;
};
struct q5_0_codes : fifths<6> {
    static constexpr int  bytes = 22, key_offset = 16, value_offset = 16;
    static constexpr bool has_min = false, signed_scale = true, wide_values = false;
};
struct q5_1_codes : fifths<8> {
    static constexpr int  bytes = 24, key_offset = 0, value_offset = 0;
    static constexpr bool has_min = true, signed_scale = false, wide_values = false;
};
struct iq4_nl_codes {
    static constexpr int  bytes = 18, key_offset = 128, value_offset = 0;
    static constexpr bool has_min = false, signed_scale = true, wide_values = true;

    static PAGED_INLINE __m512i numbers(__m512i x) { // what upstream's kvalues_iq4nl gives for a code
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13,
                                                                        25, 38, 53, 69, 89, 113)),
                                   x);
    }
    static PAGED_INLINE void keys(const char * p, size_t stride, __m512i * w) {
        nibbles<2>::keys(p, stride, w);
        PAGED_UNROLL
        for (int k = 0; k < 8; ++k) {
            w[k] = _mm512_xor_si512(numbers(w[k]), _mm512_set1_epi8((char) 0x80));
        }
    }
    static PAGED_INLINE void values(const char * p, size_t stride, __m512i * x) {
        nibbles<2>::values(p, stride, x);
        x[0] = numbers(x[0]);
        x[1] = numbers(x[1]);
    }
};

// ---- scales ----

// One word of each group of 32 tokens, as halves: [group][token]. Words are picked from whole loads by permutes under
// a mask: 16-bit stores in front of a vector load would wait for the store buffer.
using halves = uint16_t[most_groups][tile_tokens];

template <int bytes, int word> constexpr word_table make_picks(int groups) {
    word_table made = {};
    for (int i = 0; i < 32; ++i) {
        made.x[i] = (uint16_t) (i / (32 / groups) * bytes / 2 + word);
    }
    return made;
}

template <int bytes, int word> struct scale_picker {
    static constexpr int        at_once = 3 * bytes + 2 * word + 2 <= 64 ? 4 : 2; // groups of a load
    static constexpr word_table picks   = make_picks<bytes, word>(at_once);

    // 16 tokens of 2 groups
    static PAGED_INLINE __m512i of_2(const char * p, size_t stride) {
        __m512i even = _mm512_setzero_si512(), odd = even;
        PAGED_UNROLL
        for (int t = 0; t < 16; t += 2) {
            const __m512i a = _mm512_loadu_si512(p + t * stride), b = _mm512_loadu_si512(p + (t + 1) * stride);
            even = _mm512_mask_permutexvar_epi16(even, 0x10001u << t, vector_of(picks), a);
            odd  = _mm512_mask_permutexvar_epi16(odd, 0x20002u << t, vector_of(picks), b);
        }
        return _mm512_or_si512(even, odd);
    }
    // 8 tokens of 4 groups
    static PAGED_INLINE __m512i of_4(const char * p, size_t stride) {
        __m512i r = _mm512_setzero_si512();
        PAGED_UNROLL
        for (int t = 0; t < 8; ++t) {
            r = _mm512_mask_permutexvar_epi16(r, 0x01010101u << t, vector_of(picks),
                                              _mm512_loadu_si512(p + t * stride));
        }
        return r;
    }
    static PAGED_INLINE void all(const char * p, size_t stride, int n_groups, halves out) {
        for (int j = 0; j < n_groups; j += at_once) {
            const char * from = p + j * bytes;
            if constexpr (at_once == 2) {
                const __m512i a = of_2(from, stride), b = of_2(from + 16 * stride, stride);
                _mm512_store_si512(out[j], _mm512_shuffle_i64x2(a, b, 0x44));
                _mm512_store_si512(out[j + 1], _mm512_shuffle_i64x2(a, b, 0xee));
            } else {
                const __m512i a = of_4(from, stride), b = of_4(from + 8 * stride, stride);
                const __m512i c = of_4(from + 16 * stride, stride), d = of_4(from + 24 * stride, stride);
                const __m512i ab = _mm512_shuffle_i64x2(a, b, 0x44), cd = _mm512_shuffle_i64x2(c, d, 0x44);
                const __m512i ef = _mm512_shuffle_i64x2(a, b, 0xee), gh = _mm512_shuffle_i64x2(c, d, 0xee);
                _mm512_store_si512(out[j], _mm512_shuffle_i64x2(ab, cd, 0x88));
                _mm512_store_si512(out[j + 1], _mm512_shuffle_i64x2(ab, cd, 0xdd));
                _mm512_store_si512(out[j + 2], _mm512_shuffle_i64x2(ef, gh, 0x88));
                _mm512_store_si512(out[j + 3], _mm512_shuffle_i64x2(ef, gh, 0xdd));
            }
        }
    }
};

PAGED_INLINE __m512 floats_of(const uint16_t * h) { return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *) h)); }

} // namespace vnni

} // namespace paged

#endif
