// Threads that wait at the CPU backend's barrier many times, some of them so late that others sleep.
#include "compute-failure.h"
#include "lab.h"
#include "team-barrier.h"

#ifdef VELO_TEAM_BARRIER

#    include <pthread.h>
#    include <stdlib.h>
#    include <time.h>

struct meeting {
    atomic_int n_here, n_rounds;
    int        n_threads, rounds;
    int *      entered; // count of each thread; not atomic, as the barrier orders the accesses
    atomic_int n_wrong;
};

struct member {
    struct meeting * meeting;
    int              number;
    pthread_t        thread;
};

static void be_late(int microseconds) {
    const struct timespec t = {0, 1000l * microseconds};
    nanosleep(&t, NULL);
}

static void * meet(void * argument) {
    const struct member * m    = (const struct member *) argument;
    struct meeting *      all  = m->meeting;
    unsigned              seed = 1 + (unsigned) m->number;
    struct velo_computing here = {0};
    velo_set_computing(&here);
    for (int round = 1; round <= all->rounds; ++round) {
        seed = seed * 1664525u + 1013904223u;
        if (seed >> 24 < 8) {
            be_late((int) (seed >> 10 & 1023));
        }
        all->entered[m->number] = round;
        velo_team_barrier(&all->n_here, &all->n_rounds, all->n_threads);
        for (int i = 0; i < all->n_threads; ++i) {
            atomic_fetch_add(&all->n_wrong, all->entered[i] != round);
        }
        velo_team_barrier(&all->n_here, &all->n_rounds, all->n_threads);
    }
    return NULL;
}

const char * lab_team_barrier(int32_t n_threads, int32_t n_rounds) {
    struct meeting  all     = {0};
    struct member * members = (struct member *) calloc((size_t) n_threads, sizeof(*members));
    all.n_threads           = n_threads;
    all.rounds              = n_rounds;
    all.entered             = (int *) calloc((size_t) n_threads, sizeof(int));
    for (int i = 0; i < n_threads; ++i) {
        members[i].meeting = &all;
        members[i].number  = i;
        if (pthread_create(&members[i].thread, NULL, meet, &members[i]) != 0) {
            abort(); // the threads started before would wait forever
        }
    }
    for (int i = 0; i < n_threads; ++i) {
        pthread_join(members[i].thread, NULL);
    }
    free(all.entered);
    free(members);
    return atomic_load(&all.n_wrong) ? "a thread left the barrier before another had come" : NULL;
}

#else

const char * lab_team_barrier(int32_t n_threads, int32_t n_rounds) {
    (void) n_threads;
    (void) n_rounds;
    return NULL;
}

#endif
