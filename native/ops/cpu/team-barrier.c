#ifndef _GNU_SOURCE
#    define _GNU_SOURCE // syscall, CPU_COUNT
#endif
#include "team-barrier.h"

#include "compute-failure.h"

#ifdef VELO_TEAM_BARRIER

#    include "address-wait.h"
#    include "lost-time.h"

#    include <limits.h>
#    include <stdbool.h>
#    ifdef GGML_USE_OPENMP
#        include <omp.h>
#    endif

enum { PAUSES = 16 }; // between looks at the clock
enum { ENDED = -1 };  // instead of a number of rounds

// Nanoseconds. Waking a thread takes 100 us on a virtual machine. The thread is late for the next barrier by as much,
// and the others sleep there and are late in turn, for hundreds of barriers. So a thread spins for PATIENCE before it
// sleeps. If that was in vain twice within SOON, another process occupies the core of the missing thread, which needs a
// free core: for a WHILE, spinning takes a quarter of the time that the thread worked, because threads with their own
// cores are no further apart.
static const long long PATIENCE = 300000, SOON = 5000000, WHILE = 20000000, LEAST = 20000, MOST = 2000000;
static const long long LATE = 50000;

static atomic_int   n_sleeping;           // of all teams: a needless wake does no harm
static atomic_llong in_vain, hurry_until; // the last time of spinning in vain; end of the time of short spins

static void relax(void) {
#    if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#    elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#    endif
}

static bool over(atomic_int * n_rounds, int round) {
    return atomic_load_explicit(n_rounds, memory_order_acquire) != round;
}

static long long clamped(long long x, long long least, long long most) {
    return x < least ? least : x > most ? most : x;
}

static bool spin(atomic_int * n_rounds, int round, long long begin, long long worked) {
    const bool      hurry = begin < atomic_load_explicit(&hurry_until, memory_order_relaxed);
    const long long end   = begin + clamped(worked / 4, hurry ? LEAST : PATIENCE, MOST);
    do {
        for (int i = 0; i < PAUSES; ++i) {
            if (over(n_rounds, round)) {
                return true;
            }
            relax();
        }
    } while (now_ns() < end);
    if (!hurry) {
        const long long since = end - atomic_exchange_explicit(&in_vain, end, memory_order_relaxed);
        if (since >= PATIENCE && since < SOON) { // less: another thread waited at the same barrier
            atomic_store_explicit(&hurry_until, end + WHILE, memory_order_relaxed);
        }
    }
    return false;
}

// Return the number of cores that the process may use, as it was at the first call.
static int n_cores(void) {
    static atomic_int known;
    int               n = atomic_load_explicit(&known, memory_order_relaxed);
    if (n == 0) {
#    ifdef GGML_USE_OPENMP
        n = omp_get_num_procs(); // of the process, even if each of its threads is bound to a core (OMP_PROC_BIND)
#    else
        n = count_cores();
#    endif
        n = n > 0 ? n : INT_MAX;
        atomic_store_explicit(&known, n, memory_order_relaxed);
    }
    return n;
}

// A thread that spins keeps its core from one that works if there are more threads than cores.
static void wait(atomic_int * n_rounds, int round, int n_threads, long long begin, long long worked) {
    if (n_threads <= n_cores() && spin(n_rounds, round, begin, worked)) {
        return;
    }
    atomic_fetch_add(&n_sleeping, 1);
    while (!over(n_rounds, round)) {
        sleep_while_equal(n_rounds, round);
    }
    atomic_fetch_sub(&n_sleeping, 1);
}

// A thread that runs reaches a barrier in about the time that the others work; one whose core is taken comes later.
static void note_wait(long long waited, long long worked) {
    if (waited > LATE + 2 * worked) {
        velo_add_lost_time(waited);
    }
}

static void wake(atomic_int * n_rounds) {
    if (atomic_load(&n_sleeping) > 0) {
        wake_all(n_rounds);
    }
}

// Without the thread that left, the round does not end, so no thread overwrites this.
void velo_end_team(void * n_rounds) {
    atomic_store((atomic_int *) n_rounds, ENDED);
    wake(n_rounds);
}

static int round_of(atomic_int * n_rounds) {
    const int round = atomic_load_explicit(n_rounds, memory_order_relaxed);
    if (round == ENDED) {
        velo_throw_team_ended();
    }
    return round;
}

void velo_team_barrier(atomic_int * n_here, atomic_int * n_rounds, int n_threads) {
    struct velo_computing * thread = velo_computing_here();

    const int round = round_of(n_rounds);
    if (atomic_fetch_add_explicit(n_here, 1, memory_order_acq_rel) == n_threads - 1) {
        atomic_store_explicit(n_here, 0, memory_order_relaxed);
        atomic_store(n_rounds, round + 1);
        wake(n_rounds);
        thread->left_barrier = now_ns();
        return;
    }
    const long long here = now_ns(), worked = here - thread->left_barrier;
    wait(n_rounds, round, n_threads, here, worked);
    round_of(n_rounds);
    thread->left_barrier = now_ns();
    note_wait(thread->left_barrier - here, worked);
}

#else

typedef int velo_no_team_barrier; // a C file must not be empty

#endif
