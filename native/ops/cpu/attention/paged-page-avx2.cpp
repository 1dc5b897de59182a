// Pages of codes on AVX2: keys are multiplied as integers, 8 tokens in lanes, with the processor's dot product of bytes
// where it has one; values become floats, their scales multiplied into the weights.
//
// A build for AVX2 alone on two Sapphire Rapids cores, 16/8 heads of 128, one sequence at 4096: q8_0 20 GB/s, q4_0 13,
// where the memory gives 35.
#include "paged-page.h"

#if defined(PAGED_CODES_AVX2)

namespace paged {

namespace {

constexpr int group       = code_group;
constexpr int most_groups = most_code_groups;

PAGED_INLINE __m256i load_2x16(const char * p, size_t stride) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) p)),
                                   _mm_loadu_si128((const __m128i *) (p + stride)), 1);
}

// 16 bytes of 8 tokens to 4 vectors: vector k has bytes 4k.. of each token in a lane
PAGED_INLINE void transpose_16(const char * p, size_t stride, __m256i * out) {
    __m256i x[4];
    PAGED_UNROLL
    for (int i = 0; i < 4; ++i) {
        x[i] = load_2x16(p + i * stride, 4 * stride);
    }
    const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
}

// 16 in each byte whose bit is set: bits of the low half for the first 16 bytes, of the high one for the others
PAGED_INLINE __m256i sixteens(uint32_t bits) {
    const __m256i pick = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                          3, 3, 3, 3, 3, 3);
    const __m256i bit  = _mm256_set1_epi64x((int64_t) 0x8040201008040201);
    const __m256i own  = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int) bits), pick), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(own, bit), _mm256_set1_epi8(16));
}

// ---- the types ----

// Each has: the bytes of a group; whether an offset follows the scale; what is taken off its key codes; how many
// products of 4 codes fit a sum of 16 bits, 0 where the codes are signed and fit none; keys() of 8 tokens and
// values() of one, signed.

struct q8_0_codes {
    static constexpr int  bytes = 34, key_offset = 0, short_sums = 0;
    static constexpr bool has_min = false;

    static PAGED_INLINE void keys(const char * p, size_t stride, __m256i * w) {
        transpose_16(p + 2, stride, w);
        transpose_16(p + 18, stride, w + 4);
    }
    static PAGED_INLINE __m256i values(const char * p) { return _mm256_loadu_si256((const __m256i *) (p + 2)); }
};

// Byte i of the codes holds element i in its low nibble and element i + 16 in its high one.
template <int first_code> struct nibbles {
    static PAGED_INLINE __m256i low(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static PAGED_INLINE __m256i high(__m256i x) { return low(_mm256_srli_epi16(x, 4)); }

    static PAGED_INLINE void keys(const char * p, size_t stride, __m256i * w) {
        __m256i u[4];
        transpose_16(p + first_code, stride, u);
        PAGED_UNROLL
        for (int k = 0; k < 4; ++k) {
            w[k]     = low(u[k]);
            w[4 + k] = high(u[k]);
        }
    }
    static PAGED_INLINE __m256i codes(const char * p) {
        const __m128i both = _mm_loadu_si128((const __m128i *) (p + first_code));
        return low(_mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1));
    }
};

// The same with a fifth bit for each element, in 4 bytes before the codes.
template <int first_code> struct fifths {
    static PAGED_INLINE uint32_t bits(const char * p) {
        uint32_t x;
        memcpy(&x, p + first_code - 4, sizeof(x));
        return x;
    }
    static PAGED_INLINE __m256i codes(const char * p) {
        return _mm256_or_si256(nibbles<first_code>::codes(p), sixteens(bits(p)));
    }
    static PAGED_INLINE void keys(const char * p, size_t stride, __m256i * w) {
        alignas(32) char whole[8][32]; // the transpose takes bytes
        PAGED_UNROLL
        for (int t = 0; t < 8; ++t) {
            _mm256_store_si256((__m256i *) whole[t], codes(p + t * stride));
        }
        transpose_16(whole[0], 32, w);
        transpose_16(whole[0] + 16, 32, w + 4);
    }
};

template <class C, int offset> struct shifted : C {
    static PAGED_INLINE __m256i values(const char * p) {
        return _mm256_sub_epi8(C::codes(p), _mm256_set1_epi8(offset));
    }
};

