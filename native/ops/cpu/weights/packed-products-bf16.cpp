// Products of many rows with weights that upstream packed for AMX, in bfloat16: 32 columns of weights are unpacked once
// for all rows, and the tile registers sum floats along the whole of K. Upstream multiplies bytes, which must be scaled
// after every 32 along K: that takes several times as long as the products. Rounding both factors to 8 bits loses less
// than upstream's rounding of 256 activations to one scale.
//
// Milliseconds for three layers of a 1B model at 24, 32, 64 and 512 rows, 2 cores of Sapphire Rapids: q4_K 15.3 17.6 32
// 243 upstream, 10.1 10.8 15 108 here; q6_K 37 42 80 496 upstream, 11.8 11.9 17 104 here; q8_0 17.9 18.8 36 267
// upstream, 13.7 14.5 18 104 here.
#include "packed-products.h"

#include "amx-tiles.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "hand-out.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(VELO_AMX_TILES) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)

#    include "packed-weights.h"

namespace {

using namespace packed;

constexpr int MANY  = 17;        // rows from which on the unpacking pays
constexpr int STEP  = 32;        // numbers along K in a tile register
constexpr int TILE  = 16 * STEP; // numbers of a tile: 16 rows, or 16 columns in pairs along K
constexpr int BLOCK = 32;        // rows and columns of one product: two tiles each

// ---- activations: [rows / 16][K / 32][16][32] ----

int64_t padded(int64_t rows) { return (rows + BLOCK - 1) / BLOCK * BLOCK; }

// Rounds this thread's share of the rows, and fills rows past the last with zeros.
void round_rows(const ggml_compute_params * params, const ggml_tensor * from, uint16_t * to) {
    const int64_t k = from->ne[0], n = ggml_nrows(from);
    const auto *  values = static_cast<const float *>(from->data);
    const int64_t end    = padded(n) * (params->ith + 1) / params->nth;
    for (int64_t row = padded(n) * params->ith / params->nth; row < end; ++row) {
        uint16_t * out = to + row / 16 * 16 * k + row % 16 * STEP;
        for (int64_t i = 0; i < k; i += STEP, out += TILE) {
            const __m512 zero = _mm512_setzero_ps();
            const __m512 a    = row < n ? _mm512_loadu_ps(values + row * k + i) : zero;
            const __m512 b    = row < n ? _mm512_loadu_ps(values + row * k + i + 16) : zero;
            _mm512_storeu_si512(out, (__m512i) _mm512_cvtne2ps_pbh(b, a));
        }
    }
}

// ---- weights: [K / 32][2][16 pairs along K][16 columns] ----

// One byte of each column, as a float.
template <int which> inline __m512 byte_of(__m512i codes) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(codes, 8 * which), _mm512_set1_epi32(255)));
}

inline void put_pair(__m512 first, __m512 second, uint16_t * to) {
    const __m512i both = (__m512i) _mm512_cvtne2ps_pbh(second, first);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(amx::paired_words.x), both));
}

// 32 along K of 16 columns: a tile.
inline void put_tile(const weights32 & w, uint16_t * to) {
#    pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        const __m512i codes = w.codes.at[k];
        const __m512  scale = w.scale[k / 4], offset = w.offset[k / 4];
        put_pair(_mm512_fmadd_ps(byte_of<0>(codes), scale, offset), _mm512_fmadd_ps(byte_of<1>(codes), scale, offset),
                 to + 64 * k);
        put_pair(_mm512_fmadd_ps(byte_of<2>(codes), scale, offset), _mm512_fmadd_ps(byte_of<3>(codes), scale, offset),
                 to + 64 * k + 32);
    }
}

template <class Weights> void unpack_columns(const char * weights, int64_t n_blocks, uint16_t * to) {
    for (int column = 0; column < 2; ++column) {
        uint16_t * out = to + column * TILE;
        for (int64_t block = 0; block < n_blocks; ++block, weights += Weights::BYTES) {
            for (int group = 0; group < Weights::K / STEP; ++group, out += 2 * TILE) {
                put_tile(Weights::unpack(weights, group), out);
            }
        }
    }
}

// ---- products ----

