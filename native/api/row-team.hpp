// Work on rows of logits by the team that computed them.
#pragma once

#include "handles.hpp"
#include "team.hpp"

#include <algorithm>
#include <exception>

#if defined(_OPENMP)
#    include <omp.h>
#endif

namespace velo {

// Call f(i, buffers) for each i below `n`. Several threads do so at once, each with its own buffers, if `apart` says
// that the calls do not meet. The first exception is thrown when all have ended.
template <class F> void for_rows(velo_context & context, int32_t n, bool apart, F f) {
    int32_t n_threads = 1;
#if defined(_OPENMP)
    if (apart && n > 1) { // always the whole team: OpenMP would end the threads that a smaller one leaves out
        n_threads = context.crew.size();
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
#    pragma omp        parallel for num_threads(n_threads) schedule(dynamic)
    for (int32_t i = 0; i < n; ++i) {
        try {
            f(i, context.rows[static_cast<size_t>(omp_get_thread_num())]);
        } catch (...) {
#    pragma omp critical
            failure = std::current_exception();
        }
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
#endif
}

} // namespace velo
