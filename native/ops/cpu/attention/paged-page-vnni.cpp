// Pages of codes, multiplied as integers: AVX-512 with VNNI, and VBMI if the build has it.
//
// Keys: the codes of 16 tokens are transposed, a token to each lane, and the dwords of a query are broadcast to all
// lanes, so no sum crosses lanes. Values: a softmax weight times its token's scale becomes an integer of 16 bits,
// relative to the tile's largest. The codes of 4 tokens are interleaved and multiplied by the two bytes of their
// weights; the codes of q8_0, interleaved as words of 2 tokens, are multiplied by whole weights. Sums of products are
// exact integers, converted to floats once for each group of 32 elements.
//
// 16/8 heads of 128, one sequence at 4096: two Emerald Rapids cores read q8_0 at 24.9 GB/s and q4_0 at 22.6, of a
// memory that gives 26; q5_0 17.7, iq4_nl 15.7, q4_1 14.9, q5_1 11.9; two Cascade Lake cores, without VBMI, q8_0
// at 14.2 and q4_0 at 11.2, and f16 at 14.5.
#include "paged-page.h"

#include "paged-codes-vnni.h"
#include "paged-weights-vnni.h"

#if defined(PAGED_CODES_VNNI)

namespace paged {

namespace {

using namespace vnni;

// ---- keys ----

// Computes the start of each sum of products: minus what the offset of the codes adds.
template <int offset> PAGED_INLINE void make_begins(const int32_t * sum, int n, int32_t * out) {
    for (int i = 0; i < n; i += 16) {
        const __m512i x = _mm512_maskz_loadu_epi32((__mmask16) ((1u << std::min(16, n - i)) - 1), sum + i);
        _mm512_store_si512(out + i, _mm512_mullo_epi32(x, _mm512_set1_epi32(-offset)));
    }
}

// Adds the products of one group of keys to the scores of 16 tokens. `q` and `begin` point to the group of the first
// row; the next row follows after n_groups.
template <class C, int rows>
PAGED_INLINE void add_scores(const __m512i * keys, __m512 scale, __m512 least, const query_rows & q,
                             const int32_t * begin, int n_groups, __m512 * score) {
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        const int32_t * codes = (const int32_t *) (q.codes + r * n_groups * group);
        const __m512    dq    = _mm512_set1_ps(q.scale[r * n_groups]);
        __m512i         dot = _mm512_setzero_si512(), more = dot;
        if constexpr (C::key_offset != 0) {
            dot = _mm512_set1_epi32(begin[r * n_groups]);
        }
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) { // two chains: each product waits for the one before
            dot  = add_bytes(dot, keys[i], codes + i);
            more = add_bytes(more, keys[4 + i], codes + 4 + i);
        }
        dot      = _mm512_add_epi32(dot, more);
        score[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, dq), score[r]);
        if constexpr (C::has_min) {
            const __m512 sum = _mm512_set1_ps((float) q.sum[r * n_groups]);
            score[r]         = _mm512_fmadd_ps(least, _mm512_mul_ps(dq, sum), score[r]);
        }
    }
}

// `fixed`: the number of groups, or 0 for any. A known number saves address arithmetic.
template <class C, int rows, int fixed>
PAGED_INLINE void score_rows(const kv_rows & k, const query_rows & q, int64_t d, float * s, read_ahead & ahead) {
    const int          n_groups = fixed ? fixed : (int) (d / group);
    const row_strides  at(k.stride);
    alignas(64) halves scale, least;
    scale_picker<C::bytes, 0>::all(k.first, at, n_groups, scale);
    if constexpr (C::has_min) {
        scale_picker<C::bytes, 1>::all(k.first, at, n_groups, least);
    }
    alignas(64) int32_t begin[(rows * most_groups + 15) / 16 * 16];
    if constexpr (C::key_offset != 0) {
        make_begins<C::key_offset>(q.sum, rows * n_groups, begin);
    }
    for (int half = 0; half < tile_tokens; half += 16) {
        const query_rows all = {nullptr, renewed(q.codes), renewed(q.scale), renewed(q.sum)};
        __m512           score[rows];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            score[r] = _mm512_setzero_ps();
        }
#    pragma GCC unroll 4
        for (int j = 0; j < n_groups; ++j) {
            __m512i keys[8];
            C::keys(k.first + half * k.stride + j * C::bytes, at, keys);
            ahead.step();
            const __m512 dk = floats_of(scale[j] + half);
            const __m512 mk = C::has_min ? floats_of(least[j] + half) : dk;
            add_scores<C, rows>(keys, dk, mk, {nullptr, all.codes + j * group, all.scale + j, all.sum + j}, begin + j,
                                n_groups, score);
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            _mm512_storeu_ps(s + r * score_stride + half, score[r]);
        }
    }
}

// ---- values ----

// Sums of products over a tile, of 32 elements of each row.
template <int rows> using sums_of_rows = __m512i[rows][2];

