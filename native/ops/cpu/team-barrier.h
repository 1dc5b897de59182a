// The barrier between the nodes of a graph, hundreds in a step. OpenMP's barrier spins for milliseconds: if another
// process occupies the core of one thread, the others keep their cores from it, and a step takes a turn of the
// scheduler for each barrier, forty times as long. Here a thread that waits long sleeps, and the missing thread gets
// its core.
#pragma once

#include "ggml.h"

#if defined(__linux__)
#    define VELO_TEAM_BARRIER

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
void * velo_team_run(void * (*run)(void *), void * thread, void * n_rounds, enum ggml_status * status);
void   velo_end_team(void * n_rounds);
void   velo_throw_team_ended(void);

#    ifdef __cplusplus
}
#    endif
#else
#    define velo_team_run(run, thread, n_rounds, status) run(thread)
#endif
