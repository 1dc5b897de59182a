// Primitives of gpu.h on the host, to test kernels unchanged on machines without a GPU. The threads of a block are
// fibers that run in the order of gpu-order.h.
#pragma once

#include "gpu-order.h"

#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <ucontext.h>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#    include <sanitizer/common_interface_defs.h>
#endif

#define GPU_FN inline
#define GPU_BOTH inline
#define GPU_UNROLL
#define GPU_ROLLED

namespace gpu {

// AddressSanitizer needs a call before and after each switch of stacks.
struct fiber_stack {
    const void * bottom = nullptr;
    size_t       size   = 0;
    void *       fake   = nullptr; // data of the sanitizer
};

inline void before_switch(fiber_stack & from, const fiber_stack & to, bool for_good = false) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake, to.bottom, to.size);
#else
    (void) from, (void) to, (void) for_good;
#endif
}

inline void after_switch(fiber_stack & from, const fiber_stack & to) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(to.fake, &from.bottom, &from.size);
#else
    (void) from, (void) to;
#endif
}

struct copy {
    void *       to;
    const void * from;
    int          bytes;
};

// Barrier of fibers. The last one to arrive does the work of all.
struct barrier {
    int      n_arrived = 0;
    uint64_t n_passed  = 0;
};

struct fiber {
    ucontext_t                     first; // context of its start
    jmp_buf                        place; // where it continues
    bool                           begun = false, done = false;
    std::unique_ptr<char[]>        stack;
    fiber_stack                    use;
    std::vector<std::vector<copy>> groups;             // pending copies; the last group is not committed
    const barrier *                waits_at = nullptr; // null: not at a barrier
    uint64_t                       n_passed = 0;       // count of that barrier when the fiber arrived

    bool can_run() const { return !done && (waits_at == nullptr || waits_at->n_passed != n_passed); }
};

struct warp_state {
    barrier      all;
    uint64_t     sent[32]; // values of a shuffle
    const void * rows[32]; // rows of matrices
    uint32_t     a[32][4], b[32][2];
    float *      c[32];
    uint32_t *   loaded[32];
};

struct block_state {
    int                     index, n_blocks, n_threads;
    barrier                 all;
    std::vector<fiber>      fibers;
    std::vector<warp_state> warps;
    std::function<void()>   body;
    ucontext_t              home;
    jmp_buf                 back;
    fiber_stack             use; // of the scheduler
    int                     current = 0;
    thread_order            order;

    block_state(int index, int n_blocks, int n_threads, const std::function<void()> & body)
        : index(index), n_blocks(n_blocks), n_threads(n_threads), fibers((size_t) n_threads),
          warps((size_t) n_threads / 32), body(body), order(n_threads / 32, index) {}
};

inline thread_local block_state * here = nullptr;

inline int thread() { return here->current; }
inline int lane() { return here->current % 32; }
inline int warp() { return here->current / 32; }
inline int n_threads() { return here->n_threads; }
inline int block() { return here->index; }
inline int n_blocks() { return here->n_blocks; }

inline void yield_fiber() { // switch to the scheduler until this fiber runs again
    fiber & f = here->fibers[here->current];
    if (_setjmp(f.place) == 0) {
        before_switch(f.use, here->use);
        _longjmp(here->back, 1);
    }
    after_switch(here->use, f.use);
}

template <class F> void wait_at(barrier & place, int n, const F & work) {
    fiber & f  = here->fibers[here->current];
    f.waits_at = &place;
    f.n_passed = place.n_passed;
    if (++place.n_arrived == n) {
        work();
        place.n_arrived = 0;
        ++place.n_passed;
    }
    yield_fiber(); // the last one yields too: the order decides which fiber continues first
}

inline warp_state & this_warp() { return here->warps[warp()]; }
inline void         sync_warp() {
    wait_at(this_warp().all, 32, [] {});
}
inline void sync_block() {
    wait_at(here->all, here->n_threads, [] {});
}

