// Matrix products with weights in the layout into which upstream packs them for AMX, on any processor with AVX-512
// VNNI. Upstream unpacks each tile into memory for AMX's tiles of 16 rows, stores their sums in memory too, and has
// another kernel for one row. Here a tile is unpacked into registers for up to 8 rows at a time.
//
// Milliseconds for three layers of a 1B model at 8, 16, 64 and 512 rows, 2 cores of Sapphire Rapids (with AMX,
// packed-products-bf16.cpp computes more than 16 rows): q4_K 9.6 11.5 32 243 upstream, 4.5 8.6 31 228 here; q6_K 16 29
// 80 496 upstream, 7.2 12 36 265 here.
#include "packed-products.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#if defined(__AVX512VNNI__) && defined(__GNUC__)

#    include "amx-tiles.h"
#    include "hand-out.h"
#    include "packed-rows.h"

#    include <algorithm>

namespace {

using namespace packed;

constexpr int     MOST_ROWS = 8;         // for which a tile is unpacked into registers
constexpr int64_t ROOM      = 256 << 10; // bytes of tiles that stay in the second level while rows pass

template <class Weights, int ROWS>
void tile(int n_blocks, const char * weights, const typename Weights::row * first, float * dst, size_t stride) {
    const typename Weights::row * rows[ROWS];
    __m512                        out[ROWS];
    for (int m = 0; m < ROWS; ++m) {
        rows[m] = first + m * static_cast<ptrdiff_t>(n_blocks);
        out[m]  = _mm512_setzero_ps();
    }
    for (int block = 0; block < n_blocks; ++block) {
        Weights::template add<ROWS>(weights + static_cast<ptrdiff_t>(block) * Weights::BYTES, rows, out);
        for (auto & row : rows) {
            ++row;
        }
    }
    for (int m = 0; m < ROWS; ++m) {
        _mm512_storeu_ps(dst + static_cast<size_t>(m) * stride, out[m]);
    }
}

template <class Weights>
using tile_of_rows = void (*)(int, const char *, const typename Weights::row *, float *, size_t);

template <class Weights>
constexpr tile_of_rows<Weights> tiles[] = {
    tile<Weights, 1>, tile<Weights, 2>, tile<Weights, 3>, tile<Weights, 4>,
    tile<Weights, 5>, tile<Weights, 6>, tile<Weights, 7>, tile<Weights, 8>,
};

template <class Weights>
void two_tiles(int64_t n_blocks, const char * const (&weights)[2], const typename Weights::row * row,
               float * const (&dst)[2]) {
    __m512 out[2][1] = {};
    for (int64_t block = 0; block < n_blocks; ++block) {
        for (int i = 0; i < 2; ++i) {
            Weights::template add<1>(weights[i] + block * Weights::BYTES, {row + block}, out[i]);
        }
    }
    for (int i = 0; i < 2; ++i) {
        _mm512_storeu_ps(dst[i], out[i][0]);
    }
}

// Computes tiles [begin, end) for a single row, both halves at once: a core reads more from memory in two streams than
// in one. Registers do not suffice for more rows.
template <class Weights>
void one_row(int64_t n_blocks, const char * weights, int64_t begin, int64_t end, const typename Weights::row * row,
             float * dst) {
    const auto bytes = n_blocks * Weights::BYTES, half = (end - begin) / 2;
    for (auto i = begin; i < begin + half; ++i) {
        two_tiles<Weights>(n_blocks, {weights + i * bytes, weights + (i + half) * bytes}, row,
                           {dst + i * COLS, dst + (i + half) * COLS});
    }
    for (auto i = begin + 2 * half; i < end; ++i) {
        tile<Weights, 1>(static_cast<int>(n_blocks), weights + i * bytes, row, dst + i * COLS, 0);
    }
}

template <class Weights> bool run(const ggml_compute_params * params, ggml_tensor * dst) {
    const auto n_in = dst->src[0]->ne[0], n_out = dst->ne[0], n_rows = ggml_nrows(dst);
    const auto n_blocks = n_in / Weights::K;
    auto *     rows     = static_cast<typename Weights::row *>(params->wdata);
    const auto passes   = (n_rows + MOST_ROWS - 1) / MOST_ROWS; // of equally many rows: each unpacks the tile
    const auto bytes    = n_blocks * Weights::BYTES;            // of a tile
    const auto group    = passes > 2 ? std::max<int64_t>(1, ROOM / bytes) : 1;
    hand_out   work     = hand_out_tiles(params, n_rows, n_out / COLS, bytes, group / 4);
    round_part<Weights>(params, static_cast<const float *>(dst->src[1]->data), n_rows * n_blocks, rows);
    work.start();
    ggml_barrier(params->threadpool);

    const auto * weights = static_cast<const char *>(dst->src[0]->data);
    auto *       out     = static_cast<float *>(dst->data);
    while (work.next()) {
        if (n_rows == 1) {
            one_row<Weights>(n_blocks, weights, work.begin(), work.end(), rows, out);
            continue;
        }
        for (auto at = work.begin(); at < work.end(); at += group) {
            for (int64_t pass = 0; pass < passes; ++pass) {
                const auto first = n_rows * pass / passes, n = n_rows * (pass + 1) / passes - first;
                for (auto i = at; i < std::min(work.end(), at + group); ++i) {
                    tiles<Weights>[n - 1](static_cast<int>(n_blocks), weights + i * bytes, rows + first * n_blocks,
                                          out + first * n_out + i * COLS, static_cast<size_t>(n_out));
                }
            }
        }
    }
    return true;
}

} // namespace

size_t velo_packed_work_size(const ggml_tensor * dst) {
    size_t     of_few    = 0;
    const auto n_numbers = ggml_nrows(dst) * dst->src[0]->ne[0];
    with_weights(dst->src[0]->type, [&](auto type) {
        using weights = typename decltype(type)::weights;
        of_few        = static_cast<size_t>(n_numbers / weights::K) * sizeof(typename weights::row);
        return true;
    });
    return std::max(of_few, velo_packed_work_size_of_many(dst));
}

bool velo_packed_products_suffice() {
    static const bool suffice = !amx::processor_has(amx::feature::bytes);
    return suffice;
}

bool velo_packed_products(const ggml_compute_params * params, ggml_tensor * dst) {
    if (velo_packed_products_of_many(params, dst)) {
        return true;
    }
    if (dst->src[0]->type == GGML_TYPE_Q8_0 && ggml_nrows(dst) > 12 && !velo_packed_products_suffice()) {
        return false; // AMX reads these bytes without unpacking
    }
    return with_weights(dst->src[0]->type,
                        [&](auto type) { return run<typename decltype(type)::weights>(params, dst); });
}

#else

size_t velo_packed_work_size(const ggml_tensor *) { return 0; }
bool   velo_packed_products_suffice() { return false; }
bool   velo_packed_products(const ggml_compute_params *, ggml_tensor *) { return false; }

#endif
