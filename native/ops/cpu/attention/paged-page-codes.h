// Pages of codes without AVX-512 VNNI: keys are multiplied as integers, a token in each lane; values become floats,
// and their scales are multiplied into the softmax weights. The algorithm over the vectors of a machine M;
// paged-page-avx2.cpp and paged-page-neon.cpp each have an M.
//
// M has these types and static functions:
//   ints   `lanes` integers of 32 bits, or 4 * lanes bytes
//   codes  the 32 codes of one token's group, as bytes in their order
//
//   void  transpose(const char * p, size_t stride, ints * out)  16 bytes of each of `lanes` tokens, `stride` apart, to
//                                                               4 vectors: out[k] has bytes 4k.. of each in a lane
//   ints  low(ints), high(ints)                                 the nibbles of each byte
//   ints  iq4_values(ints), codes iq4_values(codes)             the values of codes of iq4_nl
//   int   raise                                                 what raised() adds to signed keys, 128 or 0
//   ints  raised(ints)
//   bool  multiplies_faster<C>                                  than floats, for many rows
//   codes load(const char * p)                                  32 bytes
//   codes nibbles(const char * p)                               16 bytes: byte i holds code i in its low nibble and
//                                                               code i + 16 in its high one
//   codes with_fifth_bits(codes, const char * bits)             bit i of 4 bytes belongs to code i
//   codes minus(codes, int n)
//   void  store(char * p, codes)
//   ints  dot<C>(int32_t start, const ints * keys, const int8_t * query)
//                                                               start + the products of 32 codes of `lanes` tokens, of
//                                                               type C, with the 32 codes of a query
//   f32v  floats(ints)
//   f32v  floats(codes, int i)                                  codes i * lanes and following
//   f32v  halves(const char * p, size_t stride)                 a half of each of `lanes` tokens
#pragma once

#include "paged-page.h"

namespace paged {

// ---- the types ----

// Each has: the bytes of a group; whether a minimum follows the scale; what is subtracted from its key codes; the
// largest key code, or 0 if key codes are signed; keys() of `lanes` tokens: lane t of w[k] has bytes 4k.. of token t;
// values() of one token, signed.

template <class M> struct signed_codes {
    static constexpr int key_offset = M::raise, largest_key = M::raise ? 255 : 0;

    static PAGED_INLINE void raise(typename M::ints * w) {
        PAGED_UNROLL
        for (int k = 0; k < 8; ++k) {
            w[k] = M::raised(w[k]);
        }
    }
};

template <class M> struct q8_0_codes : signed_codes<M> {
    static constexpr int  bytes   = 34;
    static constexpr bool has_min = false;

    static PAGED_INLINE void keys(const char * p, size_t stride, typename M::ints * w) {
        M::transpose(p + 2, stride, w);
        M::transpose(p + 18, stride, w + 4);
        signed_codes<M>::raise(w);
    }
    static PAGED_INLINE typename M::codes values(const char * p) { return M::load(p + 2); }
};

template <class M, int first_code> struct nibble_codes {
    static constexpr int largest_key = 15;

    static PAGED_INLINE void keys(const char * p, size_t stride, typename M::ints * w) {
        typename M::ints u[4];
        M::transpose(p + first_code, stride, u);
        PAGED_UNROLL
        for (int k = 0; k < 4; ++k) {
            w[k]     = M::low(u[k]);
            w[4 + k] = M::high(u[k]);
        }
    }
    static PAGED_INLINE typename M::codes codes(const char * p) { return M::nibbles(p + first_code); }
};

// Nibbles with a fifth bit for each element, in 4 bytes before the codes.
template <class M, int first_code> struct fifth_bit_codes {
    static constexpr int largest_key = 31;

    static PAGED_INLINE void keys(const char * p, size_t stride, typename M::ints * w) {
        alignas(32) char whole[lanes][code_group]; // the transpose takes bytes
        PAGED_UNROLL
        for (int t = 0; t < lanes; ++t) {
            M::store(whole[t], codes(p + t * stride));
        }
        M::transpose(whole[0], code_group, w);
        M::transpose(whole[0] + 16, code_group, w + 4);
    }
    static PAGED_INLINE typename M::codes codes(const char * p) {
        return M::with_fifth_bits(M::nibbles(p + first_code), p + first_code - 4);
    }
};

template <class M, class C, int offset> struct shifted : C {
    static PAGED_INLINE typename M::codes values(const char * p) { return M::minus(C::codes(p), offset); }
};

template <class M> struct q4_0_codes : shifted<M, nibble_codes<M, 2>, 8> {
    static constexpr int  bytes = 18, key_offset = 8;
    static constexpr bool has_min = false;
};
template <class M> struct q4_1_codes : shifted<M, nibble_codes<M, 4>, 0> {
    static constexpr int  bytes = 20, key_offset = 0;
    static constexpr bool has_min = true;
};
template <class M> struct q5_0_codes : shifted<M, fifth_bit_codes<M, 6>, 16> {
    static constexpr int  bytes = 22, key_offset = 16;
    static constexpr bool has_min = false;
};
template <class M> struct q5_1_codes : shifted<M, fifth_bit_codes<M, 8>, 0> {
    static constexpr int  bytes = 24, key_offset = 0;
    static constexpr bool has_min = true;
};
template <class M> struct iq4_nl_codes : signed_codes<M> {
    static constexpr int  bytes   = 18;
    static constexpr bool has_min = false;

    static PAGED_INLINE void keys(const char * p, size_t stride, typename M::ints * w) {
        nibble_codes<M, 2>::keys(p, stride, w);
        PAGED_UNROLL
        for (int k = 0; k < 8; ++k) {
            w[k] = M::iq4_values(w[k]);
        }
        signed_codes<M>::raise(w);
    }
    static PAGED_INLINE typename M::codes values(const char * p) { return M::iq4_values(nibble_codes<M, 2>::codes(p)); }
};

// ---- scales ----

using group_floats = float[most_code_groups][tile_tokens];

// Converts one half of each group of 32 tokens, `at` bytes into the group.
template <class M>
PAGED_INLINE void load_halves(const char * p, size_t stride, int bytes, int at, int n_groups, group_floats out) {
    for (int j = 0; j < n_groups; ++j) {
        for (int t = 0; t < tile_tokens; t += lanes) {
            store(out[j] + t, M::halves(p + t * stride + j * bytes + at, stride));
        }
    }
}

// ---- scores ----

// Adds the products of group j of `lanes` tokens' keys to the scores of rows.
template <class M, class C, int rows>
PAGED_INLINE void add_group_scores(const typename M::ints * keys, f32v scale, const float * least, const query_rows & q,
                                   int64_t d, int j, f32v * score) {
    const int64_t n_groups = d / code_group;
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        const int32_t sum   = q.sum[r * n_groups + j];
        const float   dq    = q.scale[r * n_groups + j];
        const auto    exact = M::template dot<C>(-C::key_offset * sum, keys, q.codes + r * d + j * code_group);
        score[r]            = fma(M::floats(exact), mul(scale, splat(dq)), score[r]);
        if constexpr (C::has_min) {
            score[r] = fma(load(least), splat(dq * (float) sum), score[r]);
        }
    }
}

