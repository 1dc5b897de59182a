// Primitives of gpu.h on the host, to test kernels unchanged on machines without a GPU. The threads of a block are
// fibers (gpu-fibers.h).
#pragma once

#include "gpu-fibers.h"
#include "gpu-numbers.h"

#include <algorithm>
#include <cmath>

#define GPU_FN inline
#define GPU_BOTH inline
#define GPU_UNROLL
#define GPU_UNROLL_2
#define GPU_UNROLL_4
#define GPU_SELDOM(x) (x)
#define GPU_ROLLED

namespace gpu {

inline int thread() { return here->current; }
inline int lane() { return here->current % 32; }
inline int warp() { return here->current / 32; }
inline int n_threads() { return here->n_threads; }
inline int block() { return here->index; }
inline int n_blocks() { return here->n_blocks; }

inline warp_state & this_warp() { return here->warps[warp()]; }
inline void         sync_warp() {
    wait_at(this_warp().all, 32, [] {});
}
inline void sync_block() {
    warp_state & w = this_warp();
    if (w.stopped_at != here->all.n_passed) {
        w.stopped_at = here->all.n_passed;
        w.n_stopped  = 0;
    }
    ++w.n_stopped;
    wait_at(here->all, here->n_threads, [] {});
}

// Two buffers alternate: a lane writes to one again only after all lanes have read it.
template <class T> T exchange(T value, int from) {
    static_assert(sizeof(T) <= 8, "a register or two");
    warp_state & w    = this_warp();
    auto &       sent = w.sent[w.all.n_passed % 2];
    memcpy(&sent[lane()], &value, sizeof(T));
    sync_warp();
    memcpy(&value, &sent[from], sizeof(T));
    return value;
}
template <class T> T shuffle(T value, int from) { return exchange(value, from); }
template <class T> T shuffle_xor(T value, int mask) { return exchange(value, lane() ^ mask); }

inline int first_lane(bool x) {
    int lane_of = x ? lane() : 32;
    for (int mask = 1; mask < 32; mask *= 2) {
        lane_of = std::min(lane_of, shuffle_xor(lane_of, mask));
    }
    return lane_of;
}
inline bool any(bool x) { return first_lane(x) < 32; }

inline float exp2(float x) { return ::exp2f(x); }
inline float tanh(float x) { return 1.0f - 2.0f / (1.0f + exp2(x * 2.8853900817779268f)); } // as in gpu-cuda.h

inline uint32_t pack_f16(float low, float high) { return float_to_f16(low) | (uint32_t) float_to_f16(high) << 16; }
inline uint32_t pack_bf16(float low, float high) { return float_to_bf16(low) | (uint32_t) float_to_bf16(high) << 16; }

inline uint32_t funnel(uint32_t low, uint32_t high, int shift) {
    return (uint32_t) (((uint64_t) high << 32 | low) >> shift);
}
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t digits) {
    const uint64_t both = (uint64_t) b << 32 | a;
    uint32_t       to   = 0;
    for (int i = 0; i < 4; ++i) {
        to |= (uint32_t) (both >> 8 * (digits >> 4 * i & 7) & 255) << 8 * i;
    }
    return to;
}

inline uint32_t fma_f16(uint32_t a, uint32_t b, uint32_t c) { // exact in double, rounded once
    uint32_t to = 0;
    for (int i = 0; i < 32; i += 16) {
        const double x = f16_to_float((uint16_t) (a >> i)), y = f16_to_float((uint16_t) (b >> i));
        to |= (uint32_t) to_f16(x * y + f16_to_float((uint16_t) (c >> i))) << i;
    }
    return to;
}
inline uint32_t add_f16(uint32_t a, uint32_t b) { return fma_f16(a, 0x3c003c00, b); }
inline uint32_t mul_f16(uint32_t a, uint32_t b) { return fma_f16(a, b, 0x80008000); } // a * b + (-0)

inline uint64_t         shared_address(const void * x) { return (uint64_t) x; }
inline const uint32_t * words_at(uint64_t address) { return (const uint32_t *) address; }

// ---- asynchronous copies from global to shared memory ----