struct q4_0_codes : shifted<nibbles<2>, 8> {
    static constexpr int  bytes = 18, key_offset = 8, short_sums = 8;
    static constexpr bool has_min = false;
};
struct q4_1_codes : shifted<nibbles<4>, 0> {
    static constexpr int  bytes = 20, key_offset = 0, short_sums = 8;
    static constexpr bool has_min = true;
};
struct q5_0_codes : shifted<fifths<6>, 16> {
    static constexpr int  bytes = 22, key_offset = 16, short_sums = 4;
    static constexpr bool has_min = false;
};
struct q5_1_codes : shifted<fifths<8>, 0> {
    static constexpr int  bytes = 24, key_offset = 0, short_sums = 4;
    static constexpr bool has_min = true;
};
struct iq4_nl_codes {
    static constexpr int  bytes = 18, key_offset = 0, short_sums = 0;
    static constexpr bool has_min = false;

    static PAGED_INLINE __m256i numbers(__m256i x) { // what upstream's kvalues_iq4nl gives for a code
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10,
                                                                             1, 13, 25, 38, 53, 69, 89, 113)),
                                   x);
    }
    static PAGED_INLINE void keys(const char * p, size_t stride, __m256i * w) {
        nibbles<2>::keys(p, stride, w);
        PAGED_UNROLL
        for (int k = 0; k < 8; ++k) {
            w[k] = numbers(w[k]);
        }
    }
    static PAGED_INLINE __m256i values(const char * p) { return numbers(nibbles<2>::codes(p)); }
};

// ---- scales ----

using floats = float[most_groups][tile_tokens];

// one half of each group of 32 tokens, `at` bytes into it
PAGED_INLINE void load_halves(const char * p, size_t stride, int bytes, int at, int n_groups, floats out) {
    for (int j = 0; j < n_groups; ++j) {
        for (int t = 0; t < tile_tokens; t += 8) {
            const char * from = p + t * stride + j * bytes + at;
            uint16_t     h[8];
            PAGED_UNROLL
            for (int i = 0; i < 8; ++i) {
                memcpy(h + i, from + i * stride, 2);
            }
            const __m128i all = _mm_setr_epi16((short) h[0], (short) h[1], (short) h[2], (short) h[3], (short) h[4],
                                               (short) h[5], (short) h[6], (short) h[7]);
            _mm256_storeu_ps(out[j] + t, _mm256_cvtph_ps(all));
        }
    }
}

PAGED_INLINE float sum_of(__m256 x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two  = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// ---- keys ----

PAGED_INLINE __m256i query_codes(const int8_t * q, int i) {
    int32_t dword;
    memcpy(&dword, q + 4 * i, sizeof(dword));
    return _mm256_set1_epi32(dword);
}

#    if defined(__AVXVNNI__)
PAGED_INLINE __m256i dot_bytes(__m256i sum, __m256i positive, __m256i any) {
    return _mm256_dpbusd_avx_epi32(sum, positive, any);
}
#    else
PAGED_INLINE __m256i dot_bytes(__m256i sum, __m256i positive, __m256i any) { // no pair of products above 2^15
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(positive, any), _mm256_set1_epi16(1)));
}
#    endif

// sum + the products of 32 codes of 8 tokens with those of a query
template <class C> PAGED_INLINE __m256i dot(__m256i sum, const __m256i * w, const int8_t * q) {
    if constexpr (C::short_sums == 0) {
        PAGED_UNROLL
        for (int i = 0; i < 8; ++i) {
            const __m256i x = query_codes(q, i);
            sum             = dot_bytes(sum, _mm256_abs_epi8(x), _mm256_sign_epi8(w[i], x));
        }
        return sum;
    }
#    if defined(__AVXVNNI__)
    PAGED_UNROLL
    for (int i = 0; i < 8; ++i) {
        sum = dot_bytes(sum, w[i], query_codes(q, i));
    }
#    else
    constexpr int at_once = C::short_sums == 0 ? 8 : C::short_sums;
    PAGED_UNROLL
    for (int i = 0; i < 8; i += at_once) {
        __m256i part = _mm256_maddubs_epi16(w[i], query_codes(q, i));
        PAGED_UNROLL
        for (int k = 1; k < at_once; ++k) {
            part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w[i + k], query_codes(q, i + k)));
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
    }
#    endif
    return sum;
}

