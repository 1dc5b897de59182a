#define _GNU_SOURCE // syscall
#include "team-barrier.h"

#ifdef VELO_TEAM_BARRIER

#    include <limits.h>
#    include <linux/futex.h>
#    include <stdbool.h>
#    include <sys/syscall.h>
#    include <time.h>
#    include <unistd.h>

enum { PAUSES = 16 }; // between looks at the clock

// Nanoseconds of spinning before sleep, which takes tens of thousands to wake from: a quarter of what the thread worked
// since the last barrier, for so far may threads of a team be apart that have their cores.
static const long long LEAST = 20000, MOST = 2000000;

static atomic_int n_sleeping; // of all teams: to wake one for nothing does no harm

static void relax(void) {
#    if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#    elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#    endif
}

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static bool over(atomic_int * n_rounds, int round) {
    return atomic_load_explicit(n_rounds, memory_order_acquire) != round;
}

static bool spin(atomic_int * n_rounds, int round, long long worked) {
    const long long quarter = worked / 4, most = quarter < LEAST ? LEAST : quarter > MOST ? MOST : quarter;
    const long long end = now_ns() + most;
    do {
        for (int i = 0; i < PAUSES; ++i) {
            if (over(n_rounds, round)) {
                return true;
            }
            relax();
        }
    } while (now_ns() < end);
    return false;
}

static void wait(atomic_int * n_rounds, int round, long long worked) {
    if (spin(n_rounds, round, worked)) {
        return;
    }
    atomic_fetch_add(&n_sleeping, 1);
    while (!over(n_rounds, round)) {
        syscall(SYS_futex, n_rounds, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0); // not where the round is over
    }
    atomic_fetch_sub(&n_sleeping, 1);
}

void velo_team_barrier(atomic_int * n_here, atomic_int * n_rounds, int n_threads) {
    static _Thread_local long long last; // barrier that this thread left

    const int round = atomic_load_explicit(n_rounds, memory_order_relaxed);
    if (atomic_fetch_add_explicit(n_here, 1, memory_order_acq_rel) == n_threads - 1) {
        atomic_store_explicit(n_here, 0, memory_order_relaxed);
        atomic_store(n_rounds, round + 1);
        if (atomic_load(&n_sleeping) > 0) {
            syscall(SYS_futex, n_rounds, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        }
        last = now_ns();
        return;
    }
    wait(n_rounds, round, now_ns() - last);
    last = now_ns();
}

#else

typedef int velo_no_team_barrier; // a file of C has something in it

#endif