template <class T> T exchange(T value, int from) {
    static_assert(sizeof(T) <= 8, "a register or two");
    warp_state & w = this_warp();
    memcpy(&w.sent[lane()], &value, sizeof(T));
    sync_warp();
    memcpy(&value, &w.sent[from], sizeof(T));
    sync_warp();
    return value;
}
template <class T> T shuffle(T value, int from) { return exchange(value, from); }
template <class T> T shuffle_xor(T value, int mask) { return exchange(value, lane() ^ mask); }
template <class T> T shuffle_up(T value, int by) { return exchange(value, lane() < by ? lane() : lane() - by); }

inline float exp2(float x) { return ::exp2f(x); }
inline float tanh(float x) { return 1.0f - 2.0f / (1.0f + exp2(x * 2.8853900817779268f)); } // as in gpu-cuda.h

inline float bf16_to_float(uint16_t x) {
    const uint32_t wide = (uint32_t) x << 16;
    float          y;
    memcpy(&y, &wide, sizeof(y));
    return y;
}
inline uint16_t float_to_bf16(float x) { // to the nearest, ties to even
    uint32_t wide;
    memcpy(&wide, &x, sizeof(wide));
    return x != x ? 0x7fc0 : (uint16_t) ((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}
inline float f16_to_float(uint16_t x) {
    _Float16 y;
    memcpy(&y, &x, sizeof(y));
    return (float) y;
}
inline uint16_t float_to_f16(float x) {
    const _Float16 y = (_Float16) x;
    uint16_t       z;
    memcpy(&z, &y, sizeof(z));
    return z;
}
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
        const double   x = f16_to_float((uint16_t) (a >> i)), y = f16_to_float((uint16_t) (b >> i));
        const _Float16 sum = (_Float16) (x * y + f16_to_float((uint16_t) (c >> i)));
        uint16_t       z;
        memcpy(&z, &sum, sizeof(z));
        to |= (uint32_t) z << i;
    }
    return to;
}
inline uint32_t add_f16(uint32_t a, uint32_t b) { return fma_f16(a, 0x3c003c00, b); }
inline uint32_t mul_f16(uint32_t a, uint32_t b) { return fma_f16(a, b, 0x80008000); } // a * b + (-0)

inline uint64_t         shared_address(const void * x) { return (uint64_t) x; }
inline const uint32_t * words_at(uint64_t address) { return (const uint32_t *) address; }

// ---- asynchronous copies from global to shared memory ----

template <int bytes> void copy_async(void * to, const void * from) {
    if (here->order.copies_at_once()) {
        memcpy(to, from, bytes);
    } else {
        here->fibers[here->current].groups.back().push_back({to, from, bytes});
    }
}
inline void                 copy_commit() { here->fibers[here->current].groups.emplace_back(); }
template <int pending> void copy_wait() {
    auto & groups = here->fibers[here->current].groups;
    while (groups.size() > pending + 1) {
        for (const copy & c : groups.front()) {
            memcpy(c.to, c.from, c.bytes);
        }
        groups.erase(groups.begin());
    }
}

// ---- fragments ----

