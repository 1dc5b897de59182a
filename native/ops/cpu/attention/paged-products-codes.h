// The tile kernel's scores over quantized keys, in integers: queries are rounded to 8 bits as in decoding.
#pragma once

#include "paged-page.h"

namespace paged {

class code_scores {
public:
    struct setting {};

    // Whether this build multiplies the keys' codes faster than floats.
    static bool serve(const problem & p) { return ggml_is_quantized(p.k->type) && kernel_of(p).unpack != nullptr; }

    code_scores(const problem & p, const float * q, arena & a)
        : p_(p), kernel_(kernel_of(p)), bytes_(ggml_row_size(p.k->type, p.d_k)), x_(q) {
        const int64_t groups = p.d_k / code_group;
        codes_               = a.take<int8_t>(tile_rows * p.d_k);
        scale_               = a.take<float>(tile_rows * groups);
        sum_                 = a.take<int32_t>(tile_rows * groups);
        copy_                = a.take<char>(tile_tokens * bytes_ + 64);
        keys_.keys           = a.take<char>(tile_tokens * p.d_k);
        keys_.scale          = (float (*)[tile_tokens]) a.take<float>(tile_tokens * groups);
        keys_.least          = (float (*)[tile_tokens]) a.take<float>(tile_tokens * groups);
    }

    void set_queries(int64_t rows) {
        const int64_t groups = p_.d_k / code_group;
        for (int64_t r = 0; r < rows; ++r) {
            quantize_query(x_ + r * p_.d_k, p_.d_k, codes_ + r * p_.d_k, scale_ + r * groups, sum_ + r * groups);
        }
    }

    // A tile's rows are copied, because a kernel reads whole tiles and 64 bytes more; zeros follow its last token.
    void set_keys(int64_t head_kv, const tile & at, rows_ahead & ahead) {
        for (int64_t t = 0; t < at.size(); ++t) {
            memcpy(copy_ + t * bytes_, kv_row(p_.k, head_kv, at.slot + t), bytes_);
            ahead.step();
        }
        memset(copy_ + at.size() * bytes_, 0, (tile_tokens - at.size()) * bytes_ + 64);
        kernel_.unpack({copy_, bytes_, tile_tokens}, p_.d_k, keys_);
    }

    template <class F> static void for_each_block(int64_t rows, F f) {
        int64_t r = 0;
        for (int n = 4; n > 0; n /= 2) {
            for (; r + n <= rows; r += n) {
                f(r, n);
            }
        }
    }

    void score(int64_t r, int64_t n, float * s) const {
        const int64_t groups = p_.d_k / code_group;
        kernel_.score(keys_, {nullptr, codes_ + r * p_.d_k, scale_ + r * groups, sum_ + r * groups}, n, p_.d_k, s);
    }

private:
    const problem &   p_;
    const tile_kernel kernel_;
    const size_t      bytes_; // of a row of keys
    const float *     x_;     // [rows][d_k]
    int8_t *          codes_; // [rows][d_k]
    float *           scale_; // [rows][d_k / 32]
    int32_t *         sum_;   // [rows][d_k / 32]
    char *            copy_;  // [tile_tokens + some][bytes_]
    code_tile         keys_;

    static tile_kernel kernel_of(const problem & p) { return page_kernel_of(p.k->type, p.d_k, 1).tile; }
};

} // namespace paged