// Computes the scores of `lanes` tokens from t on: `keys` gives group j's, in 8 vectors.
template <class M, class C, int rows, class K>
PAGED_INLINE void score_lanes(int t, K keys, const float (*scale)[tile_tokens], const float (*least)[tile_tokens],
                              const query_rows & q, int64_t d, float * s) {
    f32v score[rows];
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        score[r] = zero();
    }
    for (int j = 0; j < d / code_group; ++j) {
        typename M::ints w[8];
        keys(j, w);
        add_group_scores<M, C, rows>(w, load(scale[j] + t), C::has_min ? least[j] + t : nullptr, q, d, j, score);
    }
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        store(s + r * score_stride + t, score[r]);
    }
}

template <class M, class C, int rows>
PAGED_INLINE void score_code_rows(const kv_rows & k, const query_rows & q, int64_t d, float * s, read_ahead & ahead) {
    const int    n_groups = (int) (d / code_group);
    group_floats scale, least;
    load_halves<M>(k.first, k.stride, C::bytes, 0, n_groups, scale);
    if constexpr (C::has_min) {
        load_halves<M>(k.first, k.stride, C::bytes, 2, n_groups, least);
    }
    for (int t = 0; t < tile_tokens; t += lanes) {
        const auto keys = [&](int j, typename M::ints * w) {
            C::keys(k.first + t * k.stride + j * C::bytes, k.stride, w);
            ahead.step();
        };
        score_lanes<M, C, rows>(t, keys, scale, least, q, d, s);
    }
}

template <class M, class C> void unpack_tile(const kv_rows & k, int64_t d, const code_tile & out) {
    const int n_groups = (int) (d / code_group);
    load_halves<M>(k.first, k.stride, C::bytes, 0, n_groups, out.scale);
    if constexpr (C::has_min) {
        load_halves<M>(k.first, k.stride, C::bytes, 2, n_groups, out.least);
    }
    auto * w = (typename M::ints *) out.keys;
    for (int j = 0; j < n_groups; ++j) {
        for (int t = 0; t < tile_tokens; t += lanes, w += 8) {
            C::keys(k.first + t * k.stride + j * C::bytes, k.stride, w);
        }
    }
}

