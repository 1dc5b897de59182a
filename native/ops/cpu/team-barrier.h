// The barrier between the nodes of a graph, hundreds in a step: OpenMP's spins for milliseconds. Where something else
// has the core of one thread, the others then keep theirs from it: a step takes as many turns of the scheduler as it
// has barriers, forty times as long. Here who waits long sleeps, and the thread that is missing finds a free core.
#pragma once

#if defined(__linux__)
#    include <stdatomic.h>

#    define VELO_TEAM_BARRIER

// Returns when all `n_threads` have come. Both numbers begin as zero: those who have come, and the rounds that are
// over.
void velo_team_barrier(atomic_int * n_here, atomic_int * n_rounds, int n_threads);
#endif
