// The barrier between the nodes of a graph, hundreds in a step. OpenMP's barrier spins for milliseconds: if another
// process occupies the core of one thread, the others keep their cores from it, and a step takes a turn of the
// scheduler for each barrier, forty times as long. Here a thread that waits long sleeps, and the missing thread gets
// its core.
#pragma once

#include "ggml.h"

// Not with MSVC, whose C has no atomics.
#if defined(__linux__) || defined(__APPLE__) || defined(__MINGW32__)
#    define VELO_TEAM_BARRIER

// upstream's thread_ret_t
#    if defined(_WIN32)
typedef unsigned long velo_thread_result;
#    else
typedef void * velo_thread_result;
#    endif

#    ifdef __cplusplus
extern "C" {
#    else
#        include <stdatomic.h>

// Returns when all `n_threads` have arrived. `n_here` counts arrived threads and `n_rounds` finished rounds; both start
// at zero. Throws if the team has ended. For threads in velo_team_run.
void velo_team_barrier(atomic_int * n_here, atomic_int * n_rounds, int n_threads);
#    endif

// Throws std::bad_alloc if `memory` is NULL; upstream does not check it.
void * velo_have(void * memory);
#    define ggml_aligned_malloc(size) velo_have(ggml_aligned_malloc(size))

// Calls run(thread). If that throws, writes the reason to `status` and ends the team: each thread that reaches a
// barrier with the same `n_rounds` (an atomic_int) throws there, and returns from here.
velo_thread_result velo_team_run(velo_thread_result (*run)(void *), void * thread, void * n_rounds,
                                 enum ggml_status * status);
void               velo_end_team(void * n_rounds);
void               velo_throw_team_ended(void) __attribute__((noreturn));

#    ifdef __cplusplus
}
#    endif
#else
#    define velo_team_run(run, thread, n_rounds, status) run(thread)
#endif