template <class M, class C>
void score_tile(const code_tile & k, const query_rows & q, int64_t rows, int64_t d, float * s) {
    const auto * all     = (const typename M::ints *) k.keys;
    const auto   of_rows = [&](auto n) {
        for (int t = 0; t < tile_tokens; t += lanes) {
            const auto keys = [&](int j, typename M::ints * w) {
                const typename M::ints * from = all + (j * (tile_tokens / lanes) + t / lanes) * 8;
                PAGED_UNROLL
                for (int i = 0; i < 8; ++i) {
                    w[i] = from[i];
                }
            };
            score_lanes<M, C, n>(t, keys, k.scale, k.least, q, d, s);
        }
    };
    switch (rows) {
    case 4:
        of_rows(std::integral_constant<int, 4>());
        break;
    case 2:
        of_rows(std::integral_constant<int, 2>());
        break;
    case 1:
        of_rows(std::integral_constant<int, 1>());
        break;
    }
}

// ---- sums of values ----

template <class M, class C, int rows>
PAGED_INLINE void add_code_rows(const kv_rows & v, const float * w, int64_t w_stride, int64_t d, float * sums,
                                read_ahead & ahead) {
    constexpr int vectors  = code_group / lanes;
    const int     n_groups = (int) (d / code_group);
    group_floats  scale, least;
    load_halves<M>(v.first, v.stride, C::bytes, 0, n_groups, scale);
    if constexpr (C::has_min) {
        load_halves<M>(v.first, v.stride, C::bytes, 2, n_groups, least);
    }
    for (int j = 0; j < n_groups; ++j) {
        float weight[rows][tile_tokens]; // times the scale
        f32v  a[rows][vectors];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            f32v minima = zero();
            for (int t = 0; t < tile_tokens; t += lanes) {
                const f32v x = load(w + r * w_stride + t);
                store(weight[r] + t, mul(x, load(scale[j] + t)));
                if constexpr (C::has_min) {
                    minima = fma(x, load(least[j] + t), minima);
                }
            }
            const f32v all = C::has_min ? splat(sum(minima)) : minima;
            PAGED_UNROLL
            for (int c = 0; c < vectors; ++c) {
                a[r][c] = add(load(sums + r * d + j * code_group + c * lanes), all);
            }
        }
        for (int t = 0; t < tile_tokens; ++t) {
            if (t % 16 == 0) {
                ahead.step();
            }
            const auto codes = C::values(v.first + t * v.stride + j * C::bytes);
            PAGED_UNROLL
            for (int c = 0; c < vectors; ++c) {
                const f32v x = M::floats(codes, c);
                PAGED_UNROLL
                for (int r = 0; r < rows; ++r) {
                    a[r][c] = fma(x, splat(weight[r][t]), a[r][c]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int c = 0; c < vectors; ++c) {
                store(sums + r * d + j * code_group + c * lanes, a[r][c]);
            }
        }
    }
}

// ---- any number of rows ----

// Rows whose sums of values stay in registers: 8 vectors of 16 (AVX2), 16 of 32 (NEON).
constexpr int code_rows_added = 2;

template <class M, class C>
void score_codes(const kv_rows & k, const query_rows & q, int64_t rows, int64_t d, float * s, read_ahead & ahead) {
    in_groups<4>(k, rows, [&](const kv_rows & head, int64_t r, auto n) {
        score_code_rows<M, C, n>(head, from_row(q, r, d), d, s + r * score_stride, ahead);
    });
}

template <class M, class C>
void add_codes(const kv_rows & v, const float * w, int64_t w_stride, int64_t rows, int64_t d, float * sums,
               read_ahead & ahead) {
    in_groups<code_rows_added>(v, rows, [&](const kv_rows & head, int64_t r, auto n) {
        add_code_rows<M, C, n>(head, w + r * w_stride, w_stride, d, sums + r * d, ahead);
    });
}

template <class M, class C> page_kernel code_kernel() {
    const steps_fn score_steps = [](int64_t rows, int64_t d) {
        return d / code_group * (tile_tokens / lanes) * ((rows + 3) / 4);
    };
    const steps_fn add_steps = [](int64_t rows, int64_t d) {
        return d / code_group * (tile_tokens / 16) * ((rows + code_rows_added - 1) / code_rows_added);
    };
    page_kernel kernel = {page_form::whole, score_codes<M, C>, add_codes<M, C>, score_steps, add_steps};
    if constexpr (M::template multiplies_faster<C>) {
        kernel.tile = {unpack_tile<M, C>, score_tile<M, C>};
    }
    return kernel;
}

template <class M> code_kernels code_kernels_of() {
    return {code_kernel<M, q8_0_codes<M>>(), code_kernel<M, q5_1_codes<M>>(), code_kernel<M, q5_0_codes<M>>(),
            code_kernel<M, q4_1_codes<M>>(), code_kernel<M, q4_0_codes<M>>(), code_kernel<M, iq4_nl_codes<M>>()};
}

} // namespace paged
