// The order in which the threads of a block take turns on the host, and when a copy arrives. A kernel whose barriers
// suffice computes the same in every order.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace gpu {

// 0: the first thread that can go on does, and copies arrive when they are waited for. -1: the last thread does, and
// copies arrive at once. A positive number is a seed: threads and copies by chance.
inline thread_local int order = 0;

// 0 .. n - 1 as `order` has it.
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

// Of one block. Each time the first of `warps` goes on that can, so that it gets as far ahead of the others as barriers
// allow; by chance the order changes now and then.
struct turns {
    std::minstd_rand chance;
    std::vector<int> warps, lanes;

    turns(int n_warps, int block)
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
