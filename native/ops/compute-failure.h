// Failures of threads that compute. An abort or an exception in one of them ends the computation, not the process: the
// thread leaves its team (cpu/team-run.cpp), the others follow at the next barrier, and the caller gets a status.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// A thread that computes, where an exception is caught. It lies on that thread's stack: a thread-local variable of a
// loaded library is allocated at its first use, and glibc ends the process when there is no memory for it.
struct velo_computing {
    long long left_barrier; // when it left the barrier before, in nanoseconds
};

// This thread's; NULL if it does not compute.
GGML_API struct velo_computing * velo_computing_here(void);
// False if there is no memory to remember it.
GGML_API bool velo_set_computing(struct velo_computing * thread);

// Keeps a message until it is taken; one that nobody took yet stays.
GGML_API void velo_note_failure(const char * message);
// Copies the message and forgets it. False if there is none.
GGML_API bool velo_take_failure(char * message, size_t size);

#ifdef __cplusplus
}
#endif
