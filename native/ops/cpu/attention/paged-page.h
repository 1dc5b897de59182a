// The arithmetic of the decode kernel on one tile of a KV head's rows, by type: scores of a few query rows, and the
// weighted sum of values.
#pragma once

#include "paged-ahead.h"
#include "paged-kernel.h"

#include <type_traits>

#if defined(PAGED_AVX512)
#    define PAGED_CODES_VNNI
#elif defined(PAGED_AVX2)
#    define PAGED_CODES_AVX2
#elif defined(__aarch64__) && defined(__ARM_NEON)
#    define PAGED_CODES_NEON
#endif

namespace paged {

// Rows of KV heads: in the pool or, one head's copied or converted, in a thread's scratch.
struct kv_rows {
    const char * first;
    size_t       stride;
    int64_t      n; // of a head, at most tile_tokens
    int64_t      heads       = 1;
    size_t       head_stride = 0;
};

// Query rows, multiplied by query_factor; also as integers of 8 bits, each group of 32 with its scale.
struct query_rows {
    float *   x;     // [heads * rows][d_k]
    int8_t *  codes; // [heads * rows][d_k]
    float *   scale; // [heads * rows][d_k / 32]
    int32_t * sum;   // [heads * rows][d_k / 32], of the codes
};

// `rows` query rows for each of the heads, head by head.
// s[row * score_stride + t] = q[row] * k[t]; the rest of a whole tile after the last token may be overwritten
using score_fn = void (*)(const kv_rows & k, const query_rows & q, int64_t rows, int64_t d, float * s,
                          read_ahead & ahead);
// sum[row * d ..] += w[row * w_stride + t] * v[t]
using add_fn = void (*)(const kv_rows & v, const float * w, int64_t w_stride, int64_t rows, int64_t d, float * sum,
                        read_ahead & ahead);

// Returns how often a call prefetches for each of the heads.
using steps_fn = int64_t (*)(int64_t rows, int64_t d);

// A tile's keys of one head as bytes, unpacked once for many query rows.
struct code_tile {
    char * keys;                 // [d / 32][tile_tokens / lanes][8][lanes]: 4 bytes of a token in each lane
    float (*scale)[tile_tokens]; // [d / 32]
    float (*least)[tile_tokens]; // [d / 32], of types with a minimum
};

// Keys of a prompt's tile: `unpack` reads a whole tile of rows; `score` is as score_fn, for up to 4 rows, and gives the
// same bits. Null where floats are faster.
struct tile_kernel {
    void (*unpack)(const kv_rows & k, int64_t d, const code_tile & out);
    void (*score)(const code_tile & k, const query_rows & q, int64_t rows, int64_t d, float * s);
};

enum class page_form {
    in_place, // any rows, in the pool
    whole,    // whole tiles with 64 readable bytes after them: other tiles are copied and padded with zeros
    floats,   // rows converted to floats
};

struct page_kernel {
    page_form form;
    score_fn  score;
    add_fn    add;
    steps_fn  score_steps;
    steps_fn  add_steps;

    tile_kernel tile = {nullptr, nullptr};
};

// Returns the kernel for heads of `d` elements and `rows` query rows of a KV head. The bits of a row's result do not
// depend on the number of rows.
page_kernel page_kernel_of(ggml_type type, int64_t d, int64_t rows);

// Elements that share a scale, in every quantized type of KV pages.
constexpr int code_group = 32;

// Groups of a head for which kernels over codes have room on the stack: a head of 640. Wider heads become floats.
constexpr int most_code_groups = 20;

// Kernels that compute with the codes themselves, of heads up to most_code_groups. `score` is null in a build without
// them.
struct code_kernels {
    page_kernel q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl;
};
code_kernels kernels_of_codes();

// Calls f(first row, a constant for the number of rows) for groups of `most` rows, a power of two, then for smaller
// ones
template <int most, class F> PAGED_INLINE void in_groups(int64_t rows, F f, int64_t r = 0) {
    for (; rows - r >= most; r += most) {
        f(r, std::integral_constant<int, most>());
    }
    if constexpr (most == 4) {
        if (rows - r == 3) {
            f(r, std::integral_constant<int, 3>());
            return;
        }
    }
    if constexpr (most > 1) {
        in_groups<most / 2>(rows, f, r);
    }
}

// Calls f(rows of one head, its first query row, a constant for the number of rows)
template <int most, class F> PAGED_INLINE void in_groups(const kv_rows & x, int64_t rows, F f) {
    // a single group goes through all heads, its constants in registers; several groups share each head in the cache
    const int64_t together = rows <= most && (rows & (rows - 1)) == 0 ? x.heads : 1;
    for (int64_t begin = 0; begin < x.heads; begin += together) {
        in_groups<most>(rows, [&](int64_t r, auto n) {
            for (int64_t head = begin; head < begin + together; ++head) {
                f(kv_rows{x.first + head * x.head_stride, x.stride, x.n}, head * rows + r, n);
            }
        });
    }
}

// Returns the queries from row r on.
inline query_rows from_row(const query_rows & q, int64_t r, int64_t d) {
    const int64_t groups = d / 32;
    return {q.x + r * d, q.codes + r * d, q.scale + r * groups, q.sum + r * groups};
}

// Fills codes, scale and sum of one row from x.
void quantize_query(const float * x, int64_t d, int8_t * codes, float * scale, int32_t * sum);

} // namespace paged