// Multiplies 32 rows by 32 columns, with the sums in tile registers 0 to 3.
void multiply_block(const uint16_t * a, const uint16_t * b, int64_t k, float * out, int64_t stride) {
    asm volatile("" : : : "memory"); // GCC does not know that tile loads read memory
    const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (const uint16_t * end = a + 16 * k; a < end; a += TILE, b += 2 * TILE) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * k, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + 16, bytes);
    _tile_stored(2, out + 16 * stride, bytes);
    _tile_stored(3, out + 16 * stride + 16, bytes);
}

void multiply_columns(const uint16_t * rows, const uint16_t * columns, int64_t k, int64_t n, float * out,
                      int64_t stride) {
    for (int64_t row = 0; row < n; row += BLOCK) {
        if (row + BLOCK <= n) {
            multiply_block(rows + row * k, columns, k, out + row * stride, stride);
            continue;
        }
        alignas(64) float last[BLOCK * BLOCK];
        multiply_block(rows + row * k, columns, k, last, BLOCK);
        for (int64_t i = 0; row + i < n; ++i) {
            std::memcpy(out + (row + i) * stride, last + i * BLOCK, sizeof(float) * BLOCK);
        }
    }
}

// Memory for the unpacked columns of one thread, reused by its next product: allocating it takes longer than filling
// it.
struct columns_room {
    uint16_t * data = nullptr;
    int64_t    size = 0;

    columns_room()                                 = default;
    columns_room(const columns_room &)             = delete;
    columns_room & operator=(const columns_room &) = delete;
    ~columns_room() { std::free(data); }
};

// Returns this thread's memory for n numbers, a whole number of cache lines, or null if there is none. Throws nothing,
// because a worker thread could not catch it.
uint16_t * room_for_columns(int64_t n) {
    static thread_local columns_room room;
    if (room.size < n) {
        std::free(room.data);
        room.data = static_cast<uint16_t *>(std::aligned_alloc(64, static_cast<size_t>(n) * sizeof(uint16_t)));
        room.size = room.data ? n : 0;
    }
    return room.data;
}

template <class Weights> bool run(const ggml_compute_params * params, ggml_tensor * dst) {
    // the products that follow a failure write their rows into the work buffer while slower threads still read `lacks`
    static_assert(sizeof(typename Weights::row) <= Weights::K * sizeof(uint16_t),
                  "their rows must not be longer than these");

    const int64_t k = dst->src[0]->ne[0], n_blocks = k / Weights::K, n = ggml_nrows(dst);
    auto *        rows    = static_cast<uint16_t *>(params->wdata);
    auto *        lacks   = reinterpret_cast<char *>(rows + padded(n) * k); // of each thread: whether it has no memory
    auto *        columns = room_for_columns(BLOCK * k);
    lacks[params->ith]    = columns == nullptr;
    hand_out work(params, dst->ne[0] / BLOCK, 1, dst->ne[0] / BLOCK);
    round_rows(params, dst->src[1], rows);
    work.start();
    ggml_barrier(params->threadpool);
    if (std::find(lacks, lacks + params->nth, true) != lacks + params->nth) {
        return false; // in every thread
    }
    const amx::tile_configuration configured;

    const auto * weights = static_cast<const char *>(dst->src[0]->data);
    auto *       out     = static_cast<float *>(dst->data);
    while (work.next()) {
        for (int64_t block = work.begin(); block < work.end(); ++block) {
            unpack_columns<Weights>(weights + 2 * block * n_blocks * Weights::BYTES, n_blocks, columns);
            multiply_columns(rows, columns, k, n, out + block * BLOCK, dst->ne[0]);
        }
    }
    return true;
}

} // namespace

size_t velo_packed_work_size_of_many(const ggml_tensor * dst) {
    const int64_t n = padded(ggml_nrows(dst)) * dst->src[0]->ne[0];
    return ggml_nrows(dst) < MANY ? 0 : static_cast<size_t>(n) * sizeof(uint16_t) + GGML_MAX_N_THREADS;
}

bool velo_packed_products_of_many(const ggml_compute_params * params, ggml_tensor * dst) {
    if (ggml_nrows(dst) < MANY || !amx::has_tiles()) {
        return false;
    }
    return with_weights(dst->src[0]->type,
                        [&](auto type) { return run<typename decltype(type)::weights>(params, dst); });
}

#else

size_t velo_packed_work_size_of_many(const ggml_tensor *) { return 0; }
bool   velo_packed_products_of_many(const ggml_compute_params *, ggml_tensor *) { return false; }

#endif