template <int bytes, bool LINES = false> void copy_async_if(bool wanted, void * to, const void * from) {
    if (!wanted) {
        return;
    }
    if (here->order.copies_at_once()) {
        memcpy(to, from, bytes);
    } else {
        this_fiber().copies.push_back({to, from, bytes});
    }
}
inline void copy_commit() {
    fiber & f = this_fiber();
    f.groups.push_back(f.copies.size()); // of all groups up to this one
}
template <int pending> void copy_wait() {
    fiber & f = this_fiber();
    if (f.groups.size() <= pending) {
        return;
    }
    const auto   last = f.groups.end() - pending - 1;
    const size_t n    = *last;
    for (size_t i = 0; i < n; ++i) {
        memcpy(f.copies[i].to, f.copies[i].from, f.copies[i].bytes);
    }
    f.copies.erase(f.copies.begin(), f.copies.begin() + n);
    f.groups.erase(f.groups.begin(), last + 1);
    for (size_t & end : f.groups) {
        end -= n;
    }
}

inline void let_next_kernel_begin() {} // kernels run one after the other

// ---- fragments ----

// Word m of lane l has two numbers: of row l / 4 of matrix m at columns 2 * (l % 4) and one more, or the same of the
// transposed matrix.
template <bool transposed> void load(uint32_t (&to)[4], const void * row) {
    warp_state & w   = this_warp();
    w.rows[lane()]   = row;
    w.loaded[lane()] = to;
    wait_at(w.all, 32, [&] {
        for (int m = 0; m < 4; ++m) {
            uint16_t numbers[8][8];
            for (int r = 0; r < 8; ++r) {
                memcpy(numbers[r], w.rows[8 * m + r], sizeof(numbers[r]));
            }
            for (int l = 0; l < 32; ++l) {
                const int        r = l / 4, c = l % 4 * 2;
                const uint16_t * one   = transposed ? &numbers[c][r] : &numbers[r][c];
                const uint16_t * other = transposed ? &numbers[c + 1][r] : &numbers[r][c + 1];
                w.loaded[l][m]         = *one | (uint32_t) *other << 16;
            }
        }
    });
}

template <float (*number)(uint16_t)> void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    warp_state & w = this_warp();
    const int    l = lane();
    memcpy(w.a[l], a, sizeof(a));
    w.b[l][0] = b0;
    w.b[l][1] = b1;
    w.c[l]    = c;
    wait_at(w.all, 32, [&] {
        uint16_t a[16][16], b[16][8];
        float    left[16][16], right[16][8], sums[16][8];
        for (int i = 0; i < 32; ++i) {
            const int g = i / 4, column = i % 4 * 2;
            for (int r = 0; r < 4; ++r) {
                for (int h = 0; h < 2; ++h) {
                    a[g + r % 2 * 8][column + h + r / 2 * 8] = (uint16_t) (w.a[i][r] >> 16 * h);
                    sums[g + r / 2 * 8][column + r % 2]      = w.c[i][r];
                    if (r < 2) {
                        b[column + h + r * 8][g] = (uint16_t) (w.b[i][r] >> 16 * h);
                    }
                }
            }
        }
        std::transform(&a[0][0], &a[0][0] + 256, &left[0][0], number);
        std::transform(&b[0][0], &b[0][0] + 128, &right[0][0], number);
        for (int row = 0; row < 16; ++row) {
            for (int k = 0; k < 16; ++k) {
                for (int column = 0; column < 8; ++column) {
                    sums[row][column] += left[row][k] * right[k][column];
                }
            }
        }
        for (int i = 0; i < 32; ++i) {
            for (int r = 0; r < 4; ++r) {
                w.c[i][r] = sums[i / 4 + r / 2 * 8][i % 4 * 2 + r % 2];
            }
        }
    });
}

} // namespace gpu

#include "gpu-fallback.h"

namespace gpu {

inline thread_local bool tensor_cores = true; // false: emulate a GPU without them

inline void load_matrices(uint32_t (&to)[4], const void * row) {
    tensor_cores ? load<false>(to, row) : fallback::load<false>(to, row);
}
inline void load_matrices_transposed(uint32_t (&to)[4], const void * row) {
    tensor_cores ? load<true>(to, row) : fallback::load<true>(to, row);
}
inline uint32_t transpose(uint32_t x) { return fallback::transpose(x); }
inline void     mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    tensor_cores ? mma<f16_to_float>(c, a, b0, b1) : fallback::mma<f16_to_float>(c, a, b0, b1);
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    tensor_cores ? mma<bf16_to_float>(c, a, b0, b1) : fallback::mma<bf16_to_float>(c, a, b0, b1);
}

} // namespace gpu
