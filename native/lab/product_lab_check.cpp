// Products over tiles against sums in double, and their bits in batches and with threads. Buffers are exactly as long
// as the tensors, so that a sanitizer notices reads past the end.
#include "product_lab_check.h"

#include "ggml.h"
#include "lab.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace {

constexpr int64_t GROUP = 256; // values that are rounded to bytes together, at most

struct matrix {
    int32_t              type;
    int64_t              n_out, n_in;
    std::vector<uint8_t> packed;
    std::vector<float>   values;
};

matrix random_matrix(int32_t type, int64_t n_out, int64_t n_in, std::mt19937 & draw) {
    std::normal_distribution<float> normal;
    matrix                          out{type, n_out, n_in, {}, std::vector<float>(static_cast<size_t>(n_out * n_in))};
    for (float & value : out.values) {
        value = normal(draw);
    }
    out.packed.resize(static_cast<size_t>(n_out * lab_row_size(type, n_in)));
    lab_quantize(type, out.values.data(), out.packed.data(), n_out, n_in);
    lab_dequantize(type, out.packed.data(), out.values.data(), n_out, n_in);
    return out;
}

// Returns nothing if the processor has no tiles.
std::vector<float> product(const matrix & w, const float * x, int64_t n_rows, int32_t n_threads) {
    std::vector<float> out(static_cast<size_t>(n_rows * w.n_out), NAN);
    lab_product        p = {};
    p.type               = w.type;
    p.n_threads          = n_threads;
    p.packed             = 1;
    p.n_out              = w.n_out;
    p.n_in               = w.n_in;
    p.n_rows             = n_rows;
    p.weights            = w.packed.data();
    p.x                  = x;
    p.out                = out.data();
    p.layout             = "TILES";
    return lab_product_run(&p) ? std::vector<float>() : out;
}

// Rounding moves each value by half a step at most.
bool is_right(const matrix & w, const float * x, const float * y) {
    for (int64_t o = 0; o < w.n_out; ++o) {
        double exact = 0, bound = 1e-5;
        for (int64_t group = 0; group < w.n_in; group += GROUP) {
            double largest = 0, size = 0;
            for (int64_t i = group; i < group + GROUP; ++i) {
                const double weight = w.values[static_cast<size_t>(o * w.n_in + i)];
                exact += weight * static_cast<double>(x[i]);
                largest = std::fmax(largest, std::fabs(static_cast<double>(x[i])));
                size += std::fabs(weight);
            }
            bound += 0.51 / 127 * largest * size;
        }
        if (!(std::fabs(static_cast<double>(y[o]) - exact) <= bound)) {
            printf("%s, column %lld: %g instead of %g\n", lab_type_name(w.type), static_cast<long long>(o),
                   static_cast<double>(y[o]), exact);
            return false;
        }
    }
    return true;
}

bool check(const matrix & w, int64_t n_rows, std::mt19937 & draw) {
    std::normal_distribution<float> normal;
    std::vector<float>              x(static_cast<size_t>(n_rows * w.n_in));
    for (float & value : x) {
        value = normal(draw);
    }
    const std::vector<float> y = product(w, x.data(), n_rows, 2);
    for (int64_t row = 0; row < n_rows; ++row) {
        const float *            given = x.data() + row * w.n_in, *found = y.data() + row * w.n_out;
        const std::vector<float> alone = product(w, given, 1, 1);
        if (!is_right(w, given, found) || std::memcmp(alone.data(), found, alone.size() * sizeof(float)) != 0) {
            printf("%s: row %lld of %lld is wrong\n", lab_type_name(w.type), static_cast<long long>(row),
                   static_cast<long long>(n_rows));
            return false;
        }
    }
    return true;
}

} // namespace

int check_products() {
    std::mt19937 draw(7);
    int          wrong = 0;
    for (int32_t type :
         {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL,
          GGML_TYPE_MXFP4, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS}) {
        const matrix w = random_matrix(type, 48, 1280, draw);
        if (product(w, w.values.data(), 1, 1).empty()) {
            printf("no products over tiles here\n");
            return 0;
        }
        for (int64_t n_rows : {1, 3, 4, 9, 18}) {
            wrong += !check(w, n_rows, draw);
        }
    }
    return wrong;
}