template <class C, int rows>
PAGED_INLINE void score_rows(const kv_rows & k, const query_rows & q, int64_t d, float * s, read_ahead & ahead) {
    const int n_groups = (int) (d / group);
    floats    scale, least;
    load_halves(k.first, k.stride, C::bytes, 0, n_groups, scale);
    if constexpr (C::has_min) {
        load_halves(k.first, k.stride, C::bytes, 2, n_groups, least);
    }
    for (int t = 0; t < tile_tokens; t += 8) {
        __m256 score[rows];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            score[r] = _mm256_setzero_ps();
        }
        for (int j = 0; j < n_groups; ++j) {
            __m256i w[8];
            C::keys(k.first + t * k.stride + j * C::bytes, k.stride, w);
            ahead.step();
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const int32_t sum   = q.sum[r * n_groups + j];
                const float   dq    = q.scale[r * n_groups + j];
                const __m256i exact = dot<C>(_mm256_set1_epi32(-C::key_offset * sum), w, q.codes + r * d + j * group);
                const __m256  unit  = _mm256_mul_ps(_mm256_loadu_ps(scale[j] + t), _mm256_set1_ps(dq));
                score[r]            = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), unit, score[r]);
                if constexpr (C::has_min) {
                    const __m256 all = _mm256_set1_ps(dq * (float) sum);
                    score[r]         = _mm256_fmadd_ps(_mm256_loadu_ps(least[j] + t), all, score[r]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            _mm256_storeu_ps(s + r * score_stride + t, score[r]);
        }
    }
}

// ---- values ----

template <class C, int rows>
PAGED_INLINE void add_rows(const kv_rows & v, const float * w, int64_t w_stride, int64_t d, float * sum,
                           read_ahead & ahead) {
    const int n_groups = (int) (d / group);
    floats    scale, least;
    load_halves(v.first, v.stride, C::bytes, 0, n_groups, scale);
    if constexpr (C::has_min) {
        load_halves(v.first, v.stride, C::bytes, 2, n_groups, least);
    }
    for (int j = 0; j < n_groups; ++j) {
        float  weight[rows][tile_tokens]; // times the scale
        __m256 a[rows][4];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            __m256 minima = _mm256_setzero_ps();
            for (int t = 0; t < tile_tokens; t += 8) {
                const __m256 x = _mm256_loadu_ps(w + r * w_stride + t);
                _mm256_storeu_ps(weight[r] + t, _mm256_mul_ps(x, _mm256_loadu_ps(scale[j] + t)));
                if constexpr (C::has_min) {
                    minima = _mm256_fmadd_ps(x, _mm256_loadu_ps(least[j] + t), minima);
                }
            }
            const __m256 all = C::has_min ? _mm256_set1_ps(sum_of(minima)) : minima;
            PAGED_UNROLL
            for (int c = 0; c < 4; ++c) {
                a[r][c] = _mm256_add_ps(_mm256_loadu_ps(sum + r * d + j * group + c * 8), all);
            }
        }
        for (int t = 0; t < tile_tokens; ++t) {
            if (t % 16 == 0) {
                ahead.step();
            }
            const __m256i codes  = C::values(v.first + t * v.stride + j * C::bytes);
            const __m128i half[] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
            PAGED_UNROLL
            for (int c = 0; c < 4; ++c) {
                const __m128i eight = c % 2 ? _mm_srli_si128(half[c / 2], 8) : half[c / 2];
                const __m256  x     = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
                PAGED_UNROLL
                for (int r = 0; r < rows; ++r) {
                    a[r][c] = _mm256_fmadd_ps(x, _mm256_set1_ps(weight[r][t]), a[r][c]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int c = 0; c < 4; ++c) {
                _mm256_storeu_ps(sum + r * d + j * group + c * 8, a[r][c]);
            }
        }
    }
}

// ---- any number of rows ----

template <class C>
void score_group(const kv_rows & k, const query_rows & q, int64_t rows, int64_t d, float * s, read_ahead & ahead) {
    in_groups<4>(k, rows, [&](const kv_rows & head, int64_t r, auto n) {
        score_rows<C, n>(head, from_row(q, r, d), d, s + r * score_stride, ahead);
    });
}

template <class C>
void add_group(const kv_rows & v, const float * w, int64_t w_stride, int64_t rows, int64_t d, float * sum,
               read_ahead & ahead) {
    // 8 sums at a time: 16 would not stay in registers
    in_groups<2>(v, rows, [&](const kv_rows & head, int64_t r, auto n) {
        add_rows<C, n>(head, w + r * w_stride, w_stride, d, sum + r * d, ahead);
    });
}

int64_t score_steps(int64_t rows, int64_t d) { return d / group * 4 * ((rows + 3) / 4); }
int64_t add_steps(int64_t rows, int64_t d) { return d / group * 2 * ((rows + 1) / 2); }

template <class C> page_kernel kernel_of() {
    return {page_form::whole, score_group<C>, add_group<C>, score_steps, add_steps};
}

} // namespace

code_kernels kernels_of_codes() {
    return {kernel_of<q8_0_codes>(), kernel_of<q5_1_codes>(), kernel_of<q5_0_codes>(),
            kernel_of<q4_1_codes>(), kernel_of<q4_0_codes>(), kernel_of<iq4_nl_codes>()};
}

} // namespace paged

#endif
