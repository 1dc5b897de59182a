// Order of the emulated threads of a block, and of their copies' arrival. A kernel with all necessary barriers computes
// the same in every order.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace gpu {

// 0: the first thread that can run runs, and copies arrive when a thread waits for them. -1: the last thread runs, and
// copies arrive at once. A positive number: random threads and arrivals, with this seed.
inline thread_local int order = 0;

// Return 0 .. n - 1 in the order that `order` selects.
inline std::vector<int> in_order(int n, std::minstd_rand & chance) {
    std::vector<int> numbers((size_t) n);
    std::iota(numbers.begin(), numbers.end(), 0);
    if (order < 0) {
        std::reverse(numbers.begin(), numbers.end());
    } else if (order > 0) {
        std::shuffle(numbers.begin(), numbers.end(), chance);
    }
    return numbers;
}

// Order of one block. The first of `warps` that can run always runs, so it gets as far ahead of the others as barriers
// allow. A random order changes now and then.
struct thread_order {
    std::minstd_rand chance;
    std::vector<int> warps, lanes;

    thread_order(int n_warps, int block)
        : chance((unsigned) (order > 0 ? 1000 * order + block : 1)), warps(in_order(n_warps, chance)),
          lanes(in_order(32, chance)) {}

    void next() {
        if (order > 0 && chance() % 16 == 0) {
            std::shuffle(warps.begin(), warps.end(), chance);
            std::shuffle(lanes.begin(), lanes.end(), chance);
        }
    }
    bool copies_at_once() { return order < 0 || (order > 0 && chance() % 2 == 0); }
};

} // namespace gpu
