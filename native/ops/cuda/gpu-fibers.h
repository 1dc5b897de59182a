// Emulated threads of a block on the host: fibers that run in the order of gpu-order.h. A fiber switches straight to
// the next one.
#pragma once

#include "gpu-order.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#    include <sanitizer/common_interface_defs.h>
#endif

// GPU_SAVE returns 0, then 1 each time that GPU_JUMP continues there. The compiler's own are a few instructions.
#if defined(__x86_64__)
typedef void * gpu_place[5];
#    define GPU_SAVE(place) __builtin_setjmp(place)
#    define GPU_JUMP(place) __builtin_longjmp(place, 1)
#else
#    include <csetjmp>
typedef jmp_buf gpu_place;
#    define GPU_SAVE(place) _setjmp(place)
#    define GPU_JUMP(place) _longjmp(place, 1)
#endif

namespace gpu {

// AddressSanitizer needs a call before and after each switch of stacks.
struct fiber_stack {
    const void * bottom = nullptr;
    size_t       size   = 0;
    void *       fake   = nullptr; // data of the sanitizer
};

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
    gpu_place       place; // where it continues
    bool            begun = false, done = false;
    const barrier * waits_at = nullptr; // null: not at a barrier
    uint64_t        n_passed = 0;       // count of that barrier when the fiber arrived

    std::vector<copy>   copies; // that have not arrived
    std::vector<size_t> groups; // number of copies in each group that is committed

    ucontext_t              first; // context of its start
    std::unique_ptr<char[]> stack;
    fiber_stack             use;

    bool can_run() const { return !done && (waits_at == nullptr || waits_at->n_passed != n_passed); }
};

struct warp_state {
    barrier      all;
    uint64_t     sent[2][32]; // values of shuffles, in turn
    const void * rows[32];    // rows of matrices
    uint32_t     a[32][4], b[32][2];
    float *      c[32];
    uint32_t *   loaded[32];
    int          n_stopped  = 0; // threads at the block's barrier
    uint64_t     stopped_at = 0; // count of the block's barrier when they arrived
};

struct block_state {
    int                           index, n_blocks, n_threads;
    barrier                       all;
    std::vector<fiber> &          fibers;
    std::vector<warp_state>       warps;
    const std::function<void()> & body;
    gpu_place                     back;
    fiber_stack                   use;            // of the caller
    fiber_stack *                 left = nullptr; // the stack before the switch
    thread_order                  order;
    int                           current = 0;              // thread that runs
    size_t                        at_warp = 0, at_lane = 0; // indices of the next thread in the order
    bool                          ran    = false;           // whether a thread of this warp ran in its turn
    bool                          waited = false;           // for the kernel before

    block_state(int index, int n_blocks, std::vector<fiber> & fibers, const std::function<void()> & body)
        : index(index), n_blocks(n_blocks), n_threads((int) fibers.size()), fibers(fibers), warps(fibers.size() / 32),
          body(body), order(n_threads / 32, index) {
        for (fiber & f : fibers) {
            f.done     = false;
            f.waits_at = nullptr;
            f.copies.clear();
            f.groups.clear();
        }
    }

    // Return the next thread in order that can run, or null. Each thread of a warp runs once in a turn, then the first
    // warp that can run has the next turn.
    fiber * next() {
        while (true) {
            const warp_state & w = warps[order.warps[at_warp]];
            if (at_lane == 0 && w.n_stopped == 32 && w.stopped_at == all.n_passed) {
                at_lane = 32; // none can run
            }
            while (at_lane < order.lanes.size()) {
                current = 32 * order.warps[at_warp] + order.lanes[at_lane++];
                if (fibers[current].can_run()) {
                    ran = true;
                    return &fibers[current];
                }
            }
            at_lane = 0;
            if (ran) {
                order.next();
                at_warp = 0;
                ran     = false;
            } else if (++at_warp == order.warps.size()) {
                return nullptr;
            }
        }
    }
};

inline thread_local block_state *      here = nullptr;
inline thread_local std::vector<fiber> fibers_of_thread; // reused by all blocks

inline fiber & this_fiber() { return here->fibers[here->current]; }

inline void before_switch(fiber_stack & from, const fiber_stack & to) {
    here->left = &from;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.size);
#else
    (void) to;
#endif
}

inline void after_switch(const fiber_stack & to) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(to.fake, &here->left->bottom, &here->left->size);
#else
    (void) to;