// Pairs of tokens times words.
template <class C, int rows>
PAGED_INLINE void add_pairs(const char * p, const row_strides & at, const int32_t (*w)[16], read_ahead & ahead,
                            sums_of_rows<rows> & out) {
    constexpr int chains = rows <= 2 ? 2 : 1; // each product waits for the one before
    __m512i       sum[chains][rows][2];
    PAGED_UNROLL
    for (int i = 0; i < chains * rows * 2; ++i) {
        sum[i / (rows * 2)][i / 2 % rows][i % 2] = _mm512_setzero_si512();
    }
    PAGED_UNROLL
    for (int t = 0; t < tile_tokens; t += 4) {
        if (t % 16 == 0) {
            ahead.step();
        }
        const rows_of_4 row(p, at);
        p = row.first + 4 * at.one;
        PAGED_UNROLL
        for (int u = 0; u < 4; u += 2) {
            __m512i x[2];
            C::values(row[u], row[u + 1], x);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                PAGED_UNROLL
                for (int i = 0; i < 2; ++i) {
                    __m512i & to = sum[u / 2 % chains][r][i];
                    to           = add_words(to, x[i], w[r] + pair_at((t + u) / 2));
                }
            }
        }
    }
    // a quarter has 4 elements of the first half of 8 in one sum, and 4 of the other in the other
    const __m512i first  = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        __m512i * a = sum[0][r];
        if constexpr (chains == 2) {
            a[0] = _mm512_add_epi32(a[0], sum[1][r][0]);
            a[1] = _mm512_add_epi32(a[1], sum[1][r][1]);
        }
        out[r][0] = _mm512_permutex2var_epi64(a[0], first, a[1]);
        out[r][1] = _mm512_permutex2var_epi64(a[0], second, a[1]);
    }
}

// Four tokens at a time times low bytes and high bytes.
template <class C, int rows>
PAGED_INLINE void add_fours(const char * p, const row_strides & at, const int32_t (*w)[16], const int32_t * begin,
                            read_ahead & ahead, sums_of_rows<rows> & out) {
    sums_of_rows<rows> high;
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        out[r][0] = out[r][1] = C::value_offset ? _mm512_set1_epi32(begin[r]) : _mm512_setzero_si512();
        high[r][0] = high[r][1] = _mm512_setzero_si512();
    }
    PAGED_UNROLL
    for (int c = 0; c < tile_tokens / 4; ++c) {
        if (c % 4 == 0) {
            ahead.step();
        }
        __m512i x[2];
        C::values(p, at, x);
        p = opaque(p + 4 * at.one);
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int i = 0; i < 2; ++i) {
                out[r][i]  = add_bytes(out[r][i], x[i], w[r] + c);
                high[r][i] = add_bytes(high[r][i], x[i], w[r] + 8 + c);
            }
        }
    }
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        PAGED_UNROLL
        for (int i = 0; i < 2; ++i) {
            out[r][i] = _mm512_add_epi32(out[r][i], _mm512_slli_epi32(high[r][i], 8));
        }
    }
}

template <class C, int rows, int fixed>
PAGED_INLINE void add_rows(const kv_rows & v, const float * w, int64_t w_stride, int64_t d, float * sum,
                           read_ahead & ahead) {
    const int          n_groups = fixed ? fixed : (int) (d / group);
    const row_strides  at(v.stride);
    alignas(64) halves scale, least;
    scale_picker<C::bytes, 0>::all(v.first, at, n_groups, scale);
    if constexpr (C::has_min) {
        scale_picker<C::bytes, 1>::all(v.first, at, n_groups, least);
    }
    integer_weights<rows> weights; // all before the products, so that none waits for its weight
    make_weights<C, rows>(scale, least, n_groups, w, w_stride, weights);
    for (int j = 0; j < n_groups; ++j) {
        const char *       p = v.first + j * C::bytes;
        sums_of_rows<rows> exact;
        if constexpr (C::value_words) {
            add_pairs<C, rows>(p, at, weights.x[j], ahead, exact);
        } else {
            add_fours<C, rows>(p, at, weights.x[j], weights.begin + j * rows, ahead, exact);
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int i = 0; i < 2; ++i) {
                float * to  = sum + r * d + j * group + i * 16;
                __m512  all = _mm512_loadu_ps(to);
                if constexpr (C::has_min) {
                    all = _mm512_add_ps(all, _mm512_set1_ps(weights.least[j][r]));
                }
                all = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r][i]), _mm512_set1_ps(weights.unit[r][j]), all);
                _mm512_storeu_ps(to, all);
            }
        }
    }
}

// ---- any number of rows ----

// Calls f(a constant for the number of groups, or 0): heads of 64 and 128 have their own kernels.
template <class F> PAGED_INLINE void with_groups(int64_t d, F f) {
    switch (d / group) {
    case 2:
        return f(std::integral_constant<int, 2>());
    case 4:
        return f(std::integral_constant<int, 4>());
    default:
        return f(std::integral_constant<int, 0>());
    }
}

template <class C>
void score_group(const kv_rows & k, const query_rows & q, int64_t rows, int64_t d, float * s, read_ahead & ahead) {
    with_groups(d, [&](auto fixed) {
        in_groups<8>(k, rows, [&](const kv_rows & head, int64_t r, auto n) {
            score_rows<C, n, fixed>(head, from_row(q, r, d), d, s + r * score_stride, ahead);
        });
    });
}

template <class C> constexpr int most_rows = C::value_words ? 8 : 4; // sums of values fit into the registers

template <class C>
void add_group(const kv_rows & v, const float * w, int64_t w_stride, int64_t rows, int64_t d, float * sum,
               read_ahead & ahead) {
    with_groups(d, [&](auto fixed) {
        in_groups<most_rows<C>>(v, rows, [&](const kv_rows & head, int64_t r, auto n) {
            add_rows<C, n, fixed>(head, w + r * w_stride, w_stride, d, sum + r * d, ahead);
        });
    });
}

template <int most> int64_t steps(int64_t rows, int64_t d) {
    return d / group * 2 * (rows <= 4 ? 1 : (rows + most - 1) / most);
}

template <class C> page_kernel kernel_of() {
    return {page_form::whole, score_group<C>, add_group<C>, steps<8>, steps<most_rows<C>>};
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

code_kernels kernels_of_codes() {
    return {kernel_of<q8_0_codes>(), kernel_of<q5_1_codes>(), kernel_of<q5_0_codes>(),
            kernel_of<q4_1_codes>(), kernel_of<q4_0_codes>(), kernel_of<iq4_nl_codes>()};
}

} // namespace paged

#endif