inline void load(uint32_t (&to)[4], const void * row, bool transposed) {
    warp_state & w   = this_warp();
    w.rows[lane()]   = row;
    w.loaded[lane()] = to;
    wait_at(w.all, 32, [&] {
        for (int l = 0; l < 32; ++l) {
            for (int m = 0; m < 4; ++m) {
                uint16_t pair[2];
                for (int i = 0; i < 2; ++i) {
                    const int r = transposed ? l % 4 * 2 + i : l / 4, c = transposed ? l / 4 : l % 4 * 2 + i;
                    memcpy(&pair[i], (const char *) w.rows[8 * m + r] + 2 * c, 2);
                }
                w.loaded[l][m] = pair[0] | (uint32_t) pair[1] << 16;
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
        float left[16][16], right[16][8];
        for (int i = 0; i < 32; ++i) {
            for (int r = 0; r < 4; ++r) {
                for (int h = 0; h < 2; ++h) {
                    const int column                = i % 4 * 2 + h + r / 2 * 8;
                    left[i / 4 + r % 2 * 8][column] = number((uint16_t) (w.a[i][r] >> 16 * h));
                    if (r < 2) {
                        right[i % 4 * 2 + h + r * 8][i / 4] = number((uint16_t) (w.b[i][r] >> 16 * h));
                    }
                }
            }
        }
        for (int i = 0; i < 32; ++i) {
            for (int r = 0; r < 4; ++r) {
                const int row = i / 4 + r / 2 * 8, column = i % 4 * 2 + r % 2;
                float     sum = w.c[i][r];
                for (int k = 0; k < 16; ++k) {
                    sum += left[row][k] * right[k][column];
                }
                w.c[i][r] = sum;
            }
        }
    });
}

} // namespace gpu

#include "gpu-fallback.h"

namespace gpu {

inline thread_local bool tensor_cores = true; // false: emulate a GPU without them

inline void load_matrices(uint32_t (&to)[4], const void * row) {
    tensor_cores ? load(to, row, false) : fallback::load<false>(to, row);
}
inline void load_matrices_transposed(uint32_t (&to)[4], const void * row) {
    tensor_cores ? load(to, row, true) : fallback::load<true>(to, row);
}
inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    tensor_cores ? mma<f16_to_float>(c, a, b0, b1) : fallback::mma<f16_to_float>(c, a, b0, b1);
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    tensor_cores ? mma<bf16_to_float>(c, a, b0, b1) : fallback::mma<bf16_to_float>(c, a, b0, b1);
}

// ---- launch ----

inline void begin_fiber() {
    fiber & f = here->fibers[here->current];
    after_switch(here->use, f.use);
    here->body();
    f.done = true;
    before_switch(f.use, here->use, true);
    _longjmp(here->back, 1);
}

inline void make_fibers(block_state & state) {
    constexpr int bytes = 64 << 10;
    for (fiber & f : state.fibers) {
        f.stack.reset(new char[bytes]);
        f.groups.emplace_back();
        getcontext(&f.first);
        f.first.uc_stack.ss_sp   = f.stack.get();
        f.first.uc_stack.ss_size = bytes;
        f.use.bottom             = f.stack.get();
        f.use.size               = bytes;
        makecontext(&f.first, begin_fiber, 0);
    }
}

// Run a fiber until it yields.
inline void resume(block_state & state, fiber & f) {
    if (_setjmp(state.back) == 0) {
        before_switch(state.use, f.use);
        if (f.begun) {
            _longjmp(f.place, 1);
        }
        f.begun = true;
        swapcontext(&state.home, &f.first);
    }
    after_switch(f.use, state.use);
}

// Run each thread of the warp that can run once. Return whether any ran.
inline bool run_warp(block_state & state, int warp) {
    bool some = false;
    for (int lane : state.order.lanes) {
        state.current = 32 * warp + lane;
        fiber & f     = state.fibers[state.current];
        if (f.can_run()) {
            some = true;
            resume(state, f);
        }
    }
    return some;
}

inline void run_block(block_state & state) {
    here = &state;
    make_fibers(state);
    const auto run_one = [&](int warp) { return run_warp(state, warp); };
    while (std::any_of(state.order.warps.begin(), state.order.warps.end(), run_one)) {
        state.order.next();
    }
    for (const fiber & f : state.fibers) {
        if (!f.done) {
            throw std::logic_error("a thread waits at a barrier that other threads never reach");
        }
    }
}

// Run `body` as n_blocks blocks of n_threads threads, one block after the other. Shared memory starts as NaN in every
// type.
inline void launch(int n_blocks, int n_threads, void * shared, size_t shared_bytes,
                   const std::function<void()> & body) {
    std::minstd_rand chance((unsigned) (order > 0 ? order : 1));
    for (int index : in_order(n_blocks, chance)) {
        memset(shared, 0xff, shared_bytes);
        block_state state(index, n_blocks, n_threads, body);
        run_block(state);
    }
}

} // namespace gpu
