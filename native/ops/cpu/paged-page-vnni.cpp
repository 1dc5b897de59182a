// Pages of codes, multiplied as integers: AVX-512 with VNNI and VBMI.
//
// Keys: the codes of 16 tokens are transposed until each token has a lane, and the dwords of a query are broadcast to
// them, so no sum ever crosses lanes. Values: a weight times its token's scale becomes an integer of 16 bits,
// relative to the tile's largest; the codes of 4 tokens are interleaved and multiplied by the two bytes of their
// weights. Sums of products are exact; floats come in once for each group of 32 elements.
#include "paged-page.h"

#if defined(PAGED_CODES_VNNI)

namespace paged {

namespace {

constexpr int group       = 32;              // elements that share a scale
constexpr int most_groups = 576 / group + 3; // a load takes the scales of up to 4 groups

struct alignas(64) byte_table {
    uint8_t x[64];
};
struct alignas(64) word_table {
    uint16_t x[32];
};
PAGED_INLINE __m512i vector_of(const byte_table & t) { return _mm512_load_si512(t.x); }
PAGED_INLINE __m512i vector_of(const word_table & t) { return _mm512_load_si512(t.x); }

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

constexpr byte_table make_interleave_16() { // byte 4*i + t takes byte i of token t, rows of 16 bytes
    byte_table made = {};
    for (int i = 0; i < 64; ++i) {
        made.x[i] = (uint8_t) (i % 4 * 16 + i / 4);
    }
    return made;
}
constexpr byte_table make_interleave_32(int from) { // the same of rows of 32 bytes, from byte `from`
    byte_table made = {};
    for (int i = 0; i < 64; ++i) {
        made.x[i] = (uint8_t) (i % 4 * 32 + from + i / 4);
    }
    return made;
}
constexpr byte_table interleave_16    = make_interleave_16();
constexpr byte_table interleave_32[2] = {make_interleave_32(0), make_interleave_32(16)};

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
        x[0] = _mm512_permutex2var_epi8(a, vector_of(interleave_32[0]), b);
        x[1] = _mm512_permutex2var_epi8(a, vector_of(interleave_32[1]), b);
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
        const __m512i both = _mm512_permutexvar_epi8(vector_of(interleave_16), load_4x16(p + first_code, stride));
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

// ---- keys ----

template <class C, int rows>
void score_rows(const kv_rows & k, const query_rows & q, int64_t d, float * s, read_ahead & ahead) {
    const int          n_groups = (int) (d / group);
    alignas(64) halves scale, least;
    scale_picker<C::bytes, 0>::all(k.first, k.stride, n_groups, scale);
    if constexpr (C::has_min) {
        scale_picker<C::bytes, 1>::all(k.first, k.stride, n_groups, least);
    }
    for (int half = 0; half < tile_tokens; half += 16) {
        __m512 score[rows];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            score[r] = _mm512_setzero_ps();
        }
        for (int j = 0; j < n_groups; ++j) {
            __m512i w[8];
            C::keys(k.first + half * k.stride + j * C::bytes, k.stride, w);
            ahead.step();
            const __m512 dk = floats_of(scale[j] + half);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const int32_t * codes = (const int32_t *) (q.codes + r * d + j * group);
                const int32_t   sum   = q.sum[r * n_groups + j];
                const float     dq    = q.scale[r * n_groups + j];
                __m512i         dot   = _mm512_set1_epi32(-C::key_offset * sum);
                PAGED_UNROLL
                for (int i = 0; i < 8; ++i) {
                    dot = _mm512_dpbusd_epi32(dot, w[i], _mm512_set1_epi32(codes[i]));
                }
                score[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(dk, _mm512_set1_ps(dq)), score[r]);
                if constexpr (C::has_min) {
                    score[r] = _mm512_fmadd_ps(floats_of(least[j] + half), _mm512_set1_ps(dq * (float) sum), score[r]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            _mm512_storeu_ps(s + r * score_stride + half, score[r]);
        }
    }
}

// ---- values ----

// The weights of a tile times its scales, as integers: for each group and row, 32 low bytes and 32 high ones.
template <int rows> struct integer_weights {
    alignas(64) int32_t bytes[most_groups][rows][16];
    float   unit[most_groups][rows]; // what 1 stands for
    int32_t low[most_groups][rows];  // what the sums of both bytes begin with: the offset of the codes
    int32_t high[most_groups][rows];
    float   least[most_groups][rows]; // sum of weights times minima
};

constexpr byte_table make_split() { // words of 32 tokens, as packs leaves them, to low and high bytes in order
    byte_table made = {};
    for (int t = 0; t < 32; ++t) {
        const int word = t % 16 / 4 * 8 + t % 4 + t / 16 * 4;
        made.x[t]      = (uint8_t) (2 * word);
        made.x[32 + t] = (uint8_t) (2 * word + 1);
    }
    return made;
}
constexpr byte_table split = make_split();

// The largest |scale| of a tile; infinity or NaN where there is one, which then reaches the result.
PAGED_INLINE float largest_scale(const uint16_t * scale) {
    const __m512i magnitude = _mm512_and_si512(_mm512_load_si512(scale), _mm512_set1_epi16(0x7fff));
    const __m256i a = _mm256_max_epu16(_mm512_castsi512_si256(magnitude), _mm512_extracti64x4_epi64(magnitude, 1));
    const __m128i b = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    // the least of the complements is the one horizontal minimum there is
    const __m128i c = _mm_minpos_epu16(_mm_xor_si128(b, _mm_set1_epi16(-1)));
    return _cvtsh_ss((uint16_t) ~_mm_extract_epi16(c, 0));
}

template <class C, int rows>
PAGED_INLINE void make_weights(const halves & scale, const halves & least, int n_groups, const float * w,
                               int64_t w_stride, integer_weights<rows> & out) {
    constexpr float most = C::signed_scale ? 32767.0f : 65535.0f;
    constexpr float tiny = 1e-30f;
    __m512          first[rows], second[rows];
    float           top[rows];
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        const __m512 a = _mm512_loadu_ps(w + r * w_stride), b = _mm512_loadu_ps(w + r * w_stride + 16);
        top[r]           = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
        const __m512 all = _mm512_set1_ps(most / (top[r] > tiny ? top[r] : tiny));
        first[r]         = _mm512_mul_ps(a, all);
        second[r]        = _mm512_mul_ps(b, all);
    }
    for (int j = 0; j < n_groups; ++j) {
        const float  largest = largest_scale(scale[j]);
        const __m512 inverse = _mm512_set1_ps(1.0f / (largest == 0.0f ? 1.0f : largest));
        const __m512 d0      = _mm512_mul_ps(floats_of(scale[j]), inverse);
        const __m512 d1      = _mm512_mul_ps(floats_of(scale[j] + 16), inverse);
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            const __m512i a     = _mm512_cvtps_epi32(_mm512_mul_ps(d0, first[r]));
            const __m512i b     = _mm512_cvtps_epi32(_mm512_mul_ps(d1, second[r]));
            const __m512i words = C::signed_scale ? _mm512_packs_epi32(a, b) : _mm512_packus_epi32(a, b);
            _mm512_store_si512(out.bytes[j][r], _mm512_permutexvar_epi8(vector_of(split), words));
            out.unit[j][r] = largest * (top[r] * (1.0f / most));
            out.low[j][r] = out.high[j][r] = 0;
            if constexpr (C::signed_scale && !C::wide_values) {
                out.low[j][r] = -C::value_offset * _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
            } else if constexpr (C::signed_scale) { // only the high bytes meet codes with an offset
                const __m512i high = _mm512_add_epi32(_mm512_srai_epi32(a, 8), _mm512_srai_epi32(b, 8));
                out.high[j][r]     = -128 * _mm512_reduce_add_epi32(high);
            }
            if constexpr (C::has_min) {
                const __m512 m =
                    _mm512_fmadd_ps(floats_of(least[j] + 16), second[r], _mm512_mul_ps(floats_of(least[j]), first[r]));
                out.least[j][r] = sum(m) * (top[r] * (1.0f / most));
            }
        }
    }
}

template <class C, int rows>
void add_rows(const kv_rows & v, const float * w, int64_t w_stride, int64_t d, float * sum, read_ahead & ahead) {
    const int          n_groups = (int) (d / group);
    alignas(64) halves scale, least;
    scale_picker<C::bytes, 0>::all(v.first, v.stride, n_groups, scale);
    if constexpr (C::has_min) {
        scale_picker<C::bytes, 1>::all(v.first, v.stride, n_groups, least);
    }
    integer_weights<rows> weights; // all of them first: no product waits for its weight
    make_weights<C, rows>(scale, least, n_groups, w, w_stride, weights);
    for (int j = 0; j < n_groups; ++j) {
        __m512i low[rows][2], high[rows][2];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            low[r][0] = low[r][1] = _mm512_set1_epi32(weights.low[j][r]);
            high[r][0] = high[r][1] = _mm512_set1_epi32(weights.high[j][r]);
        }
        PAGED_UNROLL
        for (int c = 0; c < 8; ++c) {
            if (c % 4 == 0) {
                ahead.step();
            }
            __m512i x[2];
            C::values(v.first + 4 * c * v.stride + j * C::bytes, v.stride, x);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const __m512i wl = _mm512_set1_epi32(weights.bytes[j][r][c]);
                const __m512i wh = _mm512_set1_epi32(weights.bytes[j][r][8 + c]);
                PAGED_UNROLL
                for (int i = 0; i < 2; ++i) {
                    low[r][i] = _mm512_dpbusd_epi32(low[r][i], wl, x[i]);
                    if constexpr (!C::signed_scale) {
                        high[r][i] = _mm512_dpbusd_epi32(high[r][i], wh, x[i]);
                    } else if constexpr (!C::wide_values) {
                        high[r][i] = _mm512_dpbusd_epi32(high[r][i], x[i], wh);
                    } else {
                        const __m512i positive = _mm512_xor_si512(x[i], _mm512_set1_epi8((char) 0x80));
                        high[r][i]             = _mm512_dpbusd_epi32(high[r][i], positive, wh);
                    }
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int i = 0; i < 2; ++i) {
                float *       to    = sum + r * d + j * group + i * 16;
                const __m512i exact = _mm512_add_epi32(low[r][i], _mm512_slli_epi32(high[r][i], 8));
                __m512        all   = _mm512_loadu_ps(to);
                if constexpr (C::has_min) {
                    all = _mm512_add_ps(all, _mm512_set1_ps(weights.least[j][r]));
                }
                all = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(weights.unit[j][r]), all);
                _mm512_storeu_ps(to, all);
            }
        }
    }
}

