// Pages of floats: the scores of 4 tokens at a time, the values a vector of columns at a time.
//
// Two Sapphire Rapids cores, 16/8 heads of 128, one sequence at 4096: f16 28 GB/s if the memory gives 35, and all of
// it if the memory gives 24.
#include "paged-page.h"

namespace paged {

namespace {

struct as_f32 {
    static PAGED_INLINE f32v at(const char * row, int64_t i) { return load((const float *) row + i); }
};
struct as_f16 {
    static PAGED_INLINE f32v at(const char * row, int64_t i) { return load_f16((const uint16_t *) row + i); }
};
struct as_bf16 {
    static PAGED_INLINE f32v at(const char * row, int64_t i) { return load_bf16((const uint16_t *) row + i); }
};

template <class T, int rows>
PAGED_INLINE void score_rows(const kv_rows & k, const float * q, int64_t d, float * s, read_ahead & ahead) {
    for (int64_t t = 0; t < k.n; t += 4) {
        const char * row[4];
        for (int64_t i = 0; i < 4; ++i) {
            row[i] = k.first + std::min(t + i, k.n - 1) * k.stride;
        }
        ahead.step();
        f32v dot[rows][4];
        for (int r = 0; r < rows; ++r) {
            dot[r][0] = dot[r][1] = dot[r][2] = dot[r][3] = zero();
        }
        for (int64_t i = 0; i < d; i += lanes) {
            const f32v key[4] = {T::at(row[0], i), T::at(row[1], i), T::at(row[2], i), T::at(row[3], i)};
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const f32v query = load(q + r * d + i);
                PAGED_UNROLL
                for (int c = 0; c < 4; ++c) {
                    dot[r][c] = fma(key[c], query, dot[r][c]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            sum_of_4(dot[r], s + r * score_stride + t);
        }
    }
}

// `vectors` vectors of each row of sums
template <class T, int rows, int vectors>
PAGED_INLINE void add_columns(const kv_rows & v, int64_t from, const float * w, int64_t w_stride, float * sum,
                              int64_t d, read_ahead & ahead) {
    f32v a[rows][vectors];
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        PAGED_UNROLL
        for (int c = 0; c < vectors; ++c) {
            a[r][c] = load(sum + r * d + from + c * lanes);
        }
    }
    for (int64_t t = 0; t < v.n; ++t) {
        if (t % 4 == 0) {
            ahead.step();
        }
        const char * row = v.first + t * v.stride;
        f32v         weight[rows];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            weight[r] = splat(w[r * w_stride + t]);
        }
        PAGED_UNROLL
        for (int c = 0; c < vectors; ++c) {
            const f32v x = T::at(row, from + c * lanes);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                a[r][c] = fma(x, weight[r], a[r][c]);
            }
        }
    }
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        PAGED_UNROLL
        for (int c = 0; c < vectors; ++c) {
            store(sum + r * d + from + c * lanes, a[r][c]);
        }
    }
}

// vectors of each row that stay in registers together
constexpr int most_columns(int64_t rows) { return (lanes == 16 ? 16 : 8) / (rows <= 2 ? 2 : 4); }

template <class T, int rows>
PAGED_INLINE void add_rows(const kv_rows & v, const float * w, int64_t w_stride, float * sum, int64_t d,
                           read_ahead & ahead) {
    constexpr int most = most_columns(rows);
    int64_t       i    = 0;
    for (; i + most * lanes <= d; i += most * lanes) {
        add_columns<T, rows, most>(v, i, w, w_stride, sum, d, ahead);
    }
    for (; i < d; i += lanes) {
        add_columns<T, rows, 1>(v, i, w, w_stride, sum, d, ahead);
    }
}

template <class T>
void score_group(const kv_rows & k, const query_rows & q, int64_t rows, int64_t d, float * s, read_ahead & ahead) {
    in_groups<4>(k, rows, [&](const kv_rows & head, int64_t r, auto n) {
        score_rows<T, n>(head, q.x + r * d, d, s + r * score_stride, ahead);
    });
}

template <class T>
void add_group(const kv_rows & v, const float * w, int64_t w_stride, int64_t rows, int64_t d, float * sum,
               read_ahead & ahead) {
    in_groups<4>(v, rows, [&](const kv_rows & head, int64_t r, auto n) {
        add_rows<T, n>(head, w + r * w_stride, w_stride, sum + r * d, d, ahead);
    });
}

int64_t score_steps(int64_t rows, int64_t) { return tile_tokens / 4 * ((rows + 3) / 4); }
int64_t add_steps(int64_t rows, int64_t d) {
    const int64_t passes = d / (most_columns(std::min<int64_t>(4, rows)) * lanes);
    return tile_tokens / 4 * ((rows + 3) / 4) * std::max<int64_t>(1, passes);
}

template <class T> page_kernel kernel_as(page_form form) {
    return {form, score_group<T>, add_group<T>, score_steps, add_steps};
}

} // namespace

#if !defined(PAGED_CODES_VNNI)
void quantize_query(const float * x, int64_t d, int8_t * codes, float * scale, int32_t * sum) {
    for (int64_t j = 0; j < d / 32; ++j) {
        f32v top = zero();
        for (int i = 0; i < 32; i += lanes) {
            const f32v y = load(x + j * 32 + i);
            top          = max(top, max(y, sub(zero(), y)));
        }
        const float most    = largest(top);
        const f32v  inverse = splat(most > 0.0f ? 127.0f / most : 0.0f);
        float       whole[32];
        for (int i = 0; i < 32; i += lanes) {
            store(whole + i, round_even(mul(load(x + j * 32 + i), inverse)));
        }
        int32_t all = 0;
        for (int i = 0; i < 32; ++i) {
            const int32_t code = (int32_t) whole[i];
            codes[j * 32 + i]  = (int8_t) code;
            all += code;
        }
        scale[j] = most / 127.0f;
        sum[j]   = all;
    }
}
#endif

#if !defined(PAGED_CODES_VNNI) && !defined(PAGED_CODES_AVX2) && !defined(PAGED_CODES_NEON)
code_kernels kernels_of_codes() { return {}; }
#endif

namespace {

page_kernel code_kernel_of(ggml_type type) {
    static const code_kernels kernels = kernels_of_codes();
    switch (type) {
    case GGML_TYPE_Q8_0:
        return kernels.q8_0;
    case GGML_TYPE_Q5_1:
        return kernels.q5_1;
    case GGML_TYPE_Q5_0:
        return kernels.q5_0;
    case GGML_TYPE_Q4_1:
        return kernels.q4_1;
    case GGML_TYPE_Q4_0:
        return kernels.q4_0;
    case GGML_TYPE_IQ4_NL:
        return kernels.iq4_nl;
    default:
        return {};
    }
}

// Query rows of a KV head from which on it is faster to convert halves once than at each use.
constexpr int64_t rows_worth_converting = 16;

} // namespace

page_kernel page_kernel_of(ggml_type type, int64_t d, int64_t rows) {
    const page_kernel converted = kernel_as<as_f32>(page_form::floats);
    switch (type) {
    case GGML_TYPE_F32:
        return kernel_as<as_f32>(page_form::in_place);
    case GGML_TYPE_F16:
        return rows < rows_worth_converting ? kernel_as<as_f16>(page_form::in_place) : converted;
    case GGML_TYPE_BF16:
        return rows < rows_worth_converting ? kernel_as<as_bf16>(page_form::in_place) : converted;
    default:
        break;
    }
    const page_kernel codes = code_kernel_of(type);
    return codes.score && d <= most_code_groups * code_group ? codes : converted;
}

} // namespace paged