#endif
}

inline void jump_to(fiber & f) {
    if (f.begun) {
        GPU_JUMP(f.place);
    }
    f.begun = true;
    setcontext(&f.first);
}

// Switch to the next thread, until it is this fiber's turn again.
__attribute__((noinline)) inline void yield_fiber() {
    fiber & f  = this_fiber();
    fiber * to = here->next();
    if (to == &f) {
        return;
    }
    if (GPU_SAVE(f.place) == 0) {
        before_switch(f.use, to ? to->use : here->use);
        if (to) {
            jump_to(*to);
        }
        GPU_JUMP(here->back);
    }
    after_switch(this_fiber().use);
}

template <class F> void wait_at(barrier & place, int n, const F & work) {
    fiber & f  = this_fiber();
    f.waits_at = &place;
    f.n_passed = place.n_passed;
    if (++place.n_arrived == n) {
        work();
        place.n_arrived = 0;
        ++place.n_passed;
    }
    yield_fiber(); // the last one yields too: the order decides which fiber continues first
}

inline void run_fiber() {
    after_switch(this_fiber().use);
    while (true) { // once for each block
        here->body();
        this_fiber().done = true;
        yield_fiber();
    }
}

inline void make_fibers(std::vector<fiber> & fibers, int n) {
    constexpr int bytes = (64 << 10) + 9 * 64; // so that stacks do not share the same sets of the cache
    fibers              = std::vector<fiber>((size_t) n);
    for (fiber & f : fibers) {
        f.stack.reset(new char[bytes]);
        getcontext(&f.first);
        f.first.uc_stack.ss_sp   = f.stack.get();
        f.first.uc_stack.ss_size = bytes;
        f.use.bottom             = f.stack.get();
        f.use.size               = bytes;
        makecontext(&f.first, run_fiber, 0);
    }
}

__attribute__((noinline)) inline void run_block(block_state & state) {
    here = &state;
    if (fiber * first = state.next()) {
        if (GPU_SAVE(state.back) == 0) {
            before_switch(state.use, first->use);
            jump_to(*first);
        }
        after_switch(here->use);
    }
    for (const fiber & f : here->fibers) {
        if (!f.done) {
            fibers_of_thread.clear(); // they are in the middle of the block
            throw std::logic_error("a thread waits at a barrier that other threads never reach");
        }
    }
}

// ---- results of the kernels before ----

struct memory_range {
    void *  at;
    int64_t bytes;
};

struct hidden_memory {
    void *            at;
    std::vector<char> results;
};
inline thread_local std::vector<hidden_memory> hidden;

// Hide what the kernels before have written until a thread waits for them: it is NaN in every type.
inline void hide(const memory_range & range) {
    const char * from = (const char *) range.at;
    hidden.push_back({range.at, std::vector<char>(from, from + range.bytes)});
    memset(range.at, 0xff, (size_t) range.bytes);
}
inline void reveal() {
    for (; !hidden.empty(); hidden.pop_back()) { // the last first: ranges may overlap
        memcpy(hidden.back().at, hidden.back().results.data(), hidden.back().results.size());
    }
}
inline void wait_for_last_kernel() {
    here->waited = true;
    reveal();
}

// ---- launches ----

constexpr int HIDING_BLOCKS = 8; // first blocks of a launch, for which results are hidden: copies take time

// Run `body` as n_blocks blocks of n_threads threads, one block after the other. Shared memory starts as NaN in every
// type. `results`: memory that the kernels before have written, which a block must not read before it waits.
inline void launch(int n_blocks, int n_threads, void * shared, size_t shared_bytes,
                   const std::vector<memory_range> & results, const std::function<void()> & body) {
    if (fibers_of_thread.size() != (size_t) n_threads) {
        make_fibers(fibers_of_thread, n_threads);
    }
    std::minstd_rand chance((unsigned) (order > 0 ? order : 1));
    int              n_run = 0;
    for (int index : in_order(n_blocks, chance)) {
        if (shared_bytes > 0) {
            memset(shared, 0xff, shared_bytes);
        }
        if (n_run++ < HIDING_BLOCKS) {
            std::for_each(results.begin(), results.end(), hide);
        }
        block_state state(index, n_blocks, fibers_of_thread, body);
        run_block(state);
        if (!state.waited) {
            throw std::logic_error("a thread block does not wait for the kernel before it");
        }
    }
}

} // namespace gpu