// ---- any number of rows ----

query_rows from_row(const query_rows & q, int64_t r, int64_t d) {
    return {q.x + r * d, q.codes + r * d, q.scale + r * (d / group), q.sum + r * (d / group)};
}

template <class C>
void score_group(const kv_rows & k, const query_rows & q, int64_t rows, int64_t d, float * s, read_ahead & ahead) {
    for (int64_t r = 0; r < rows;) {
        const query_rows here = from_row(q, r, d);
        float *          to   = s + r * score_stride;
        switch (rows - r) {
        case 1:
            score_rows<C, 1>(k, here, d, to, ahead);
            return;
        case 2:
            score_rows<C, 2>(k, here, d, to, ahead);
            return;
        case 3:
            score_rows<C, 3>(k, here, d, to, ahead);
            return;
        case 4:
        case 5:
        case 6:
        case 7:
            score_rows<C, 4>(k, here, d, to, ahead);
            r += 4;
            break;
        default:
            score_rows<C, 8>(k, here, d, to, ahead);
            r += 8;
            break;
        }
    }
}

template <class C>
void add_group(const kv_rows & v, const float * w, int64_t w_stride, int64_t rows, int64_t d, float * sum,
               read_ahead & ahead) {
    for (int64_t r = 0; r < rows; r += 4) {
        const float * from = w + r * w_stride;
        float *       to   = sum + r * d;
        switch (std::min<int64_t>(4, rows - r)) {
        case 1:
            add_rows<C, 1>(v, from, w_stride, d, to, ahead);
            break;
        case 2:
            add_rows<C, 2>(v, from, w_stride, d, to, ahead);
            break;
        case 3:
            add_rows<C, 3>(v, from, w_stride, d, to, ahead);
            break;
        case 4:
            add_rows<C, 4>(v, from, w_stride, d, to, ahead);
            break;
        }
    }
}

