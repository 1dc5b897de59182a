// Failures of computing threads. An abort or an exception in one of them ends the computation, not the process: the
// thread leaves its team (cpu/team-run.cpp), the others follow at the next barrier, and the caller gets a status.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// State of a computing thread, in which exceptions are caught. It is on that thread's stack: a thread-local variable of
// a loaded library is allocated at its first use, and glibc ends the process if there is no memory for it.
struct velo_computing {
    long long left_barrier; // time at which it left the last barrier, in nanoseconds
};

// Returns this thread's state; NULL if it does not compute.
GGML_API struct velo_computing * velo_computing_here(void);
// Sets this thread's state. Returns false if there is no memory.
GGML_API bool velo_set_computing(struct velo_computing * thread);

// Stores a message, unless an earlier one was not taken yet.
GGML_API void velo_note_failure(const char * message);
// Copies the message and removes it. Returns false if there is none.
GGML_API bool velo_take_failure(char * message, size_t size);

#ifdef __cplusplus
}
#endif
