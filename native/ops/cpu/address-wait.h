// What the barrier needs from the system: to sleep until a number in memory changes, the time, the number of cores.
#pragma once

#include <stdatomic.h>

#if defined(_WIN32)
#    include <windows.h>
#else
#    include <time.h>
#endif
#if defined(__linux__)
#    include <limits.h>
#    include <linux/futex.h>
#    include <sched.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#elif defined(__APPLE__)
#    include <unistd.h>
#endif

// Sleeps until wake_all(number), or returns at once if it is not `value`. May return early, too.
static inline void sleep_while_equal(atomic_int * number, int value) {
#if defined(__linux__)
    syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#elif defined(_WIN32)
    WaitOnAddress(number, &value, sizeof(value), INFINITE);
#else // macOS before 14.4 has no public call for this
    (void) number;
    (void) value;
    nanosleep(&(struct timespec) {0, 50000}, NULL);
#endif
}

static inline void wake_all(atomic_int * number) {
#if defined(__linux__)
    syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#elif defined(_WIN32)
    WakeByAddressAll(number);
#else
    (void) number;
#endif
}

static inline long long now_ns(void) {
#if defined(_WIN32)
    LARGE_INTEGER ticks, per_second;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&per_second);
    return (long long) ((double) ticks.QuadPart * 1e9 / (double) per_second.QuadPart);
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
#endif
}

// Returns the number of cores that the process may use; 0 or less if the system does not say.
static inline int count_cores(void) {
#if defined(__linux__)
    cpu_set_t may;
    return sched_getaffinity(0, sizeof(may), &may) == 0 ? CPU_COUNT(&may) : 0;
#elif defined(_WIN32)
    DWORD_PTR may = 0, all = 0; // both 0 if the process has threads in several groups of processors
    GetProcessAffinityMask(GetCurrentProcess(), &may, &all);
    return may ? __builtin_popcountll(may) : (int) GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
#else
    return (int) sysconf(_SC_NPROCESSORS_ONLN);
#endif
}