int64_t score_steps(int64_t rows, int64_t d) { return d / group * 2 * (rows <= 4 ? 1 : (rows + 7) / 8); }
int64_t add_steps(int64_t rows, int64_t d) { return d / group * 2 * ((rows + 3) / 4); }

template <class C> page_kernel kernel_of() {
    return {page_form::whole, score_group<C>, add_group<C>, score_steps, add_steps};
}

} // namespace

void quantize_query(const float * x, int64_t d, int8_t * codes, float * scale, int32_t * sum) {
    for (int64_t j = 0; j < d / group; ++j) {
        const __m512  a = _mm512_loadu_ps(x + j * group), b = _mm512_loadu_ps(x + j * group + 16);
        const float   top     = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        const __m512  inverse = _mm512_set1_ps(top > 0.0f ? 127.0f / top : 0.0f);
        const __m512i m       = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)),
                      n       = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        _mm_storeu_si128((__m128i *) (codes + j * group), _mm512_cvtsepi32_epi8(m));
        _mm_storeu_si128((__m128i *) (codes + j * group + 16), _mm512_cvtsepi32_epi8(n));
        scale[j] = top / 127.0f;
        sum[j]   = _mm512_reduce_add_epi32(_mm512_add_epi32(m, n));
    }
}

page_kernel code_kernel_of(ggml_type type) {
    switch (type) {
    case GGML_TYPE_Q8_0:
        return kernel_of<q8_0_codes>();
    case GGML_TYPE_Q5_1:
        return kernel_of<q5_1_codes>();
    case GGML_TYPE_Q5_0:
        return kernel_of<q5_0_codes>();
    case GGML_TYPE_Q4_1:
        return kernel_of<q4_1_codes>();
    case GGML_TYPE_Q4_0:
        return kernel_of<q4_0_codes>();
    case GGML_TYPE_IQ4_NL:
        return kernel_of<iq4_nl_codes>();
    default:
        return {};
    }
}

} // namespace paged

#endif
