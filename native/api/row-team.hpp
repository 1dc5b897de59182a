// Work on rows of logits by the team that computed them.
#pragma once

#include "handles.hpp"
#include "team.hpp"

#include "llama-paged.h"

#include <algorithm>
#include <exception>

#if defined(_OPENMP)
#    include <omp.h>
#endif

namespace velo {

// Return the logits of an output of the last step; throw VELO_INVALID if there is no such row, or what a GPU met.
inline float * logits_of(const velo_context & context, int32_t row) {
    float * found = nullptr;
    check(llama_paged_logits(context.llama.get(), row, &found));
    return found;
}

// Call f(i, buffers) for each i below `n`. The team of the last step does so at once, each thread with its own buffers,
// if it belongs to the calling thread, and if `apart` says that the calls do not meet. The first exception is thrown
// when all have ended.
template <class F> void for_rows(velo_context & context, int32_t n, bool apart, F f) {
    int32_t n_threads = 1;
#if defined(_OPENMP)
    if (apart && n > 1 && context.team.of == std::this_thread::get_id()) {
        n_threads = context.team.size; // OpenMP would end the threads that a smaller team leaves out
        check_team(n_threads);
    }
#else
    (void) apart;
#endif
    context.rows.resize(std::max(context.rows.size(), static_cast<size_t>(n_threads)));
    if (n_threads == 1) {
        for (int32_t i = 0; i < n; ++i) {
            f(i, context.rows[0]);
        }
        return;
    }
#if defined(_OPENMP)
    std::exception_ptr failure;

#    pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int32_t i = 0; i < n; ++i) {
        try {
            f(i, context.rows[static_cast<size_t>(omp_get_thread_num())]);
        } catch (...) {
#    pragma omp critical
            failure = failure ? failure : std::current_exception();
        }
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
#endif
}

} // namespace velo
