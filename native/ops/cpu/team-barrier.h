// The barrier between the nodes of a graph, hundreds in a step: OpenMP's spins for milliseconds. Where something else
// has the core of one thread, the others then keep theirs from it: a step takes as many turns of the scheduler as it
// has barriers, forty times as long. Here who waits long sleeps, and the thread that is missing finds a free core.
#pragma once

#include "ggml.h"

#if defined(__linux__)
#    define VELO_TEAM_BARRIER

#    ifdef __cplusplus
extern "C" {
#    else
#        include <stdatomic.h>

// Returns when all `n_threads` have come. Both numbers begin as zero: those who have come, and the rounds that are
// over. Throws when the team has ended. For threads in velo_team_run.
void velo_team_barrier(atomic_int * n_here, atomic_int * n_rounds, int n_threads);
#    endif

// Throws std::bad_alloc if there is none; upstream's teams begin without a look.
void * velo_have(void * memory);
#    define ggml_aligned_malloc(size) velo_have(ggml_aligned_malloc(size))

// Calls run(thread). If that throws, writes why to `status` and ends the team: whichever thread comes to a barrier with
// the same `n_rounds` (an atomic_int) throws there, and returns from here.
void * velo_team_run(void * (*run)(void *), void * thread, void * n_rounds, enum ggml_status * status);
void   velo_end_team(void * n_rounds);
void   velo_throw_team_ended(void);

#    ifdef __cplusplus
}
#    endif
#else
#    define velo_team_run(run, thread, n_rounds, status) run(thread)
#endif
